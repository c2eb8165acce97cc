"""Phase 1 of block attention residuals, backward.

With p = exp(s - L), g[s, n] = <dO_s, V_n>, delta[s] = sum_n p g and ds = p (g - delta + dL), per row:
dV_n = sum_s (p dO_s + ds r_n W_s) - V_n (r_n²/D) sum_s ds s, and dW_s = sum over rows and n of ds r_n V_n.
A program takes a few rows and walks their hidden dimension twice in chunks: once for g, once for dV. The weights ds r_n of
dW are left in memory (4 bytes a logit) for a second kernel, whose programs own a slice of D and a share of the rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels_triton.attnres_common import INTERPRET, column_sum, multiprocessors, rounded
from kernels_triton.attnres_attend_forward import plain_dot, split_dot


@triton.jit
def _backward(
    v_ptr,
    w_ptr,
    do_ptr,
    lse_ptr,
    dl_ptr,
    logits_ptr,
    rstd_ptr,
    dv_ptr,
    coef_ptr,
    v_block_stride,
    v_row_stride,
    w_stride,
    do_query_stride,
    do_row_stride,
    rows,
    hidden,
    blocks,
    queries,
    programs,
    HAS_DL: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    SPLITS: tl.constexpr,
    CHUNK_A: tl.constexpr,
    CHUNK_B: tl.constexpr,
    STAGES_A: tl.constexpr,
    STAGES_B: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    source = tl.arange(0, ROWS * BLOCK_N)
    n = source % BLOCK_N
    target = tl.arange(0, ROWS * BLOCK_S)
    s = target % BLOCK_S
    part = tl.arange(0, SPLITS) * CHUNK_A
    same = source[:, None] == source[None, :]
    own = (target // BLOCK_S)[:, None] == (source // BLOCK_N)[None, :]
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), programs):
        first = tl.cast(tile, tl.int64) * ROWS
        v_row = first + source // BLOCK_N
        v_ok = (v_row < rows) & (n < blocks)
        v_at = v_ptr + n.to(tl.int64) * v_block_stride + v_row * v_row_stride
        o_row = first + target // BLOCK_S
        o_ok = (o_row < rows) & (s < queries)
        do_at = do_ptr + s.to(tl.int64) * do_query_stride + o_row * do_row_stride
        # Each warp takes its own columns: a tile of 16 by 16 has no other way to share the work.
        g = tl.zeros([SPLITS, ROWS * BLOCK_S, ROWS * BLOCK_N], tl.float32)
        for chunk in tl.range(0, hidden, SPLITS * CHUNK_A, num_stages=STAGES_A):
            d = chunk + part[:, None, None] + tl.arange(0, CHUNK_A)[None, None, :]
            live = d < hidden
            v = tl.load(v_at[None, :, None] + d, mask=v_ok[None, :, None] & live, other=0.0)
            e = chunk + part[:, None, None] + tl.arange(0, CHUNK_A)[None, :, None]
            do = tl.load(do_at[None, None, :] + e, mask=o_ok[None, None, :] & (e < hidden), other=0.0)
            g = plain_dot(tl.permute(do, (0, 2, 1)), tl.permute(v, (0, 2, 1)), g, SPLIT, PRECISION)
        g = tl.sum(g, axis=0)

        at = (o_row * queries + s)[:, None] * blocks + n[None, :]
        here = own & o_ok[:, None] & v_ok[None, :]
        logit = tl.load(logits_ptr + at, mask=here, other=0.0)
        lse = tl.load(lse_ptr + s.to(tl.int64) * rows + o_row, mask=o_ok, other=0.0)
        rstd = tl.load(rstd_ptr + v_row * blocks + n, mask=v_ok, other=0.0)
        p = tl.where(here, tl.exp(logit - lse[:, None]), 0.0)
        g = tl.where(here, g, 0.0)
        away = g - tl.sum(p * g, axis=1)[:, None]
        if HAS_DL:
            dl = tl.load(dl_ptr + s.to(tl.int64) * rows + o_row, mask=o_ok, other=0.0).to(tl.float32)
            away += dl[:, None]
        ds = p * away
        coef = ds * rstd[None, :]
        tl.store(coef_ptr + at, coef, mask=here)
        norm = tl.sum(ds * logit, axis=0) * rstd * rstd / hidden
        p_t = tl.trans(p)
        coef_t = tl.trans(coef)
        norm_t = tl.where(same, -norm[None, :], 0.0)
        last = (tl.cdiv(hidden, CHUNK_B) - 1) * CHUNK_B
        dv_at = dv_ptr + (n.to(tl.int64) * rows + v_row) * hidden
        for back in tl.range(0, hidden, CHUNK_B, num_stages=STAGES_B):  # the latest columns are still in the cache
            d = last - back + tl.arange(0, CHUNK_B)
            live = d < hidden
            v_mask = v_ok[:, None] & live[None, :]
            v = tl.load(v_at[:, None] + d[None, :], mask=v_mask, other=0.0)
            do = tl.load(do_at[:, None] + d[None, :], mask=o_ok[:, None] & live[None, :], other=0.0)
            w = tl.load(
                w_ptr + s[:, None] * w_stride + d[None, :], mask=(s < queries)[:, None] & live[None, :], other=0.0
            )
            dv = split_dot(p_t, do, tl.zeros([ROWS * BLOCK_N, CHUNK_B], tl.float32), SPLIT, PRECISION)
            dv = split_dot(coef_t, w, dv, SPLIT, PRECISION)
            dv = split_dot(norm_t, v, dv, SPLIT, PRECISION)
            if ACCUMULATE:
                dv += tl.load(dv_at[:, None] + d[None, :], mask=v_mask, other=0.0).to(tl.float32)
            tl.store(dv_at[:, None] + d[None, :], rounded(dv, dv_ptr), mask=v_mask)


@triton.jit
def _query_gradient(
    v_ptr,
    coef_ptr,
    partial_ptr,
    v_block_stride,
    v_row_stride,
    rows,
    hidden,
    blocks,
    queries,
    rows_each,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    source = tl.arange(0, ROWS * BLOCK_N)
    n = source % BLOCK_N
    s = tl.arange(0, BLOCK_S)
    d = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    live = d < hidden
    part = tl.program_id(1)
    start = part.to(tl.int64) * rows_each
    end = tl.minimum(start + rows_each, rows)
    dw = tl.zeros([BLOCK_S, CHUNK], tl.float32)
    for first in tl.range(start, end, ROWS, num_stages=STAGES):
        row = first + source // BLOCK_N
        ok = (row < end) & (n < blocks)
        v_at = v_ptr + n.to(tl.int64) * v_block_stride + row * v_row_stride
        v = tl.load(v_at[:, None] + d[None, :], mask=ok[:, None] & live[None, :], other=0.0)
        at = (row[None, :] * queries + s[:, None]) * blocks + n[None, :]
        coef = tl.load(coef_ptr + at, mask=ok[None, :] & (s < queries)[:, None], other=0.0)
        dw = split_dot(coef, v, dw, SPLIT, PRECISION)
    at = (part.to(tl.int64) * queries + s[:, None]) * hidden + d[None, :]
    tl.store(partial_ptr + at, dw, mask=(s < queries)[:, None] & live[None, :])


@dataclass(frozen=True)
class Config:
    """How the launches are cut: rows a tile, chunks, stages, warps, programs a multiprocessor; dW's tile after `q_`."""

    rows: int = 1
    splits: int = 4
    chunk_a: int = 64
    chunk_b: int = 256
    stages_a: int = 3
    stages_b: int = 3
    warps: int = 4
    waves: int = 2
    q_sources: int = 64
    q_chunk: int = 128
    q_stages: int = 4
    q_warps: int = 4


