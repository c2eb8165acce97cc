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

from kernels_triton import attnres_attend_one_pass
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
def chunk_dot(left, right, CHUNK: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr):
    """left @ right over CHUNK columns, to be added to other chunks with rounding: tensor cores truncate as they add.

    The limit on imprecise sums has no other effect than to keep the compiler from making the addition theirs again.
    """
    if SPLIT:
        return tl.dot(left, right, max_num_imprecise_acc=CHUNK)
    return tl.dot(left.to(tl.float32), right.to(tl.float32), input_precision=PRECISION)


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
        product += chunk_dot(v, tl.trans(w), CHUNK, SPLIT, PRECISION)
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
    GROUPS: tl.constexpr,
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
    source_row = source // BLOCK_N
    target_row = target // BLOCK_S
    own = target_row[:, None] == source_row[None, :]
    d = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    live = d < hidden
    start = tl.program_id(1) * share
    end = tl.minimum(start + share, rows)
    for first in tl.range(start, end, ROWS, num_stages=STAGES):
        v_row = first + source_row.to(tl.int64)
        o_row = first + target_row.to(tl.int64)
        v_ok = (v_row < end) & (n < blocks)
        v_at = v_ptr + n.to(tl.int64) * v_block_stride + v_row * v_row_stride
        v = tl.load(v_at[:, None] + d[None, :], mask=v_ok[:, None] & live[None, :], other=0.0)
        for group in tl.static_range(GROUPS):
            s = group * BLOCK_S + target % BLOCK_S
            o_ok = (o_row < end) & (s < queries)
            here = own & o_ok[:, None] & v_ok[None, :]
            at = (o_row * queries + s)[:, None] * blocks + n[None, :]
            score = tl.load(logits_ptr + at, mask=here, other=-float("inf"))
            lse_at = lse_ptr + (s.to(tl.int64) * rows + o_row)[:, None] + tl.zeros_like(source)[None, :]
            lse = tl.load(lse_at, mask=here, other=0.0)
            weight = tl.exp(score - lse)
            o = split_dot(weight, v, tl.zeros([ROWS * BLOCK_S, CHUNK], tl.float32), SPLIT, PRECISION)
            o_at = out_ptr + (s.to(tl.int64) * rows + o_row) * hidden
            tl.store(o_at[:, None] + d[None, :], rounded(o, out_ptr), mask=o_ok[:, None] & live[None, :])


