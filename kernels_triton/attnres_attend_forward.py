"""Phase 1 of block attention residuals, forward: S pseudo-queries attend over N block representations, row by row.

For a row r: s[s, n] = <W_s, V_nr> rsqrt(mean(V_nr²) + eps), L[s] = logsumexp_n s and
O[s] = sum_n exp(s[s, n] - L[s]) V_nr.
A program takes a row or two and walks their hidden dimension twice in chunks: for the logits, then backwards for the
outputs, so that the L2 cache still holds the latest columns and sources cross the memory bus about once.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels_triton.attnres_common import INTERPRET, multiprocessors, rounded


@triton.jit
def split_dot(weight, value, acc, SPLIT: tl.constexpr, PRECISION: tl.constexpr):
    """acc + weight @ value, fp32 weights kept to about 16 bits: for bf16 values as the sum of two bf16 products."""
    if SPLIT:
        high = weight.to(value.dtype)
        low = (weight - high.to(tl.float32)).to(value.dtype)
        acc = tl.dot(high, value, acc)
        return tl.dot(low, value, acc)
    return tl.dot(weight, value.to(tl.float32), acc, input_precision=PRECISION)


@triton.jit
def plain_dot(left, right, acc, SPLIT: tl.constexpr, PRECISION: tl.constexpr):
    """acc + left @ right for two tensors in the caller's dtype, products exact and sums in fp32."""
    if SPLIT:
        return tl.dot(left, right, acc)
    return tl.dot(left.to(tl.float32), right.to(tl.float32), acc, input_precision=PRECISION)


@triton.jit
def _row_outputs(
    row,
    v_ptr,
    out_ptr,
    lse_ptr,
    logits_ptr,
    v_block_stride,
    v_row_stride,
    rows,
    hidden,
    blocks,
    queries,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """lse and outputs of one row from its logits in memory."""
    n = tl.arange(0, BLOCK_N)
    s = tl.arange(0, BLOCK_S)
    has_n = (n < blocks) & (row < rows)
    has_s = (s < queries) & (row < rows)
    at = (row * queries + s)[:, None] * blocks + n[None, :]
    score = tl.load(logits_ptr + at, mask=has_s[:, None] & has_n[None, :], other=float("-inf"))
    score = tl.where(has_s[:, None], score, 0.0)
    top = tl.max(score, axis=1)
    weight = tl.exp(score - top[:, None])
    total = tl.sum(weight, axis=1)
    tl.store(lse_ptr + s.to(tl.int64) * rows + row, top + tl.log(total), mask=has_s)
    weight = weight / total[:, None]
    out_at = out_ptr + (s.to(tl.int64) * rows + row) * hidden
    v_at = v_ptr + n.to(tl.int64) * v_block_stride + row * v_row_stride
    last = (tl.cdiv(hidden, CHUNK) - 1) * CHUNK
    for back in tl.range(0, hidden, CHUNK, num_stages=STAGES):
        d = last - back + tl.arange(0, CHUNK)
        live = d < hidden
        v = tl.load(v_at[:, None] + d[None, :], mask=has_n[:, None] & live[None, :], other=0.0)
        o = split_dot(weight, v, tl.zeros([BLOCK_S, CHUNK], tl.float32), SPLIT, PRECISION)
        tl.store(out_at[:, None] + d[None, :], rounded(o, out_ptr), mask=has_s[:, None] & live[None, :])


@triton.jit
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
    blocks,
    queries,
    eps,
    programs,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    STEPS: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES_A: tl.constexpr,
    STAGES_B: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    SOURCES: tl.constexpr = ROWS * BLOCK_N
    PAIRED_N: tl.constexpr = max(16, BLOCK_N)
    PAIRED_S: tl.constexpr = max(16, BLOCK_S)
    source = tl.arange(0, SOURCES)
    n = source % BLOCK_N
    s = tl.arange(0, BLOCK_S)
    same = (source[:, None] == source[None, :])[None, :, :]
    # Sixteen columns a product: warps share the steps, and no sum in a tensor core is longer than a row's share.
    column = tl.arange(0, STEPS)[None, :, None] * 16 + tl.arange(0, 16)[None, None, :]
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), programs):
        first = tl.cast(tile, tl.int64) * ROWS
        v_row = first + source // BLOCK_N
        v_ok = (v_row < rows) & (n < blocks)
        v_at = v_ptr + n.to(tl.int64) * v_block_stride + v_row * v_row_stride
        product = tl.zeros([STEPS, SOURCES, BLOCK_S], tl.float32)
        square = tl.zeros([STEPS, SOURCES, SOURCES], tl.float32)
        for chunk in tl.range(0, hidden, STEPS * 16, num_stages=STAGES_A):
            d = chunk + column
            live = d < hidden
            v = tl.load(v_at[:, None, None] + d, mask=v_ok[:, None, None] & live, other=0.0)
            w = tl.load(w_ptr + s[:, None, None] * w_stride + d, mask=(s < queries)[:, None, None] & live, other=0.0)
            left = tl.permute(v, (1, 0, 2))
            product = plain_dot(left, tl.permute(w, (1, 2, 0)), product, SPLIT, PRECISION)
            square = plain_dot(left, tl.permute(v, (1, 2, 0)), square, SPLIT, PRECISION)
        mean = tl.sum(tl.sum(tl.where(same, square, 0.0), axis=0), axis=1) / hidden
        rstd = tl.rsqrt(mean + eps)
        logits = tl.sum(product, axis=0) * rstd[:, None]
        at = (v_row[:, None] * queries + s[None, :]) * blocks + n[:, None]
        tl.store(logits_ptr + at, logits, mask=v_ok[:, None] & (s < queries)[None, :])
        tl.store(rstd_ptr + v_row * blocks + n, rstd, mask=v_ok)
        tl.debug_barrier()
        for t in tl.static_range(ROWS):
            _row_outputs(
                first + t, v_ptr, out_ptr, lse_ptr, logits_ptr, v_block_stride, v_row_stride, rows, hidden, blocks,
                queries, PAIRED_N, PAIRED_S, CHUNK, STAGES_B, SPLIT, PRECISION,
            )  # fmt: skip


