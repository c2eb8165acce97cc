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
from kernels_triton.attnres_phase1_forward import plain_dot, split_dot


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
    CHUNK_A: tl.constexpr,
    CHUNK_B: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    source = tl.arange(0, ROWS * BLOCK_N)
    n = source % BLOCK_N
    target = tl.arange(0, ROWS * BLOCK_S)
    s = target % BLOCK_S
    own = (target // BLOCK_S)[:, None] == (source // BLOCK_N)[None, :]
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), programs):
        first = tl.cast(tile, tl.int64) * ROWS
        v_row = first + source // BLOCK_N
        v_ok = (v_row < rows) & (n < blocks)
        v_at = v_ptr + n.to(tl.int64) * v_block_stride + v_row * v_row_stride
        o_row = first + target // BLOCK_S
        o_ok = (o_row < rows) & (s < queries)
        do_at = do_ptr + s.to(tl.int64) * do_query_stride + o_row * do_row_stride
        g = tl.zeros([ROWS * BLOCK_S, ROWS * BLOCK_N], tl.float32)
        for chunk in tl.range(0, hidden, CHUNK_A, num_stages=STAGES):
            d = chunk + tl.arange(0, CHUNK_A)
            live = d < hidden
            v = tl.load(v_at[:, None] + d[None, :], mask=v_ok[:, None] & live[None, :], other=0.0)
            do = tl.load(do_at[:, None] + d[None, :], mask=o_ok[:, None] & live[None, :], other=0.0)
            g = plain_dot(do, tl.trans(v), g, SPLIT, PRECISION)

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
        dv_at = dv_ptr + (n.to(tl.int64) * rows + v_row) * hidden
        for chunk in tl.range(0, hidden, CHUNK_B, num_stages=STAGES):
            d = chunk + tl.arange(0, CHUNK_B)
            live = d < hidden
            v_mask = v_ok[:, None] & live[None, :]
            v = tl.load(v_at[:, None] + d[None, :], mask=v_mask, other=0.0)
            do = tl.load(do_at[:, None] + d[None, :], mask=o_ok[:, None] & live[None, :], other=0.0)
            w = tl.load(w_ptr + s[:, None] * w_stride + d[None, :], mask=(s < queries)[:, None] & live[None, :], other=0.0)
            dv = split_dot(p_t, do, tl.zeros([ROWS * BLOCK_N, CHUNK_B], tl.float32), SPLIT, PRECISION)
            dv = split_dot(coef_t, w, dv, SPLIT, PRECISION)
            dv -= v.to(tl.float32) * norm[:, None]
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
    chunk_a: int = 128
    chunk_b: int = 128
    stages: int = 3
    warps: int = 4
    waves: int = 2
    q_sources: int = 64
    q_chunk: int = 128
    q_stages: int = 3
    q_warps: int = 4


def default_config(hidden: int, blocks: int, queries: int, bits: int) -> Config:
    if bits > 16:
        return Config(rows=1, chunk_a=32, chunk_b=32, stages=2, q_sources=32, q_chunk=32, q_stages=2)
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
        BLOCK_N=block_n, BLOCK_S=block_s, CHUNK_A=cfg.chunk_a, CHUNK_B=cfg.chunk_b, STAGES=cfg.stages, SPLIT=split,
        PRECISION=precision, num_warps=cfg.warps,
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