@triton.jit
def _isolate(
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
    ROWS: tl.constexpr,
    LOOK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Outputs of tiles that hold a row which is not finite, once more and row by row.

    The rows of a tile shared a product, where such a row reached its neighbours: 0 times NaN is NaN.
    """
    n = tl.arange(0, BLOCK_N)
    s = tl.arange(0, BLOCK_S)
    has_s = s < queries
    start = tl.program_id(0).to(tl.int64) * LOOK
    seen = start + tl.arange(0, LOOK)
    lse_at = lse_ptr + s.to(tl.int64)[:, None] * rows
    lse = tl.load(lse_at + seen[None, :], mask=has_s[:, None] & (seen < rows)[None, :], other=0.0)
    bad = tl.max((lse - lse != 0.0).to(tl.int32), axis=0)
    if tl.max(bad, axis=0) > 0:
        for row in range(start, tl.minimum(start + LOOK, rows)):
            if tl.max(tl.where(seen // ROWS == row // ROWS, bad, 0), axis=0) > 0:
                row64 = tl.cast(row, tl.int64)
                here = has_s[:, None] & (n < blocks)[None, :]
                at = (row64 * queries + s)[:, None] * blocks + n[None, :]
                score = tl.load(logits_ptr + at, mask=here, other=-float("inf"))
                own = tl.load(lse_ptr + s.to(tl.int64) * rows + row64, mask=has_s, other=0.0)
                weight = tl.exp(score - own[:, None])
                v_at = v_ptr + n.to(tl.int64) * v_block_stride + row64 * v_row_stride
                out_at = out_ptr + (s.to(tl.int64) * rows + row64) * hidden
                for chunk in range(0, hidden, CHUNK):
                    d = chunk + tl.arange(0, CHUNK)
                    live = d < hidden
                    v = tl.load(v_at[:, None] + d[None, :], mask=(n < blocks)[:, None] & live[None, :], other=0.0)
                    o = split_dot(weight, v, tl.zeros([BLOCK_S, CHUNK], tl.float32), SPLIT, PRECISION)
                    tl.store(out_at[:, None] + d[None, :], rounded(o, out_ptr), mask=has_s[:, None] & live[None, :])


@dataclass(frozen=True)
class Config:
    """How the two launches are cut: rows and columns a turn, warps; for the second also stages and programs an SM."""

    rows: int = 8
    chunk: int = 128
    warps: int = 4
    rows_b: int = 2
    chunk_b: int = 256
    stages_b: int = 4
    warps_b: int = 4
    waves_b: int = 8


def default_config(hidden: int, blocks: int, queries: int, split: bool) -> Config:
    """Tile sizes for a call, the fastest of those tried on an H200 in bf16; `split` is for bf16 throughout."""
    block_n, block_s = max(8, triton.next_power_of_2(blocks)), max(8, triton.next_power_of_2(queries))
    rows_b = 2 if blocks <= 8 else 1
    if INTERPRET:
        wide = min(8192, max(16, triton.next_power_of_2(hidden)))
        return Config(rows=max(1, 16 // block_n), chunk=wide, rows_b=rows_b, chunk_b=wide)
    if not split:
        return Config(rows=max(1, 32 // block_n), chunk=32, rows_b=rows_b, chunk_b=64, stages_b=2)
    chunk_b = 256 if block_n <= 16 else 64
    if hidden <= 2048 and block_n <= 16 and block_s <= 16:
        return Config(rows=32 // block_n, warps=2, rows_b=rows_b, chunk_b=chunk_b)
    return Config(rows=max(1, 64 // block_n), chunk=128 if block_s <= 32 else 64, rows_b=rows_b, chunk_b=chunk_b)


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
    if config is None and attnres_attend_one_pass.fits(v, w):
        attnres_attend_one_pass.forward(v, w, out, lse, logits, rstd, eps)
        return
    split = v.dtype == w.dtype == torch.bfloat16 and not INTERPRET
    cfg = config or default_config(hidden, blocks, queries, split)
    precision = "ieee" if torch.float32 in (v.dtype, w.dtype) else "tf32x3"
    _logits[(triton.cdiv(rows, cfg.rows),)](
        v, w, lse, logits, rstd, v.stride(0), v.stride(1), w.stride(0), rows, hidden, blocks, queries, eps,
        ROWS=cfg.rows, BLOCK_N=max(triton.next_power_of_2(blocks), triton.cdiv(16, cfg.rows)),
        BLOCK_S=max(8, triton.next_power_of_2(queries)), CHUNK=cfg.chunk,
        SPLIT=split, PRECISION=precision, num_warps=cfg.warps,
        num_stages=1,
    )  # fmt: skip
    slices = triton.cdiv(hidden, cfg.chunk_b)
    tiles = triton.cdiv(rows, cfg.rows_b)
    lines = max(1, min(tiles, triton.cdiv(cfg.waves_b * multiprocessors(v.device), slices)))
    share = triton.cdiv(tiles, lines) * cfg.rows_b
    block_s = triton.cdiv(16, cfg.rows_b)  # a product over a tile's targets has 16 rows
    _outputs[(slices, triton.cdiv(rows, share))](
        v, out, lse, logits, v.stride(0), v.stride(1), rows, hidden, blocks, queries, share,
        GROUPS=triton.cdiv(queries, block_s), ROWS=cfg.rows_b,
        BLOCK_N=max(triton.next_power_of_2(blocks), triton.cdiv(16, cfg.rows_b)),
        BLOCK_S=block_s, CHUNK=cfg.chunk_b,
        STAGES=cfg.stages_b, SPLIT=v.dtype == torch.bfloat16 and not INTERPRET, PRECISION=precision,
        num_warps=cfg.warps_b,
    )  # fmt: skip
    if cfg.rows_b > 1:
        _isolate[(triton.cdiv(rows, 64),)](
            v, out, lse, logits, v.stride(0), v.stride(1), rows, hidden, blocks, queries, ROWS=cfg.rows_b, LOOK=64,
            BLOCK_N=max(16, triton.next_power_of_2(blocks)), BLOCK_S=max(16, triton.next_power_of_2(queries)),
            CHUNK=128,
            SPLIT=v.dtype == torch.bfloat16 and not INTERPRET, PRECISION=precision, num_warps=4,
        )  # fmt: skip
