"""What the three attention kernels share: which tile a program owns, where its sequence lies, and its loads."""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl

# The interpreter's bf16 arithmetic is wrong, so kernels compute in fp32 there, and only there.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
# Sizes that differ from call to call: specialising on them would only compile the same kernel again.
SIZES = (
    "batch", "heads", "kv_heads", "seqlen_q", "seqlen_k", "tokens_q", "tokens_k", "tiles", "group",
    "dlse_stride_b", "dlse_stride_h", "dlse_stride_s",
)  # fmt: skip
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def tile_and_pair(pid, tiles, pairs, group, HEAVY_LAST: tl.constexpr):
    """(tile, sequence-and-head pair) of a program.

    `group` pairs are walked together, tile by tile, so that their keys and values stay in L2. Where later tiles hold
    more work (causal), they come first, so that the machine's last wave is made of light ones.
    """
    per_group = group * tiles
    first = (pid // per_group) * group
    size = tl.minimum(group, pairs - first)
    rest = pid % per_group
    tile = rest // size
    if HEAVY_LAST:
        tile = tiles - 1 - tile
    return tile, first + rest % size


@triton.jit
def sequence(cu_ptr, batch_index, batch, dense_length, tokens, VARLEN: tl.constexpr):
    """(first row, length, end of the rows that belong to this sequence index).

    In packed input index `batch` stands for the rows beyond cu_seqlens[-1], which form no sequence: length 0, with
    rows to be filled.
    """
    if VARLEN:
        start = tl.load(cu_ptr + batch_index)
        if batch_index == batch:
            length = 0
            rows = tokens - start
        else:
            length = tl.load(cu_ptr + batch_index + 1) - start
            rows = length
    else:
        start = 0
        length = dense_length
        rows = dense_length
    return start, length, rows


@triton.jit
def load_tile(desc, batch_index, head, row, ROWS: tl.constexpr, D: tl.constexpr):
    """Rows `row … row + ROWS` of one head as `[ROWS, D]`; what lies outside the tensor is 0."""
    tile = desc.load([batch_index, head, row, 0]).reshape(ROWS, D)
    if INTERPRETED:
        tile = tile.to(tl.float32)
    return tile
