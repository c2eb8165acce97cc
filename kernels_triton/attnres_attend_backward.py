"""Phase 1 of block attention residuals, backward.

With p = exp(s - L), g[s, n] = <dO_s, V_n>, delta[s] = sum_n p g and ds = p (g - delta + dL), per row:
dV_n = sum_s (p dO_s + ds r_n W_s) - V_n (r_n²/D) sum_s ds s, and dW_s = sum over rows and n of ds r_n V_n.

Two launches. The first takes whole rows: it reads V and dO for g, and leaves p, ds r and V's own factor in memory, a
few hundred bytes a row. The second takes a slice of D for many rows: it reads V and dO again and writes dV, while the
slice of W and the sum for dW stay in registers.
"""

# mypy: disallow-untyped-defs=False
# ruff: noqa: RUF005 - a Triton kernel cannot unpack a tuple

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels_triton.attnres_attend_forward import plain_dot, split_dot
from kernels_triton.attnres_common import INTERPRET, column_sum, multiprocessors, rounded


@triton.jit
def _row_weights(
    row,
    v_ptr,
    do_ptr,
    lse_ptr,
    dl_ptr,
    logits_ptr,
    rstd_ptr,
    p_ptr,
    coef_ptr,
    norm_ptr,
    v_block_stride,
    v_row_stride,
    do_query_stride,
    do_row_stride,
    rows,
    hidden,
    blocks,
    queries,
    HAS_DL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """p, ds r `[S, N]` and -r² / D sum_s ds s `[N]` of one row, written to memory."""
    row64 = tl.cast(row, tl.int64)
    n = tl.arange(0, BLOCK_N)
    s = tl.arange(0, BLOCK_S)
    has_n = n < blocks
    has_s = s < queries
    at = (row64 * queries + s)[:, None] * blocks + n[None, :]
    here = has_s[:, None] & has_n[None, :]
    logit = tl.load(logits_ptr + at, mask=here, other=0.0)
    lse = tl.load(lse_ptr + s.to(tl.int64) * rows + row64, mask=has_s, other=0.0)
    rstd = tl.load(rstd_ptr + row64 * blocks + n, mask=has_n, other=0.0)
    v_at = v_ptr + n.to(tl.int64) * v_block_stride + row64 * v_row_stride
    do_at = do_ptr + s.to(tl.int64) * do_query_stride + row64 * do_row_stride
    # Each warp takes its own columns: so small a product has no other way to share the work.
    part = tl.arange(0, SPLITS) * CHUNK
    g = tl.zeros([SPLITS, BLOCK_S, BLOCK_N], tl.float32)
    for chunk in tl.range(0, hidden, SPLITS * CHUNK, num_stages=STAGES):
        d = chunk + part[:, None, None] + tl.arange(0, CHUNK)[None, None, :]
        v = tl.load(v_at[None, :, None] + d, mask=has_n[None, :, None] & (d < hidden), other=0.0)
        e = chunk + part[:, None, None] + tl.arange(0, CHUNK)[None, :, None]
        do = tl.load(do_at[None, None, :] + e, mask=has_s[None, None, :] & (e < hidden), other=0.0)
        g = plain_dot(tl.permute(do, (0, 2, 1)), tl.permute(v, (0, 2, 1)), g, SPLIT, PRECISION)
    g = tl.sum(g, axis=0)
    p = tl.where(here, tl.exp(logit - lse[:, None]), 0.0)
    away = g - tl.sum(p * g, axis=1)[:, None]
    if HAS_DL:
        away += tl.load(dl_ptr + s.to(tl.int64) * rows + row64, mask=has_s, other=0.0).to(tl.float32)[:, None]
    ds = p * away
    tl.store(p_ptr + at, p, mask=here)
    tl.store(coef_ptr + at, ds * rstd[None, :], mask=here)
    norm = tl.sum(ds * logit, axis=0) * rstd * rstd / hidden
    tl.store(norm_ptr + row64 * blocks + n, -norm, mask=has_n)


@triton.jit
def _first_step(
    v_ptr, do_ptr, lse_ptr, dl_ptr, logits_ptr, rstd_ptr, p_ptr, coef_ptr, norm_ptr,
    v_block_stride, v_row_stride, do_query_stride, do_row_stride, rows, hidden, blocks, queries, programs,
    HAS_DL: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr,
    STAGES: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for row in range(tl.program_id(0), rows, programs):
        _row_weights(
            row, v_ptr, do_ptr, lse_ptr, dl_ptr, logits_ptr, rstd_ptr, p_ptr, coef_ptr, norm_ptr, v_block_stride,
            v_row_stride, do_query_stride, do_row_stride, rows, hidden, blocks, queries, HAS_DL, BLOCK_N, BLOCK_S,
            SPLITS, CHUNK, STAGES, SPLIT, PRECISION,
        )  # fmt: skip


@triton.jit
def _query_slice(w_ptr, w_stride, d, s, hidden, queries):
    """W `[rows of a tile times queries, columns]` at the queries `s` and the columns `d`."""
    return tl.load(
        w_ptr + s[:, None] * w_stride + d[None, :], mask=(s < queries)[:, None] & (d < hidden)[None, :], other=0.0
    )


@triton.jit
def _second_step(
    v_ptr,
    w_ptr,
    do_ptr,
    p_ptr,
    coef_ptr,
    norm_ptr,
    dv_ptr,
    partial_ptr,
    v_block_stride,
    v_row_stride,
    w_stride,
    do_query_stride,
    do_row_stride,
    rows,
    hidden,
    blocks,
    queries,
    share,
    ACCUMULATE: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dV of a slice of D for `share` rows, and these rows' part of dW; queries in groups of BLOCK_S."""
    source = tl.arange(0, ROWS * BLOCK_N)
    target = tl.arange(0, ROWS * BLOCK_S)
    n = source % BLOCK_N
    source_row = source // BLOCK_N
    target_row = target // BLOCK_S
    own = target_row[:, None] == source_row[None, :]
    own_t = source_row[:, None] == target_row[None, :]
    same = source[:, None] == source[None, :]
    d = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    live = d < hidden
    start = tl.program_id(1) * share
    end = tl.minimum(start + share, rows)
    w = (_query_slice(w_ptr, w_stride, d, target % BLOCK_S, hidden, queries),)
    dw = (tl.zeros([ROWS * BLOCK_S, CHUNK], tl.float32),)
    for group in tl.static_range(1, GROUPS):
        more = _query_slice(w_ptr, w_stride, d, group * BLOCK_S + target % BLOCK_S, hidden, queries)
        w = w + (more,)  # type: ignore[assignment]
        dw = dw + (tl.zeros([ROWS * BLOCK_S, CHUNK], tl.float32),)  # type: ignore[assignment]
    for first in tl.range(start, end, ROWS, num_stages=STAGES):
        v_row = first + source_row.to(tl.int64)
        o_row = first + target_row.to(tl.int64)
        v_ok = (v_row < end) & (n < blocks)
        v_mask = v_ok[:, None] & live[None, :]
        v_at = v_ptr + n.to(tl.int64) * v_block_stride + v_row * v_row_stride
        v = tl.load(v_at[:, None] + d[None, :], mask=v_mask, other=0.0)
        norm_at = norm_ptr + (v_row * blocks + n)[:, None] + tl.zeros_like(source)[None, :]
        norm = tl.load(norm_at, mask=same & v_ok[:, None], other=0.0)
        dv = split_dot(norm, v, tl.zeros([ROWS * BLOCK_N, CHUNK], tl.float32), SPLIT, PRECISION)
        added = ()
        for group in tl.static_range(GROUPS):
            # Each small matrix is loaded as its product wants it, so that every load can run ahead of its turn.
            s = group * BLOCK_S + target % BLOCK_S
            o_ok = (o_row < end) & (s < queries)
            do_at = do_ptr + s.to(tl.int64) * do_query_stride + o_row * do_row_stride
            do = tl.load(do_at[:, None] + d[None, :], mask=o_ok[:, None] & live[None, :], other=0.0)
            at = (o_row * queries + s)[:, None] * blocks + n[None, :]
            coef = tl.load(coef_ptr + at, mask=own & o_ok[:, None] & v_ok[None, :], other=0.0)
            at_t = (o_row * queries + s)[None, :] * blocks + n[:, None]
            here_t = own_t & o_ok[None, :] & v_ok[:, None]
            p_t = tl.load(p_ptr + at_t, mask=here_t, other=0.0)
            coef_t = tl.load(coef_ptr + at_t, mask=here_t, other=0.0)
            dv = split_dot(p_t, do, dv, SPLIT, PRECISION)
            dv = split_dot(coef_t, w[group], dv, SPLIT, PRECISION)
            added = added + (split_dot(coef, v, dw[group], SPLIT, PRECISION),)  # type: ignore[assignment]
        dw = added  # type: ignore[assignment]
        dv_at = dv_ptr + (n.to(tl.int64) * rows + v_row) * hidden
        if ACCUMULATE:
            dv += tl.load(dv_at[:, None] + d[None, :], mask=v_mask, other=0.0).to(tl.float32)
        tl.store(dv_at[:, None] + d[None, :], rounded(dv, dv_ptr), mask=v_mask)
    for group in tl.static_range(GROUPS):
        total = tl.sum(tl.reshape(dw[group], [ROWS, BLOCK_S, CHUNK]), axis=0)
        s = group * BLOCK_S + tl.arange(0, BLOCK_S)
        at = (tl.program_id(1).to(tl.int64) * queries + s)[:, None] * hidden + d[None, :]
        tl.store(partial_ptr + at, total, mask=(s < queries)[:, None] & live[None, :])


@dataclass(frozen=True)
class Config:
    """How the two launches are cut.

    First: `splits` of `chunk` columns a turn (one a warp), stages, warps, programs an SM. Second: rows and columns a
    turn, stages, warps, programs an SM.
    """

    splits: int = 2
    chunk: int = 64
    stages: int = 4
    warps: int = 2
    waves: int = 8
    rows_b: int = 2
    chunk_b: int = 512
    stages_b: int = 3
    warps_b: int = 4
    waves_b: int = 4


def default_config(hidden: int, blocks: int, queries: int, split: bool) -> Config:
    """Tile sizes for a call, the fastest of those tried on an H200 in bf16; `split` is for bf16 throughout."""
    block_n, block_s = max(16, triton.next_power_of_2(blocks)), max(16, triton.next_power_of_2(queries))
    rows_b = 2 if blocks <= 8 else 1
    if INTERPRET:
        wide = min(8192, max(16, triton.next_power_of_2(hidden)))
        return Config(splits=1, chunk=wide, warps=4, rows_b=rows_b, chunk_b=wide)
    if not split:
        return Config(splits=1, chunk=32, stages=2, warps=4, waves=4, rows_b=rows_b, chunk_b=32, stages_b=2)
    groups = triton.cdiv(queries, 16 // rows_b)
    chunk_b = 512 if groups == 1 else 256 if groups == 2 else 128 if groups <= 4 else 64
    chunk_b = max(32, chunk_b // (block_n // 16) ** 2)
    if block_n * block_s > 512:
        splits = 4 if block_n * block_s <= 1024 else 1
        return Config(splits=splits, chunk=32, warps=4, waves=4, rows_b=rows_b, chunk_b=chunk_b)
    return Config(rows_b=rows_b, chunk_b=chunk_b)


def backward(
    v: torch.Tensor,
    w: torch.Tensor,
    do: torch.Tensor,
    lse: torch.Tensor,
    dl: torch.Tensor | None,
    logits: torch.Tensor,
    rstd: torch.Tensor,
    dv: torch.Tensor,
    dw: torch.Tensor,
    accumulate_v: bool = False,
    accumulate_w: bool = False,
    config: Config | None = None,
) -> None:
    """Launches the backward: do `[S, R, D]`, dl `[S, R]` dense or None, into dv `[N, R, D]` and dw `[S, D]` (dense).

    lse, logits and rstd are the forward's. `accumulate_v` and `_w` add to what dv and dw hold.
    """
    blocks, rows, hidden = v.shape
    queries = w.shape[0]
    if rows == 0 or queries == 0:
        if not accumulate_w:
            dw.zero_()
        if not accumulate_v:
            dv.zero_()
        return
    split = v.dtype == w.dtype == do.dtype == torch.bfloat16 and not INTERPRET
    cfg = config or default_config(hidden, blocks, queries, split)
    precision = "ieee" if torch.float32 in (v.dtype, w.dtype, do.dtype) else "tf32x3"
    scratch = torch.empty(2 * queries + 1, rows, blocks, dtype=torch.float32, device=v.device)
    p, coef, norm = scratch[:queries], scratch[queries : 2 * queries], scratch[2 * queries]
    strides = (v.stride(0), v.stride(1), do.stride(0), do.stride(1))
    programs = min(rows, multiprocessors(v.device) * cfg.waves)
    _first_step[(programs,)](
        v, do, lse, dl, logits, rstd, p, coef, norm, *strides, rows, hidden, blocks, queries, programs,
        HAS_DL=dl is not None, BLOCK_N=max(8, triton.next_power_of_2(blocks)),
        BLOCK_S=max(16, triton.next_power_of_2(queries)), SPLITS=cfg.splits, CHUNK=cfg.chunk, STAGES=cfg.stages,
        SPLIT=split, PRECISION=precision, num_warps=cfg.warps,
    )  # fmt: skip
    slices = triton.cdiv(hidden, cfg.chunk_b)
    tiles = triton.cdiv(rows, cfg.rows_b)
    lines = max(1, min(tiles, triton.cdiv(cfg.waves_b * multiprocessors(v.device), slices)))
    share = triton.cdiv(tiles, lines) * cfg.rows_b
    lines = triton.cdiv(rows, share)
    partial = torch.empty(lines, queries * hidden, dtype=torch.float32, device=v.device)
    block_s = triton.cdiv(16, cfg.rows_b)  # a product over a tile's targets has 16 terms
    _second_step[(slices, lines)](
        v, w, do, p, coef, norm, dv, partial, v.stride(0), v.stride(1), w.stride(0), do.stride(0), do.stride(1), rows,
        hidden, blocks, queries, share, ACCUMULATE=accumulate_v, GROUPS=triton.cdiv(queries, block_s),
        ROWS=cfg.rows_b,
        BLOCK_N=max(triton.next_power_of_2(blocks), triton.cdiv(16, cfg.rows_b)),
        BLOCK_S=block_s, CHUNK=cfg.chunk_b, STAGES=cfg.stages_b, SPLIT=split, PRECISION=precision,
        num_warps=cfg.warps_b,
    )  # fmt: skip
    column_sum(partial, dw.view(-1), accumulate_w)