def default_config(hidden: int, blocks: int, queries: int, bits: int) -> Config:
    if bits > 16:
        return Config(chunk_a=32, chunk_b=32, splits=2, stages_a=2, stages_b=2, q_sources=32, q_chunk=32, q_stages=2)
    return Config(rows=2 if blocks <= 8 and queries <= 8 else 1)


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
    accumulate: bool = False,
    config: Config | None = None,
) -> None:
    """Launches the backward: do `[S, R, D]`, dl `[S, R]` dense or None, into dv `[N, R, D]` and dw `[S, D]` (dense).

    lse, logits and rstd are the forward's. `accumulate` adds to what dv and dw hold.
    """
    blocks, rows, hidden = v.shape
    queries = w.shape[0]
    if rows == 0 or queries == 0:
        if not accumulate:
            dw.zero_()
            dv.zero_()
        return
    cfg = config or default_config(hidden, blocks, queries, v.element_size() * 8)
    split = v.dtype == w.dtype == do.dtype == torch.bfloat16 and not INTERPRET
    precision = "ieee" if torch.float32 in (v.dtype, w.dtype, do.dtype) else "tf32x3"
    # A product over the padded sources or targets of a tile has at least 16 terms.
    block_n = max(triton.next_power_of_2(blocks), triton.cdiv(16, cfg.rows))
    block_s = max(triton.next_power_of_2(queries), triton.cdiv(16, cfg.rows))
    tiles = triton.cdiv(rows, cfg.rows)
    programs = min(tiles, multiprocessors(v.device) * cfg.waves) if cfg.waves else tiles
    coef = torch.empty(rows, queries, blocks, dtype=torch.float32, device=v.device)
    _backward[(programs,)](
        v, w, do, lse, dl, logits, rstd, dv, coef, v.stride(0), v.stride(1), w.stride(0), do.stride(0), do.stride(1),
        rows, hidden, blocks, queries, programs, HAS_DL=dl is not None, ACCUMULATE=accumulate, ROWS=cfg.rows,
        BLOCK_N=block_n, BLOCK_S=block_s, SPLITS=cfg.splits, CHUNK_A=cfg.chunk_a, CHUNK_B=cfg.chunk_b,
        STAGES_A=cfg.stages_a, STAGES_B=cfg.stages_b, SPLIT=split, PRECISION=precision, num_warps=cfg.warps,
    )  # fmt: skip
    q_n = triton.next_power_of_2(blocks)
    q_rows = max(1, cfg.q_sources // q_n)
    q_n = max(q_n, triton.cdiv(16, q_rows))
    chunks = triton.cdiv(hidden, cfg.q_chunk)
    parts = max(1, min(triton.cdiv(rows, q_rows), triton.cdiv(4 * multiprocessors(v.device), chunks)))
    rows_each = triton.cdiv(triton.cdiv(rows, parts), q_rows) * q_rows
    parts = triton.cdiv(rows, rows_each)
    partial = torch.empty(parts, queries, hidden, dtype=torch.float32, device=v.device)
    _query_gradient[(chunks, parts)](
        v, coef, partial, v.stride(0), v.stride(1), rows, hidden, blocks, queries, rows_each, ROWS=q_rows, BLOCK_N=q_n,
        BLOCK_S=max(16, triton.next_power_of_2(queries)), CHUNK=cfg.q_chunk, STAGES=cfg.q_stages, SPLIT=split,
        PRECISION=precision, num_warps=cfg.q_warps,
    )  # fmt: skip
    column_sum(partial.view(parts, queries * hidden), dw.view(-1), accumulate)
