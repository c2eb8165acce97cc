"""Phase 2 of block attention residuals: online-softmax merge of an inter-block result with the intra-block partial sum.

With x the partial sum, q the pseudo-query, (y0, l0) the inter-block output and its log-sum-exp,
r = rsqrt(mean(x²) + eps) and l1 = <x, q> r, the merged output is y = a y0 + b x with b = sigmoid(l1 - l0), a = 1 - b,
and the merged log-sum-exp is max(l0, l1) + log(1 + exp(-|l0 - l1|)). One pass over
the rows each way; nothing is saved but the inputs.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels_triton.attnres_common import column_sum, multiprocessors, rounded
from kernels_triton.attnres_merge_wide import backward_wide, forward_wide

_WIDE = 8192  # hidden sizes from here on are walked in chunks
_WIDE_CHUNK = 4096


@triton.jit
def _forward(
    x_ptr,
    q_ptr,
    y0_ptr,
    l0_ptr,
    out_ptr,
    lse_ptr,
    x_stride,
    y0_stride,
    rows,
    hidden,
    eps,
    programs,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    d = tl.arange(0, BLOCK_D)
    live = d < hidden
    q = tl.load(q_ptr + d, mask=live, other=0.0).to(tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, BLOCK_R), programs, num_stages=STAGES):
        row = tl.cast(tile, tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
        ok = row < rows
        mask = ok[:, None] & live[None, :]
        x = tl.load(x_ptr + row[:, None] * x_stride + d[None, :], mask=mask, other=0.0).to(tl.float32)
        y0 = tl.load(y0_ptr + row[:, None] * y0_stride + d[None, :], mask=mask, other=0.0).to(tl.float32)
        l0 = tl.load(l0_ptr + row, mask=ok, other=0.0).to(tl.float32)
        r = tl.rsqrt(tl.sum(x * x, axis=1) / hidden + eps)
        l1 = tl.sum(x * q[None, :], axis=1) * r
        a = 1.0 / (1.0 + tl.exp(l1 - l0))
        b = 1.0 / (1.0 + tl.exp(l0 - l1))
        # An inter-block result of weight 0 (lse -inf: nothing was attended) must not leak what its memory holds.
        y = tl.where(a > 0.0, a, 0.0)[:, None] * tl.where((a > 0.0)[:, None], y0, 0.0) + b[:, None] * x
        lse = tl.maximum(l0, l1) + tl.log(1.0 + tl.exp(-tl.abs(l0 - l1)))
        tl.store(out_ptr + row[:, None] * hidden + d[None, :], rounded(y, out_ptr), mask=mask)
        tl.store(lse_ptr + row, lse, mask=ok)


@triton.jit
def _backward(
    x_ptr,
    q_ptr,
    y0_ptr,
    l0_ptr,
    dy_ptr,
    dl_ptr,
    dx_ptr,
    dy0_ptr,
    dl0_ptr,
    dq_ptr,
    x_stride,
    y0_stride,
    dy_stride,
    rows,
    hidden,
    eps,
    programs,
    HAS_DL: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    d = tl.arange(0, BLOCK_D)
    live = d < hidden
    q = tl.load(q_ptr + d, mask=live, other=0.0).to(tl.float32)
    dq = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, BLOCK_R), programs, num_stages=STAGES):
        row = tl.cast(tile, tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
        ok = row < rows
        mask = ok[:, None] & live[None, :]
        x = tl.load(x_ptr + row[:, None] * x_stride + d[None, :], mask=mask, other=0.0).to(tl.float32)
        y0 = tl.load(y0_ptr + row[:, None] * y0_stride + d[None, :], mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row[:, None] * dy_stride + d[None, :], mask=mask, other=0.0).to(tl.float32)
        l0 = tl.load(l0_ptr + row, mask=ok, other=0.0).to(tl.float32)
        r = tl.rsqrt(tl.sum(x * x, axis=1) / hidden + eps)
        l1 = tl.sum(x * q[None, :], axis=1) * r
        a = 1.0 / (1.0 + tl.exp(l1 - l0))
        b = 1.0 / (1.0 + tl.exp(l0 - l1))
        c = tl.sum(dy * (tl.where((a > 0.0)[:, None], y0, 0.0) - x), axis=1)
        dl0 = a * b * c
        dl1 = -dl0
        if HAS_DL:
            dl = tl.load(dl_ptr + row, mask=ok, other=0.0).to(tl.float32)
            dl0 += a * dl
            dl1 += b * dl
        to_q = dl1 * r
        to_x = to_q * r * l1 / hidden
        dx = b[:, None] * dy + to_q[:, None] * q[None, :] - to_x[:, None] * x
        dq += to_q[:, None] * x
        where = row[:, None] * hidden + d[None, :]
        if ACCUMULATE:
            dx += tl.load(dx_ptr + where, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + where, rounded(dx, dx_ptr), mask=mask)
        tl.store(dy0_ptr + where, rounded(a[:, None] * dy, dy0_ptr), mask=mask)
        tl.store(dl0_ptr + row, rounded(dl0, dl0_ptr), mask=ok)
    tl.store(dq_ptr + tl.program_id(0).to(tl.int64) * hidden + d, tl.sum(dq, axis=0), mask=live)


@dataclass(frozen=True)
class Config:
    """How a launch is cut: rows a tile, warps, pipeline stages, and programs a multiprocessor (0: one a tile)."""

    block_r: int
    warps: int
    stages: int
    waves: int


# Fastest on an H200 in bf16 among warps 2 to 16, 1 to 5 stages, 1 to 8 programs a multiprocessor.
_FORWARD = {2048: Config(1, 4, 3, 4), 4096: Config(1, 8, 3, 2), 8192: Config(1, 16, 4, 1)}
_BACKWARD = {2048: Config(1, 4, 4, 2), 4096: Config(1, 8, 4, 1), 8192: Config(1, 16, 3, 1)}


def _config(table: dict[int, Config], hidden: int) -> Config:
    block = triton.next_power_of_2(hidden)
    if block <= 512:
        return Config(1024 // block, 4, 3, 4)
    return table[max(2048, block)]


def forward(
    x: torch.Tensor,
    q: torch.Tensor,
    y0: torch.Tensor,
    l0: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    eps: float,
    config: Config | None = None,
) -> None:
    """Launches the forward: x, y0 `[R, D]`, q `[D]`, l0 `[R]` into out `[R, D]` and lse `[R]` fp32 (both dense)."""
    rows, hidden = x.shape
    if rows == 0:
        return
    if hidden > _WIDE:
        programs = min(rows, 2 * multiprocessors(x.device))
        forward_wide[(programs,)](
            x,
            q,
            y0,
            l0,
            out,
            lse,
            x.stride(0),
            y0.stride(0),
            rows,
            hidden,
            eps,
            programs,
            CHUNK=_WIDE_CHUNK,
            num_warps=8,
        )
        return
    cfg = config or _config(_FORWARD, hidden)
    tiles = triton.cdiv(rows, cfg.block_r)
    programs = min(tiles, multiprocessors(x.device) * cfg.waves) if cfg.waves else tiles
    _forward[(programs,)](
        x, q, y0, l0, out, lse, x.stride(0), y0.stride(0), rows, hidden, eps, programs,
        BLOCK_R=cfg.block_r, BLOCK_D=triton.next_power_of_2(hidden), STAGES=cfg.stages, num_warps=cfg.warps,
    )  # fmt: skip


def backward(
    x: torch.Tensor,
    q: torch.Tensor,
    y0: torch.Tensor,
    l0: torch.Tensor,
    dy: torch.Tensor,
    dl: torch.Tensor | None,
    dx: torch.Tensor,
    dq: torch.Tensor,
    dy0: torch.Tensor,
    dl0: torch.Tensor,
    eps: float,
    accumulate: bool = False,
    config: Config | None = None,
) -> None:
    """Launches the backward into dx, dy0 `[R, D]`, dq `[D]`, dl0 `[R]` (dense; any float dtype).

    `accumulate` adds to what dx and dq hold. The gradient of q is one fp32 partial a program, then a fixed-order sum.
    """
    rows, hidden = x.shape
    if rows == 0 or hidden == 0:
        if not accumulate:
            dq.zero_()
        return
    if hidden > _WIDE:
        programs = min(rows, 2 * multiprocessors(x.device))
        partial = torch.zeros(programs, hidden, dtype=torch.float32, device=x.device)
        backward_wide[(programs,)](
            x, q, y0, l0, dy, dl, dx, dy0, dl0, partial, x.stride(0), y0.stride(0), dy.stride(0), rows, hidden, eps,
            programs, HAS_DL=dl is not None, ACCUMULATE=accumulate, CHUNK=_WIDE_CHUNK, num_warps=8,
        )  # fmt: skip
        column_sum(partial, dq, accumulate)
        return
    cfg = config or _config(_BACKWARD, hidden)
    tiles = triton.cdiv(rows, cfg.block_r)
    programs = min(tiles, multiprocessors(x.device) * max(cfg.waves, 1))
    partial = torch.empty(programs, hidden, dtype=torch.float32, device=x.device)
    _backward[(programs,)](
        x, q, y0, l0, dy, dl, dx, dy0, dl0, partial, x.stride(0), y0.stride(0), dy.stride(0), rows, hidden, eps,
        programs,
        HAS_DL=dl is not None, ACCUMULATE=accumulate, BLOCK_R=cfg.block_r, BLOCK_D=triton.next_power_of_2(hidden),
        STAGES=cfg.stages, num_warps=cfg.warps,
    )  # fmt: skip
    column_sum(partial, dq, accumulate)
