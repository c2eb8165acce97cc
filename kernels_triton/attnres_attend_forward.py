"""Phase 1 of block attention residuals, forward: S pseudo-queries attend over N block representations, row by row.

For a row r: s[s, n] = <W_s, V_nr> rsqrt(mean(V_nr²) + eps), L[s] = logsumexp_n s, O[s] = sum_n exp(s[s, n] - L[s]) V_nr.
A program takes a few rows and walks their hidden dimension twice in chunks: once for the logits, once for the outputs.
The second walk finds its sources in the L2 cache, so that they cross the memory bus once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels_triton.attnres_common import INTERPRET, multiprocessors, rounded
from kernels_triton.attnres_attend_stream import forward_stream


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
    CHUNK_A: tl.constexpr,
    CHUNK_B: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
    SAVE: tl.constexpr,
):
    source = tl.arange(0, ROWS * BLOCK_N)
    n = source % BLOCK_N
    s = tl.arange(0, BLOCK_S)
    target = tl.arange(0, ROWS * BLOCK_S)
    out_s = target % BLOCK_S
    own = (target // BLOCK_S)[:, None] == (source // BLOCK_N)[None, :]
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), programs):
        first = tl.cast(tile, tl.int64) * ROWS
        v_row = first + source // BLOCK_N
        v_ok = (v_row < rows) & (n < blocks)
        v_at = v_ptr + n.to(tl.int64) * v_block_stride + v_row * v_row_stride
        logits = tl.zeros([ROWS * BLOCK_N, BLOCK_S], tl.float32)
        square = tl.zeros([ROWS * BLOCK_N, CHUNK_A // 8], tl.float32)
        for chunk in tl.range(0, hidden, CHUNK_A, num_stages=STAGES):
            d = chunk + tl.arange(0, CHUNK_A)
            live = d < hidden
            v = tl.load(v_at[:, None] + d[None, :], mask=v_ok[:, None] & live[None, :], other=0.0)
            w = tl.load(
                w_ptr + s[:, None] * w_stride + d[None, :], mask=(s < queries)[:, None] & live[None, :], other=0.0
            )
            logits = plain_dot(v, tl.trans(w), logits, SPLIT, PRECISION)
            vf = v.to(tl.float32)
            square += tl.sum(tl.reshape(vf * vf, [ROWS * BLOCK_N, CHUNK_A // 8, 8]), axis=2)
        rstd = tl.rsqrt(tl.sum(square, axis=1) / hidden + eps)
        logits = logits * rstd[:, None]

        score = tl.reshape(logits, [ROWS, BLOCK_N, BLOCK_S])
        score = tl.where((tl.arange(0, BLOCK_N) < blocks)[None, :, None], score, float("-inf"))
        top = tl.max(score, axis=1)
        weight = tl.exp(score - top[:, None, :])
        total = tl.sum(weight, axis=1)
        lse = top + tl.log(total)
        weight = weight / total[:, None, :]
        row = first + tl.arange(0, ROWS)
        lse_ok = (row < rows)[:, None] & (s < queries)[None, :]
        tl.store(lse_ptr + s.to(tl.int64)[None, :] * rows + row[:, None], lse, mask=lse_ok)
        if SAVE:
            at = logits_ptr + (v_row[:, None] * queries + s[None, :]) * blocks + n[:, None]
            tl.store(at, logits, mask=v_ok[:, None] & (s < queries)[None, :])
            tl.store(rstd_ptr + v_row * blocks + n, rstd, mask=v_ok)

        # Rows of one tile share a product: weights across rows are 0, which is exact for finite sources.
        by_query = tl.trans(tl.reshape(weight, [ROWS * BLOCK_N, BLOCK_S]))
        by_target = tl.reshape(
            tl.broadcast_to(by_query[None, :, :], [ROWS, BLOCK_S, ROWS * BLOCK_N]), [ROWS * BLOCK_S, ROWS * BLOCK_N]
        )
        by_target = tl.where(own, by_target, 0.0)
        out_row = first + target // BLOCK_S
        out_ok = (out_row < rows) & (out_s < queries)
        out_at = out_ptr + (out_s.to(tl.int64) * rows + out_row) * hidden
        for chunk in tl.range(0, hidden, CHUNK_B, num_stages=STAGES):
            d = chunk + tl.arange(0, CHUNK_B)
            live = d < hidden
            v = tl.load(v_at[:, None] + d[None, :], mask=v_ok[:, None] & live[None, :], other=0.0)
            o = split_dot(by_target, v, tl.zeros([ROWS * BLOCK_S, CHUNK_B], tl.float32), SPLIT, PRECISION)
            tl.store(out_at[:, None] + d[None, :], rounded(o, out_ptr), mask=out_ok[:, None] & live[None, :])


@triton.jit
def _forward_row(
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
    eps,
    programs,
    QUERIES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
    SAVE: tl.constexpr,
):
    n = tl.arange(0, BLOCK_N)
    has = n < blocks
    d = tl.arange(0, BLOCK_D)
    live = d < hidden
    for row in tl.range(tl.program_id(0), rows, programs, num_stages=STAGES):
        at = v_ptr + n.to(tl.int64) * v_block_stride + tl.cast(row, tl.int64) * v_row_stride
        v = tl.load(at[:, None] + d[None, :], mask=has[:, None] & live[None, :], other=0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(v * v, axis=1) / hidden + eps)
        if SAVE:
            tl.store(rstd_ptr + tl.cast(row, tl.int64) * blocks + n, rstd, mask=has)
        for s in tl.static_range(QUERIES):
            w = tl.load(w_ptr + s * w_stride + d, mask=live, other=0.0).to(tl.float32)
            logits = tl.sum(v * w[None, :], axis=1) * rstd
            score = tl.where(has, logits, float("-inf"))
            top = tl.max(score, axis=0)
            weight = tl.exp(score - top)
            total = tl.sum(weight, axis=0)
            tl.store(lse_ptr + s * tl.cast(rows, tl.int64) + row, top + tl.log(total))
            if SAVE:
                tl.store(logits_ptr + (tl.cast(row, tl.int64) * QUERIES + s) * blocks + n, logits, mask=has)
            o = tl.sum((weight / total)[:, None] * v, axis=0)
            tl.store(out_ptr + (s * tl.cast(rows, tl.int64) + row) * hidden + d, rounded(o, out_ptr), mask=live)


@dataclass(frozen=True)
class Config:
    """How a launch is cut: rows a tile, chunks, stages, warps, programs a multiprocessor (0: one a tile).

    `stream` chooses the kernel of `attnres_attend_stream` (chunk_a columns a turn, `elems` a thread).
    """

    row_kernel: bool = False
    stream: bool = False
    elems: int = 8
    group: int = 8
    maxnreg: int | None = None
    rows: int = 1
    chunk_a: int = 128
    chunk_b: int = 256
    stages: int = 3
    warps: int = 4
    waves: int = 2


def default_config(hidden: int, blocks: int, queries: int, bits: int) -> Config:
    if bits > 16:
        return Config(rows=1, chunk_a=64, chunk_b=64, stages=2)
    return Config(rows=2 if blocks <= 8 else 1)


def forward(
    v: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    logits: torch.Tensor | None,
    rstd: torch.Tensor | None,
    eps: float,
    config: Config | None = None,
) -> None:
    """Launches the forward: v `[N, R, D]`, w `[S, D]` into out `[S, R, D]` and lse `[S, R]` fp32 (both dense).

    `logits` `[R, S, N]` and `rstd` `[R, N]`, both fp32, are written where given: the backward starts from them.
    """
    blocks, rows, hidden = v.shape
    queries = w.shape[0]
    if rows == 0 or queries == 0:
        return
    cfg = config or default_config(hidden, blocks, queries, v.element_size() * 8)
    save = logits is not None
    tiles = rows if cfg.row_kernel or cfg.stream else triton.cdiv(rows, cfg.rows)
    programs = min(tiles, multiprocessors(v.device) * cfg.waves) if cfg.waves else tiles
    if cfg.stream:
        if logits is None or rstd is None:
            logits = torch.empty(rows, queries, blocks, dtype=torch.float32, device=v.device)
            rstd = torch.empty(rows, blocks, dtype=torch.float32, device=v.device)
        forward_stream[(programs,)](
            v, w, out, lse, logits, rstd, v.stride(0), v.stride(1), w.stride(0), rows, hidden, eps, programs,
            BLOCKS=blocks, QUERIES=queries, GROUP=cfg.group, CHUNK=cfg.chunk_a, ELEMS=cfg.elems,
            STAGES=cfg.stages, num_warps=cfg.warps, **({"maxnreg": cfg.maxnreg} if cfg.maxnreg else {}),
        )  # fmt: skip
        return
    if cfg.row_kernel:
        _forward_row[(programs,)](
            v, w, out, lse, logits, rstd, v.stride(0), v.stride(1), w.stride(0), rows, hidden, blocks, eps, programs,
            QUERIES=queries, BLOCK_N=triton.next_power_of_2(blocks), BLOCK_D=triton.next_power_of_2(hidden),
            STAGES=cfg.stages, SAVE=save, num_warps=cfg.warps,
        )  # fmt: skip
        return
    block_n = max(triton.next_power_of_2(blocks), triton.cdiv(16, cfg.rows))
    split = v.dtype == torch.bfloat16 and w.dtype == torch.bfloat16 and not INTERPRET
    _forward[(programs,)](
        v, w, out, lse, logits, rstd, v.stride(0), v.stride(1), w.stride(0), rows, hidden, blocks, queries, eps, programs,
        ROWS=cfg.rows, BLOCK_N=block_n, BLOCK_S=max(8, triton.next_power_of_2(queries)), CHUNK_A=cfg.chunk_a,
        CHUNK_B=cfg.chunk_b, STAGES=cfg.stages, SPLIT=split,
        PRECISION="ieee" if torch.float32 in (v.dtype, w.dtype) else "tf32x3", SAVE=save, num_warps=cfg.warps,
    )  # fmt: skip
