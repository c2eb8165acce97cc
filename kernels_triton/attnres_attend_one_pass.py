"""Phase 1 of block attention residuals, forward, in one reading of the sources: a row stays in shared memory, in Gluon.

Persistent programs, one or two a multiprocessor, walk over rows. `cp.async` fills a ring of rows in shared memory while
the row before is worked on: logits by tensor cores (a warp takes its columns of every chunk, and keeps these columns of
the pseudo-queries in registers throughout), then the softmax, then the weighted sums in fp32 from the same memory.
"""

# mypy: disallow-untyped-defs=False
# ruff: noqa: RUF005 - a Gluon kernel cannot unpack a tuple

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from kernels_triton.attnres_common import INTERPRET, multiprocessors

MAX_BLOCKS = 8
MAX_QUERIES = 8
MAX_HIDDEN = 4096
"""Three rows of 8 sources fit; with two (7168) the two passes of `attnres_attend_forward` are faster."""
NARROW = 2048
"""Hidden sizes up to here leave room for two programs an SM."""
_RING_BYTES = 221_184
"""Of the 228 KB of shared memory of an SM; the rest holds weights and sums on their way."""


@gluon.jit
def _start_loading(
    ring,
    slot,
    v_ptr,
    v_block_stride,
    v_row_stride,
    row,
    rows,
    hidden,
    N: gl.constexpr,
    EVEN: gl.constexpr,
    CHUNKS: gl.constexpr,
    CHUNK: gl.constexpr,
):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [gl.num_warps(), 1], [1, 0])
    n = gl.arange(0, 8, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, layout))
    start = v_ptr + gl.cast(row, gl.int64) * v_row_stride + gl.expand_dims(n.to(gl.int64) * v_block_stride, 1)
    for chunk in gl.static_range(CHUNKS):
        d = chunk * CHUNK + column
        mask = gl.expand_dims((n < N) & (row < rows), 1) & gl.expand_dims(EVEN | (d < hidden), 0)
        tile = ring.index(slot * CHUNKS + chunk)
        async_copy.async_copy_global_to_shared(tile, start + gl.expand_dims(d, 0), mask=mask)
    async_copy.commit_group()


@gluon.jit
def _forward(
    v_ptr,
    w_ptr,
    out_ptr,
    lse_ptr,
    logits_ptr,
    rstd_ptr,
    v_block_stride,
    v_row_stride,
    w_stride,
    rows,
    hidden,
    eps,
    programs,
    N: gl.constexpr,
    S: gl.constexpr,
    EVEN: gl.constexpr,
    CHUNKS: gl.constexpr,
    CHUNK: gl.constexpr,
    STAGES: gl.constexpr,
):
    """N sources and S pseudo-queries, at most 8 each, stand as 8; EVEN: the hidden size is CHUNKS times CHUNK."""
    WARPS: gl.constexpr = gl.num_warps()
    OWN: gl.constexpr = CHUNK // WARPS
    WIDE: gl.constexpr = CHUNK // (32 * WARPS)
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    score_layout: gl.constexpr = gl.BlockedLayout([1, 2], [8, 4], [1, WARPS], [1, 0])
    sum_layout: gl.constexpr = gl.BlockedLayout([8, 8, WIDE], [1, 1, 32], [1, 1, WARPS], [2, 1, 0])
    out_layout: gl.constexpr = gl.BlockedLayout([8, WIDE], [1, 32], [1, WARPS], [1, 0])
    zero_layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    element: gl.constexpr = v_ptr.dtype.element_ty

    ring = gl.allocate_shared_memory(element, [STAGES * CHUNKS, 8, CHUNK], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    weights = gl.allocate_shared_memory(gl.float32, [8, 8], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    for tile in gl.static_range(STAGES * CHUNKS):
        # What no copy ever writes, sources from N on and columns from D on, must be 0: 0 times NaN is NaN.
        ring.index(tile).store(gl.zeros([8, CHUNK], element, zero_layout))

    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, left)))
    query = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, left)))
    own = gl.arange(0, OWN, layout=gl.SliceLayout(0, gl.SliceLayout(1, left)))
    query = gl.expand_dims(gl.expand_dims(query, 0), 2)
    own = gl.expand_dims(gl.expand_dims(warp * OWN, 1), 2) + gl.expand_dims(gl.expand_dims(own, 0), 1)
    kept = ()
    for chunk in gl.static_range(CHUNKS):
        w_mask = (query < S) & (EVEN | (chunk * CHUNK + own < hidden))
        w = gl.load(w_ptr + query * w_stride + chunk * CHUNK + own, mask=w_mask, other=0.0)
        # Said once more, so that the half of the operand's registers that is always 0 takes no room.
        kept = kept + (gl.where(query < 8, w, gl.zeros_like(w)),)  # type: ignore[assignment]

    n = gl.arange(0, 8, layout=gl.SliceLayout(0, score_layout))
    s = gl.arange(0, 8, layout=gl.SliceLayout(1, score_layout))
    n_row = gl.expand_dims(n, 0)
    s_column = gl.expand_dims(s, 1)
    column = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, out_layout))
    out_s = gl.arange(0, 8, layout=gl.SliceLayout(1, out_layout))

    first = gl.program_id(0)
    for stage in gl.static_range(STAGES - 1):
        _start_loading(
            ring, stage, v_ptr, v_block_stride, v_row_stride, first + stage * programs, rows, hidden, N, EVEN, CHUNKS,
            CHUNK,
        )  # fmt: skip
    slot = 0
    for row in range(first, rows, programs):
        free = gl.where(slot == 0, STAGES - 1, slot - 1)
        _start_loading(
            ring, free, v_ptr, v_block_stride, v_row_stride, row + (STAGES - 1) * programs, rows, hidden, N, EVEN,
            CHUNKS, CHUNK,
        )  # fmt: skip
        async_copy.wait_group(STAGES - 1)
        product = gl.zeros([WARPS, 16, 8], gl.float32, mma)
        square = gl.zeros([WARPS, OWN, 8], gl.float32, right)
        for chunk in gl.static_range(CHUNKS):
            v = ring.index(slot * CHUNKS + chunk).reshape([8, WARPS, OWN]).permute([1, 2, 0]).load(right)
            product = mma_v2(kept[chunk], v, product)
            wide = v.to(gl.float32)
            square += wide * wide
        square_sum = gl.convert_layout(gl.sum(gl.sum(square, 1), 0), gl.SliceLayout(0, score_layout))
        rstd = gl.rsqrt(square_sum / hidden + eps)
        own_queries, _ = gl.split(product.reshape([WARPS, 2, 8, 8]).permute([0, 2, 3, 1]))
        score = gl.convert_layout(gl.sum(own_queries, 0), score_layout) * gl.expand_dims(rstd, 0)
        row64 = gl.cast(row, gl.int64)
        gl.store(logits_ptr + (row64 * S + s_column) * N + n_row, score, mask=(s_column < S) & (n_row < N))
        gl.store(rstd_ptr + row64 * N + n, rstd, mask=n < N)
        score = gl.where(n_row < N, score, float("-inf"))
        top = gl.max(score, 1)
        weight = gl.exp(score - gl.expand_dims(top, 1))
        total = gl.sum(weight, 1)
        gl.store(lse_ptr + s.to(gl.int64) * rows + row64, top + gl.log(total), mask=s < S)
        weights.store(weight / gl.expand_dims(total, 1))
        p = gl.expand_dims(weights.load(gl.SliceLayout(2, sum_layout)), 2)
        out_at = gl.expand_dims(out_ptr + (out_s.to(gl.int64) * rows + row64) * hidden, 1)
        for chunk in gl.static_range(CHUNKS):
            x = ring.index(slot * CHUNKS + chunk).load(gl.SliceLayout(0, sum_layout)).to(gl.float32)
            out = gl.convert_layout(gl.sum(p * gl.expand_dims(x, 0), 1), out_layout)
            d = chunk * CHUNK + column
            out_mask = gl.expand_dims((S == 8) | (out_s < S), 1) & gl.expand_dims(EVEN | (d < hidden), 0)
            gl.store(out_at + gl.expand_dims(d, 0), out.to(out_ptr.dtype.element_ty), mask=out_mask)
        slot = gl.where(slot == STAGES - 1, 0, slot + 1)


