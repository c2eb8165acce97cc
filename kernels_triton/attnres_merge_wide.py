"""Phase 2 of block attention residuals for hidden sizes beyond a program's registers: each row twice, in chunks."""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from kernels_triton.attnres_common import rounded


@triton.jit
def forward_wide(
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
    CHUNK: tl.constexpr,
):
    column = tl.arange(0, CHUNK)
    for row in range(tl.program_id(0), rows, programs):
        row64 = tl.cast(row, tl.int64)
        square = tl.zeros([CHUNK], tl.float32)
        product = tl.zeros([CHUNK], tl.float32)
        for chunk in range(0, hidden, CHUNK):
            d = chunk + column
            x = tl.load(x_ptr + row64 * x_stride + d, mask=d < hidden, other=0.0).to(tl.float32)
            q = tl.load(q_ptr + d, mask=d < hidden, other=0.0).to(tl.float32)
            square += x * x
            product += x * q
        l0 = tl.load(l0_ptr + row).to(tl.float32)
        l1 = tl.sum(product, axis=0) * tl.rsqrt(tl.sum(square, axis=0) / hidden + eps)
        a = 1.0 / (1.0 + tl.exp(l1 - l0))
        b = 1.0 / (1.0 + tl.exp(l0 - l1))
        tl.store(lse_ptr + row, tl.maximum(l0, l1) + tl.log(1.0 + tl.exp(-tl.abs(l0 - l1))))
        for chunk in range(0, hidden, CHUNK):
            d = chunk + column
            x = tl.load(x_ptr + row64 * x_stride + d, mask=d < hidden, other=0.0).to(tl.float32)
            y0 = tl.load(y0_ptr + row64 * y0_stride + d, mask=d < hidden, other=0.0).to(tl.float32)
            y0 = tl.where(a > 0.0, y0, 0.0)
            tl.store(out_ptr + row64 * hidden + d, rounded(a * y0 + b * x, out_ptr), mask=d < hidden)


@triton.jit
def backward_wide(
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
    CHUNK: tl.constexpr,
):
    """`dq_ptr` `[programs, hidden]` fp32 must start at 0: a program adds its rows to its own line, in order."""
    column = tl.arange(0, CHUNK)
    dq_at = dq_ptr + tl.program_id(0).to(tl.int64) * hidden
    for row in range(tl.program_id(0), rows, programs):
        row64 = tl.cast(row, tl.int64)
        l0 = tl.load(l0_ptr + row).to(tl.float32)
        square = tl.zeros([CHUNK], tl.float32)
        product = tl.zeros([CHUNK], tl.float32)
        with_x = tl.zeros([CHUNK], tl.float32)
        with_y0 = tl.zeros([CHUNK], tl.float32)
        for chunk in range(0, hidden, CHUNK):
            d = chunk + column
            x = tl.load(x_ptr + row64 * x_stride + d, mask=d < hidden, other=0.0).to(tl.float32)
            q = tl.load(q_ptr + d, mask=d < hidden, other=0.0).to(tl.float32)
            y0 = tl.load(y0_ptr + row64 * y0_stride + d, mask=d < hidden, other=0.0).to(tl.float32)
            dy = tl.load(dy_ptr + row64 * dy_stride + d, mask=d < hidden, other=0.0).to(tl.float32)
            square += x * x
            product += x * q
            with_x += dy * x
            with_y0 += dy * y0
        r = tl.rsqrt(tl.sum(square, axis=0) / hidden + eps)
        l1 = tl.sum(product, axis=0) * r
        a = 1.0 / (1.0 + tl.exp(l1 - l0))
        b = 1.0 / (1.0 + tl.exp(l0 - l1))
        c = tl.where(a > 0.0, tl.sum(with_y0, axis=0), 0.0) - tl.sum(with_x, axis=0)
        dl0 = a * b * c
        dl1 = -dl0
        if HAS_DL:
            dl = tl.load(dl_ptr + row).to(tl.float32)
            dl0 += a * dl
            dl1 += b * dl
        tl.store(dl0_ptr + row, rounded(dl0, dl0_ptr))
        to_q = dl1 * r
        to_x = to_q * r * l1 / hidden
        for chunk in range(0, hidden, CHUNK):
            d = chunk + column
            live = d < hidden
            x = tl.load(x_ptr + row64 * x_stride + d, mask=live, other=0.0).to(tl.float32)
            q = tl.load(q_ptr + d, mask=live, other=0.0).to(tl.float32)
            dy = tl.load(dy_ptr + row64 * dy_stride + d, mask=live, other=0.0).to(tl.float32)
            dx = b * dy + to_q * q - to_x * x
            at = dx_ptr + row64 * hidden + d
            if ACCUMULATE:
                dx += tl.load(at, mask=live, other=0.0).to(tl.float32)
            tl.store(at, rounded(dx, dx_ptr), mask=live)
            tl.store(dy0_ptr + row64 * hidden + d, rounded(a * dy, dy0_ptr), mask=live)
            tl.store(dq_at + d, tl.load(dq_at + d, mask=live, other=0.0) + to_q * x, mask=live)