@dataclass(frozen=True)
class Config:
    """How a launch is cut: rows a tile, 16-column steps and columns a turn, stages, warps, programs an SM."""

    rows: int = 1
    steps: int = 16
    chunk: int = 256
    stages_a: int = 3
    stages_b: int = 3
    warps: int = 4
    waves: int = 2


def default_config(hidden: int, blocks: int, queries: int, bits: int) -> Config:
    """Tile sizes for a call; `bits` are the values'."""
    if INTERPRET:
        wide = min(8192, max(16, triton.next_power_of_2(hidden)))
        return Config(steps=wide // 16, chunk=wide)
    block_n, block_s = max(16, triton.next_power_of_2(blocks)), max(16, triton.next_power_of_2(queries))
    steps = max(1, min(16, 8192 // (block_n * (block_n + block_s)) // 4 * 4))
    chunk = max(16, min(256, 8192 // block_s))
    if bits > 16:
        return Config(steps=min(steps, 8), chunk=min(chunk, 64), stages_a=2, stages_b=2)
    return Config(rows=2 if blocks <= 8 and queries <= 8 else 1, steps=steps, chunk=chunk)


def forward(
    v: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    logits: torch.Tensor,
    rstd: torch.Tensor,
    eps: float,
    config: Config | None = None,
) -> None:
    """Launches the forward: v `[N, R, D]`, w `[S, D]` into out `[S, R, D]` and lse `[S, R]` fp32 (both dense).

    `logits` `[R, S, N]` and `rstd` `[R, N]`, both fp32 and dense, are written too: the backward starts from them.
    """
    blocks, rows, hidden = v.shape
    queries = w.shape[0]
    if rows == 0 or queries == 0:
        return
    cfg = config or default_config(hidden, blocks, queries, v.element_size() * 8)
    tiles = triton.cdiv(rows, cfg.rows)
    programs = min(tiles, multiprocessors(v.device) * cfg.waves)
    block_n = max(triton.next_power_of_2(blocks), triton.cdiv(16, cfg.rows))
    split = v.dtype == w.dtype == torch.bfloat16 and not INTERPRET
    _forward[(programs,)](
        v, w, out, lse, logits, rstd, v.stride(0), v.stride(1), w.stride(0), rows, hidden, blocks, queries, eps,
        programs, ROWS=cfg.rows, BLOCK_N=block_n, BLOCK_S=max(8, triton.next_power_of_2(queries)), STEPS=cfg.steps,
        CHUNK=cfg.chunk, STAGES_A=cfg.stages_a, STAGES_B=cfg.stages_b, SPLIT=split,
        PRECISION="ieee" if torch.float32 in (v.dtype, w.dtype) else "tf32x3", num_warps=cfg.warps,
    )  # fmt: skip
