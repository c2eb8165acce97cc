"""Attention residuals and their gradients from explicit formulas, some rows at a time: fp64 truth and yardstick.

Phase 1, for a row, with r_n = rsqrt(mean(V_n²) + eps) and cotangents dO, dL:

    s[s, n] = <W_s, V_n> r_n      L[s] = logsumexp_n s      p = exp(s - L)      O_s = sum_n p V_n
    g = <dO_s, V_n>      delta[s] = sum_n p g      ds = p (g - delta + dL)
    dV_n = sum_s (p dO_s + ds r_n W_s) - V_n (r_n² / D) sum_s ds s      dW_s = sum over rows and n of ds r_n V_n

Phase 2, with r = rsqrt(mean(x²) + eps), l1 = <x, q> r, b = sigmoid(l1 - l0), a = sigmoid(l0 - l1), cotangents dy, dl:

    y = a y0 + b x      l = logaddexp(l0, l1)      c = <dy, y0 - x>      dl0 = a dl + a b c      dl1 = b dl - a b c
    dy0 = a dy      dx = b dy + dl1 r q - dl1 l1 r² x / D      dq = sum over rows of dl1 r x

Rows whose l0 is -inf have a = 0, and what y0 holds there does not count.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from attnbench.ops.base import Inputs

Tensors = dict[str, torch.Tensor]
Rounding = Callable[[torch.Tensor], torch.Tensor]
Formula = Callable[[Tensors, Tensors, float, torch.dtype, torch.dtype, Rounding], Tensors]
CHUNK_CUDA = 1 << 27  # elements of one chunk's tensors in fp64
CHUNK_CPU = 1 << 22
DEFAULT_EPS = torch.finfo(torch.float32).eps


@torch.no_grad()
def truth(formula: Formula, inputs: Inputs) -> Tensors:
    """Outputs and gradients in fp64 from the same rounded inputs and cotangents."""
    return formula(*_given(inputs), torch.float64, torch.float64, lambda x: x)


@torch.no_grad()
def same_dtype(formula: Formula, inputs: Inputs, dtype: torch.dtype) -> Tensors:
    """What eager PyTorch in `dtype` gives: softmax, statistics and lse in fp32, weights of products in `dtype`."""

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x.to(dtype).to(torch.float32)

    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        return formula(*_given(inputs), torch.float32, dtype, rounded)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _given(inputs: Inputs) -> tuple[Tensors, Tensors, float]:
    eps = inputs.extras.get("eps")
    tensors = {name: tensor.detach() for name, tensor in inputs.tensors.items()}
    return tensors, inputs.cotangents, DEFAULT_EPS if eps is None else float(eps)


def _step(on: torch.Tensor, elements_a_row: int) -> int:
    return max(1, (CHUNK_CUDA if on.is_cuda else CHUNK_CPU) // max(1, elements_a_row))


def phase1(
    tensors: Tensors, cotangents: Tensors, eps: float, compute: torch.dtype, store: torch.dtype, rounded: Rounding
) -> Tensors:
    """out, lse, dvalues, dqueries of values `[N, R, D]`, queries `[S, D]`, computed in `compute`, kept in `store`."""
    values, queries = tensors["values"], tensors["queries"]
    d_out, d_lse = cotangents.get("out"), cotangents.get("lse")
    blocks, rows, hidden = values.shape
    count = queries.shape[0]
    lse_dtype = torch.float64 if store == torch.float64 else torch.float32
    new = values.new_empty
    result = {
        "out": new(count, rows, hidden, dtype=store),
        "lse": new(count, rows, dtype=lse_dtype),
        "dvalues": new(blocks, rows, hidden, dtype=store),
    }
    w = queries.to(compute)
    dw = torch.zeros(count, hidden, dtype=compute, device=values.device)
    step = _step(values, (3 * blocks + 3 * count) * hidden)
    for first in range(0, rows, step):
        at = slice(first, first + step)
        v = values[:, at].to(compute).transpose(0, 1)  # [r, N, D]
        rstd = torch.rsqrt(v.square().mean(-1) + eps)
        logits = (w @ v.mT) * rstd[:, None, :]  # [r, S, N]
        lse = torch.logsumexp(logits, -1)
        p = torch.exp(logits - lse[..., None])
        result["out"][:, at] = (rounded(p) @ v).transpose(0, 1).to(store)
        result["lse"][:, at] = lse.mT
        do = w.new_zeros(1, 1, 1) if d_out is None else d_out[:, at].to(compute).transpose(0, 1)
        g = do.expand(v.shape[0], count, hidden) @ v.mT
        away = g - (p * g).sum(-1, keepdim=True)
        if d_lse is not None:
            away = away + d_lse[:, at].to(compute).mT[..., None]
        ds = p * away
        coefficient = rounded(ds * rstd[:, None, :])
        dv = rounded(p).mT @ do.expand(v.shape[0], count, hidden) + coefficient.mT @ w
        dv -= v * ((ds * logits).sum(1) * rstd.square() / hidden)[..., None]
        result["dvalues"][:, at] = dv.transpose(0, 1).to(store)
        dw += torch.einsum("rsn,rnd->sd", coefficient, v)
    result["dqueries"] = dw.to(torch.float64 if store == torch.float64 else queries.dtype)
    return _wanted(result, cotangents)


def phase2(
    tensors: Tensors, cotangents: Tensors, eps: float, compute: torch.dtype, store: torch.dtype, rounded: Rounding
) -> Tensors:
    """out, lse, dx, dq, dout, dlse of partial_sum, inter_out `[R, D]`, query `[D]`, inter_lse `[R]`."""
    partial_sum, inter_out, inter_lse = tensors["partial_sum"], tensors["inter_out"], tensors["inter_lse"]
    rows, hidden = partial_sum.shape
    d_out, d_lse = cotangents.get("out"), cotangents.get("lse")
    wide = store == torch.float64
    new = partial_sum.new_empty
    lse_dtype = torch.float64 if wide else torch.float32
    result = {
        "out": new(rows, hidden, dtype=store),
        "lse": new(rows, dtype=lse_dtype),
        "dx": new(rows, hidden, dtype=store),
        "dq": torch.empty(0),
        "dout": new(rows, hidden, dtype=store if wide else inter_out.dtype),
        "dlse": new(rows, dtype=store if wide else inter_lse.dtype),
    }
    q = tensors["query"].to(compute)
    dq = torch.zeros_like(q)
    step = _step(partial_sum, 8 * hidden)
    for first in range(0, rows, step):
        at = slice(first, first + step)
        x, l0 = partial_sum[at].to(compute), inter_lse[at].to(compute)
        rstd = torch.rsqrt(x.square().mean(-1) + eps)
        l1 = (x @ q) * rstd
        a, b = torch.sigmoid(l0 - l1), torch.sigmoid(l1 - l0)
        y0 = torch.where((a > 0)[:, None], inter_out[at].to(compute), 0.0)
        result["out"][at] = (a[:, None] * y0 + b[:, None] * x).to(store)
        result["lse"][at] = torch.logaddexp(l0, l1)
        dy = torch.zeros_like(x) if d_out is None else d_out[at].to(compute)
        dl = torch.zeros_like(l1) if d_lse is None else d_lse[at].to(compute)
        moved = a * b * (dy * (y0 - x)).sum(-1)
        dl1 = b * dl - moved
        to_q = dl1 * rstd
        dx = b[:, None] * dy + to_q[:, None] * q - (to_q * rstd * l1 / hidden)[:, None] * x
        result["dx"][at] = dx.to(store)
        result["dout"][at] = (a[:, None] * dy).to(result["dout"].dtype)
        result["dlse"][at] = (a * dl + moved).to(result["dlse"].dtype)
        dq += to_q @ x
    result["dq"] = dq.to(torch.float64 if wide else tensors["query"].dtype)
    return _wanted(result, cotangents)


def _wanted(result: Tensors, cotangents: Tensors) -> Tensors:
    """Outputs only, where there is no cotangent to make a gradient of."""
    return result if cotangents else {name: result[name] for name in ("out", "lse")}
