"""Phase 1 of block attention residuals, forward: S pseudo-queries attend over N block representations, row by row.

For a row r: s[s, n] = <W_s, V_nr> rsqrt(mean(V_nr²) + eps), L[s] = logsumexp_n s and
O[s] = sum_n exp(s[s, n] - L[s]) V_nr. Two launches: the first takes whole rows and leaves logits and L in memory, a few
hundred bytes a row; the second takes a slice of D for many rows.
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
def _logits(
    v_ptr,
    w_ptr,
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
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    SOURCES: tl.constexpr = ROWS * BLOCK_N
    source = tl.arange(0, SOURCES)
    n = source % BLOCK_N
    s = tl.arange(0, BLOCK_S)
    column = tl.arange(0, CHUNK)
    first = tl.program_id(0).to(tl.int64) * ROWS
    v_row = first + source // BLOCK_N
    v_ok = (v_row < rows) & (n < blocks)
    has_s = s < queries
    v_at = v_ptr + n.to(tl.int64) * v_block_stride + v_row * v_row_stride
    w_at = w_ptr + s * w_stride
    product = tl.zeros([SOURCES, BLOCK_S], tl.float32)
    square = tl.zeros([SOURCES, CHUNK // 8], tl.float32)
    # Sources pass through registers, one turn ahead: they are needed as numbers (squares) and as an operand.
    live = column < hidden
    v = tl.load(v_at[:, None] + column[None, :], mask=v_ok[:, None] & live[None, :], other=0.0)
    w = tl.load(w_at[:, None] + column[None, :], mask=has_s[:, None] & live[None, :], other=0.0)
    for chunk in range(0, hidden, CHUNK):
        d = chunk + CHUNK + column
        live = d < hidden
        v_next = tl.load(v_at[:, None] + d[None, :], mask=v_ok[:, None] & live[None, :], other=0.0)
        w_next = tl.load(w_at[:, None] + d[None, :], mask=has_s[:, None] & live[None, :], other=0.0)
        product = plain_dot(v, tl.trans(w), product, SPLIT, PRECISION)
        x = v.to(tl.float32)
        square += tl.sum(tl.reshape(x * x, [SOURCES, CHUNK // 8, 8]), axis=2)
        v = v_next
        w = w_next
    rstd = tl.rsqrt(tl.sum(square, axis=1) / hidden + eps)
    score = product * rstd[:, None]
    at = (v_row[:, None] * queries + s[None, :]) * blocks + n[:, None]
    tl.store(logits_ptr + at, score, mask=v_ok[:, None] & has_s[None, :])
    tl.store(rstd_ptr + v_row * blocks + n, rstd, mask=v_ok)
    score = tl.reshape(score, [ROWS, BLOCK_N, BLOCK_S])
    score = tl.where((tl.arange(0, BLOCK_N) < blocks)[None, :, None], score, float("-inf"))
    top = tl.max(score, axis=1)
    lse = top + tl.log(tl.sum(tl.exp(score - top[:, None, :]), axis=1))
    row = first + tl.arange(0, ROWS)
    tl.store(lse_ptr + s.to(tl.int64)[None, :] * rows + row[:, None], lse, mask=(row < rows)[:, None] & has_s[None, :])


@triton.jit
def _outputs(
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
    share,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    source = tl.arange(0, ROWS * BLOCK_N)
    target = tl.arange(0, ROWS * BLOCK_S)
    n = source % BLOCK_N
    s = target % BLOCK_S
    own = (target // BLOCK_S)[:, None] == (source // BLOCK_N)[None, :]
    d = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    live = d < hidden
    start = tl.program_id(1) * share
    end = tl.minimum(start + share, rows)
    for first in tl.range(start, end, ROWS, num_stages=STAGES):
        v_row = first + (source // BLOCK_N).to(tl.int64)
        o_row = first + (target // BLOCK_S).to(tl.int64)
        v_ok = (v_row < end) & (n < blocks)
        o_ok = (o_row < end) & (s < queries)
        v_at = v_ptr + n.to(tl.int64) * v_block_stride + v_row * v_row_stride
        v = tl.load(v_at[:, None] + d[None, :], mask=v_ok[:, None] & live[None, :], other=0.0)
        here = own & o_ok[:, None] & v_ok[None, :]
        score = tl.load(
            logits_ptr + (o_row * queries + s)[:, None] * blocks + n[None, :], mask=here, other=-float("inf")
        )
        lse_at = lse_ptr + (s.to(tl.int64) * rows + o_row)[:, None] + tl.zeros_like(source)[None, :]
        lse = tl.load(lse_at, mask=here, other=0.0)
        o = split_dot(tl.exp(score - lse), v, tl.zeros([ROWS * BLOCK_S, CHUNK], tl.float32), SPLIT, PRECISION)
        o_at = out_ptr + (s.to(tl.int64) * rows + o_row) * hidden
        tl.store(o_at[:, None] + d[None, :], rounded(o, out_ptr), mask=o_ok[:, None] & live[None, :])


@dataclass(frozen=True)
class Config:
    """How the two launches are cut: rows and columns a turn, warps; for the second also stages and programs an SM."""

    rows: int = 8
    chunk: int = 128
    warps: int = 4
    rows_b: int = 1
    chunk_b: int = 256
    stages_b: int = 3
    warps_b: int = 4
    waves_b: int = 4


def default_config(hidden: int, blocks: int, queries: int, bits: int) -> Config:
    """Tile sizes for a call; `bits` are the values'."""
    block_n, block_s = max(8, triton.next_power_of_2(blocks)), max(8, triton.next_power_of_2(queries))
    rows_b = 2 if blocks <= 8 and queries <= 8 else 1
    if INTERPRET:
        wide = min(8192, max(16, triton.next_power_of_2(hidden)))
        return Config(rows=max(1, 16 // block_n), chunk=wide, rows_b=1, chunk_b=wide)
    if bits > 16:
        return Config(
            rows=max(1, 32 // block_n), chunk=32, rows_b=1, chunk_b=max(16, min(64, 4096 // block_s)), stages_b=2
        )
    rows = max(1, 64 // block_n)
    chunk = 128 if rows * block_n * (128 + block_s) <= 16384 else 64
    return Config(rows=rows, chunk=chunk, rows_b=rows_b, chunk_b=max(32, min(256, 8192 // max(16, block_s))))


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
    precision = "ieee" if torch.float32 in (v.dtype, w.dtype) else "tf32x3"
    _logits[(triton.cdiv(rows, cfg.rows),)](
        v, w, lse, logits, rstd, v.stride(0), v.stride(1), w.stride(0), rows, hidden, blocks, queries, eps,
        ROWS=cfg.rows, BLOCK_N=max(triton.next_power_of_2(blocks), triton.cdiv(16, cfg.rows)),
        BLOCK_S=max(8, triton.next_power_of_2(queries)), CHUNK=cfg.chunk,
        SPLIT=v.dtype == w.dtype == torch.bfloat16 and not INTERPRET, PRECISION=precision, num_warps=cfg.warps,
        num_stages=1,
    )  # fmt: skip
    slices = triton.cdiv(hidden, cfg.chunk_b)
    tiles = triton.cdiv(rows, cfg.rows_b)
    lines = max(1, min(tiles, triton.cdiv(cfg.waves_b * multiprocessors(v.device), slices)))
    share = triton.cdiv(tiles, lines) * cfg.rows_b
    _outputs[(slices, triton.cdiv(rows, share))](
        v, out, lse, logits, v.stride(0), v.stride(1), rows, hidden, blocks, queries, share, ROWS=cfg.rows_b,
        BLOCK_N=max(triton.next_power_of_2(blocks), triton.cdiv(16, cfg.rows_b)),
        BLOCK_S=max(triton.next_power_of_2(queries), triton.cdiv(16, cfg.rows_b)), CHUNK=cfg.chunk_b,
        STAGES=cfg.stages_b, SPLIT=v.dtype == torch.bfloat16 and not INTERPRET, PRECISION=precision,
        num_warps=cfg.warps_b,
    )  # fmt: skip
