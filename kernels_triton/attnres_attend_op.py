"""Phase 1 of block attention residuals: the public function, its custom ops, and the raw entry points.

S pseudo-queries attend to N block representations at every position. Logits are <query, key> with
key = value · rsqrt(mean(value²) + eps), unscaled. Statistics, logits and log-sum-exps are fp32, each output is rounded
once. No atomics: every call is bitwise reproducible.
"""

from __future__ import annotations

from typing import Any

import torch

from kernels_triton import attnres_attend_backward as attend_backward
from kernels_triton import attnres_attend_forward as attend_forward
from kernels_triton.attnres_arguments import check_eps, check_gradient, check_phase1, gradient_buffer
from kernels_triton.attnres_common import blocks_of, dense, on_device_of
from kernels_triton.second_order import refuse_second_order

Gradient = torch.Tensor | None
MAX_QUERIES = 64  # of one launch


def _groups(queries: int) -> list[tuple[int, int]]:
    """First and last-but-one of each group of queries that one launch takes."""
    return [(first, min(first + MAX_QUERIES, queries)) for first in range(0, max(queries, 1), MAX_QUERIES)]


def _launch_phase1(
    values: torch.Tensor, queries: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    v, w = blocks_of(values), dense(queries)
    blocks, rows, _ = v.shape
    out = values.new_empty((w.shape[0], *values.shape[1:]))
    lse = values.new_empty(out.shape[:-1], dtype=torch.float32)
    logits = values.new_empty(rows * w.shape[0] * blocks, dtype=torch.float32)
    rstd = values.new_empty((rows, blocks), dtype=torch.float32)
    with on_device_of(values):
        for i, j in _groups(w.shape[0]):
            attend_forward.forward(v, w[i:j], out[i:j], lse[i:j], _share(logits, v, i, j), rstd, eps)
    return out, lse, logits, rstd


def _share(logits: torch.Tensor, v: torch.Tensor, first: int, end: int) -> torch.Tensor:
    """The logits of one group of queries: groups follow one another in memory."""
    return logits[first * v.shape[0] * v.shape[1] : end * v.shape[0] * v.shape[1]]


def _launch_phase1_backward(
    dout: Gradient,
    dlse: Gradient,
    values: torch.Tensor,
    queries: torch.Tensor,
    lse: torch.Tensor,
    logits: torch.Tensor,
    rstd: torch.Tensor,
    dvalues: torch.Tensor,
    dqueries: torch.Tensor,
    accumulate: bool,
) -> None:
    v, w = blocks_of(values), dense(queries)
    if dout is None:
        dout = values.new_zeros(v.shape[-1]).expand(w.shape[0], *values.shape[1:])
    do = blocks_of(dout) if w.shape[0] else dout.reshape(0, v.shape[1], v.shape[2])
    dl = None if dlse is None else dlse.contiguous()
    groups = _groups(w.shape[0])
    # Several groups add up in fp32, so that dvalues is rounded once.
    total = dvalues if len(groups) == 1 else torch.zeros_like(dvalues, dtype=torch.float32)
    with on_device_of(values):
        for i, j in groups:
            attend_backward.backward(
                v,
                w[i:j],
                do[i:j],
                lse[i:j],
                None if dl is None else dl[i:j],
                _share(logits, v, i, j),
                rstd,
                total,
                dqueries[i:j],
                accumulate_v=accumulate or len(groups) > 1,
                accumulate_w=accumulate,
            )
        if total is not dvalues:
            dvalues.copy_(total.add_(dvalues) if accumulate else total)


@torch.library.custom_op("attnbench_triton::attnres_phase1_forward", mutates_args=())
def _phase1_op(
    values: torch.Tensor, queries: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return _launch_phase1(values, queries, eps)


@_phase1_op.register_fake
def _(
    values: torch.Tensor, queries: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    out = values.new_empty((queries.shape[0], *values.shape[1:]))
    rows = values[0].numel() // values.shape[-1]
    return (
        out,
        values.new_empty(out.shape[:-1], dtype=torch.float32),
        values.new_empty(rows * queries.shape[0] * values.shape[0], dtype=torch.float32),
        values.new_empty((rows, values.shape[0]), dtype=torch.float32),
    )


@torch.library.custom_op("attnbench_triton::attnres_phase1_backward", mutates_args=())
def _phase1_backward_op(
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    values: torch.Tensor,
    queries: torch.Tensor,
    lse: torch.Tensor,
    logits: torch.Tensor,
    rstd: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    dvalues, dqueries = values.new_empty(values.shape), queries.new_empty(queries.shape)
    _launch_phase1_backward(dout, dlse, values, queries, lse, logits, rstd, dvalues, dqueries, False)
    return dvalues, dqueries


@_phase1_backward_op.register_fake
def _(
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    values: torch.Tensor,
    queries: torch.Tensor,
    lse: torch.Tensor,
    logits: torch.Tensor,
    rstd: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    return values.new_empty(values.shape), queries.new_empty(queries.shape)


refuse_second_order(_phase1_backward_op, 'attnbench.attnres_phase1(..., backend="eager")')


def _phase1_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    values, queries, _eps = inputs
    _out, lse, logits, rstd = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(logits, rstd)
    ctx.save_for_backward(values, queries, lse, logits, rstd)


def _phase1_gradients(ctx: Any, dout: Gradient, dlse: Gradient, *_: Gradient) -> tuple[Gradient, ...]:
    if dout is None and dlse is None:
        return None, None, None
    dvalues, dqueries = _phase1_backward_op(dout, dlse, *ctx.saved_tensors)
    needs = ctx.needs_input_grad
    return dvalues if needs[0] else None, dqueries if needs[1] else None, None


_phase1_op.register_autograd(_phase1_gradients, setup_context=_phase1_context)


def attnres_phase1(
    values: torch.Tensor, queries: torch.Tensor, eps: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Batched inter-block attention of S pseudo-queries over N block representations, differentiable in both outputs.

    values `[N, ..., D]` (N up to 64), queries `[S, D]`; fp32, fp16 or bf16, the two dtypes may differ; any strides.
    eps defaults to `torch.finfo(torch.float32).eps`.

    Returns:
        out `[S, ..., D]` in the values' dtype and lse `[S, ...]` in fp32 (natural log), both contiguous.

    Raises:
        TypeError, ValueError: a dtype, shape or device is wrong, or the tensors are on a CPU outside Triton's
            interpreter.
    """
    check_phase1(values, queries)
    out, lse, _, _ = _phase1_op(values, queries, check_eps(eps))
    return out, lse


def attnres_phase1_forward(
    values: torch.Tensor, queries: torch.Tensor, eps: float | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, lse, logits, rstd) without autograd: the kernel's own entry point.

    logits (fp32, one a position, query and block, in the backward's own order) and rstd `[R, N]` (R positions, fp32)
    are what the backward starts from.
    """
    check_phase1(values, queries)
    return _launch_phase1(values, queries, check_eps(eps))


def attnres_phase1_backward(
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    values: torch.Tensor,
    queries: torch.Tensor,
    lse: torch.Tensor,
    logits: torch.Tensor,
    rstd: torch.Tensor,
    *,
    dvalues: torch.Tensor | None = None,
    dqueries: torch.Tensor | None = None,
    accumulate: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dvalues, dqueries) without autograd from the forward's lse, logits and rstd.

    dout `[S, ..., D]` and dlse `[S, ...]` may have any strides; None stands for zeros. Contiguous buffers may be given
    to write into; with `accumulate` the gradients are added to what they hold (added in fp32, rounded once).

    Raises:
        TypeError, ValueError: a tensor has the wrong dtype, shape, device or layout, or `accumulate` lacks a buffer.
    """
    check_phase1(values, queries)
    shape = torch.Size((queries.shape[0], *values.shape[1:]))
    check_gradient("dout", dout, shape)
    check_gradient("dlse", dlse, shape[:-1])
    dvalues = gradient_buffer("dvalues", dvalues, values, accumulate)
    dqueries = gradient_buffer("dqueries", dqueries, queries, accumulate)
    _launch_phase1_backward(dout, dlse, values, queries, lse, logits, rstd, dvalues, dqueries, accumulate)
    return dvalues, dqueries