@dataclass(frozen=True)
class Tile:
    """How a row is cut: columns a chunk, warps (128 columns of a chunk each), rows in the ring, programs an SM."""

    chunk: int = 1024
    warps: int = 8
    stages: int = 3
    programs: int = 1


def choose(hidden: int) -> Tile:
    """The fastest of those tried on an H200 (docs/performance.md)."""
    narrow = Tile(chunk=512, warps=4, programs=2)
    tile = narrow if hidden <= NARROW else Tile()
    row_bytes = 16 * triton.cdiv(hidden, tile.chunk) * tile.chunk
    return replace(tile, stages=min(4, _RING_BYTES // (tile.programs * row_bytes)))


@lru_cache
def _hopper(index: int) -> bool:
    return torch.cuda.get_device_capability(index)[0] == 9


def fits(v: torch.Tensor, w: torch.Tensor) -> bool:
    """Whether `forward` takes v `[N, R, D]` and w `[S, D]`: bf16 on Hopper, whole 16-byte pieces, a ring of rows."""
    return (
        not INTERPRET
        and v.is_cuda
        and v.dtype == w.dtype == torch.bfloat16
        and v.shape[0] <= MAX_BLOCKS
        and w.shape[0] <= MAX_QUERIES
        and v.shape[2] <= MAX_HIDDEN
        and all(count % 16 == 0 for count in (v.shape[2], v.stride(0), v.stride(1)))
        and v.data_ptr() % 16 == 0
        and _hopper(torch.cuda.current_device() if v.device.index is None else v.device.index)
    )


def constants(blocks: int, queries: int, hidden: int, tile: Tile) -> dict[str, int | bool]:
    """The kernel's compile-time arguments."""
    return {
        "N": blocks,
        "S": queries,
        "EVEN": hidden % tile.chunk == 0,
        "CHUNKS": triton.cdiv(hidden, tile.chunk),
        "CHUNK": tile.chunk,
        "STAGES": tile.stages,
    }


def forward(
    v: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    logits: torch.Tensor,
    rstd: torch.Tensor,
    eps: float,
    tile: Tile | None = None,
) -> None:
    """As `attnres_attend_forward.forward`, for tensors that `fits` names, and at least one row and query."""
    blocks, rows, hidden = v.shape
    tile = tile or choose(hidden)
    programs = min(rows, tile.programs * multiprocessors(v.device))
    _forward[(programs,)](
        v, w, out, lse, logits, rstd, v.stride(0), v.stride(1), w.stride(0), rows, hidden, eps, programs,
        **constants(blocks, w.shape[0], hidden, tile), num_warps=tile.warps,
    )  # fmt: skip
