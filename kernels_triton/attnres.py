"""Block attention residuals in Triton: public functions, their custom ops, and the raw entry points.

Phase 1 attends S pseudo-queries to N block representations at every position; phase 2 merges one such result with the
intra-block partial sum. Logits are <query, key> with key = value · rsqrt(mean(value²) + eps), unscaled. Statistics,
logits and log-sum-exps are fp32, each output is rounded once. No atomics: every call is bitwise reproducible.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from kernels_triton import attnres_attend_backward as attend_backward
from kernels_triton import attnres_attend_forward as attend_forward
from kernels_triton import attnres_merge as merge
from kernels_triton.attnres_arguments import check_buffer, check_eps, check_gradient, check_phase1, check_phase2
from kernels_triton.attnres_common import blocks_of, rows_of

Gradient = torch.Tensor | None
MAX_QUERIES = 64  # of one launch


def _on(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def _groups(queries: int) -> list[tuple[int, int]]:
    """First and last-but-one of each group of queries that one launch takes."""
    return [(first, min(first + MAX_QUERIES, queries)) for first in range(0, max(queries, 1), MAX_QUERIES)]


def _launch_phase1(
    values: torch.Tensor, queries: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    v, w = blocks_of(values), _dense(queries)
    blocks, rows, _ = v.shape
    out = values.new_empty((w.shape[0], *values.shape[1:]))
    lse = values.new_empty(out.shape[:-1], dtype=torch.float32)
    logits = values.new_empty(rows * w.shape[0] * blocks, dtype=torch.float32)
    rstd = values.new_empty((rows, blocks), dtype=torch.float32)
    with _on(values):
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
    v, w = blocks_of(values), _dense(queries)
    if dout is None:
        dout = values.new_zeros(v.shape[-1]).expand(w.shape[0], *values.shape[1:])
    do = blocks_of(dout) if w.shape[0] else dout.reshape(0, v.shape[1], v.shape[2])
    dl = None if dlse is None else dlse.contiguous()
    groups = _groups(w.shape[0])
    # Several groups add up in fp32, so that dvalues is rounded once.
    total = dvalues if len(groups) == 1 else torch.zeros_like(dvalues, dtype=torch.float32)
    with _on(values):
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

    values `[N, ..., D]` (N up to 128), queries `[S, D]`; fp32, fp16 or bf16, the two dtypes may differ; any strides.
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
    dvalues = _buffer("dvalues", dvalues, values, accumulate)
    dqueries = _buffer("dqueries", dqueries, queries, accumulate)
    _launch_phase1_backward(dout, dlse, values, queries, lse, logits, rstd, dvalues, dqueries, accumulate)
    return dvalues, dqueries


def _buffer(name: str, given: torch.Tensor | None, like: torch.Tensor, accumulate: bool) -> torch.Tensor:
    if given is not None:
        check_buffer(name, given, like)
        return given
    if accumulate:
        raise ValueError(f"accumulate is True and {name} is missing: pass the buffer to add to")
    return like.new_empty(like.shape)


def _launch_phase2(
    partial_sum: torch.Tensor, query: torch.Tensor, inter_out: torch.Tensor, inter_lse: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    out = partial_sum.new_empty(partial_sum.shape)
    lse = partial_sum.new_empty(partial_sum.shape[:-1], dtype=torch.float32)
    with _on(partial_sum):
        merge.forward(rows_of(partial_sum), _dense(query), rows_of(inter_out), inter_lse.contiguous(), out, lse, eps)
    return out, lse


def _launch_phase2_backward(
    dout: Gradient,
    dlse: Gradient,
    partial_sum: torch.Tensor,
    query: torch.Tensor,
    inter_out: torch.Tensor,
    inter_lse: torch.Tensor,
    eps: float,
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    accumulate: bool,
) -> None:
    if dout is None:
        dout = partial_sum.new_zeros(partial_sum.shape[-1]).expand(partial_sum.shape)
    with _on(partial_sum):
        merge.backward(
            rows_of(partial_sum),
            _dense(query),
            rows_of(inter_out),
            inter_lse.contiguous(),
            rows_of(dout),
            None if dlse is None else dlse.contiguous(),
            *gradients,
            eps,
            accumulate,
        )


@torch.library.custom_op("attnbench_triton::attnres_phase2_forward", mutates_args=())
def _phase2_op(
    partial_sum: torch.Tensor, query: torch.Tensor, inter_out: torch.Tensor, inter_lse: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return _launch_phase2(partial_sum, query, inter_out, inter_lse, eps)


@_phase2_op.register_fake
def _(
    partial_sum: torch.Tensor, query: torch.Tensor, inter_out: torch.Tensor, inter_lse: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        partial_sum.new_empty(partial_sum.shape),
        partial_sum.new_empty(partial_sum.shape[:-1], dtype=torch.float32),
    )


@torch.library.custom_op("attnbench_triton::attnres_phase2_backward", mutates_args=())
def _phase2_backward_op(
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    partial_sum: torch.Tensor,
    query: torch.Tensor,
    inter_out: torch.Tensor,
    inter_lse: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    gradients = _new_gradients(partial_sum, query, inter_out, inter_lse)
    _launch_phase2_backward(dout, dlse, partial_sum, query, inter_out, inter_lse, eps, gradients, False)
    return gradients


@_phase2_backward_op.register_fake
def _(
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    partial_sum: torch.Tensor,
    query: torch.Tensor,
    inter_out: torch.Tensor,
    inter_lse: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return _new_gradients(partial_sum, query, inter_out, inter_lse)


def _new_gradients(
    partial_sum: torch.Tensor, query: torch.Tensor, inter_out: torch.Tensor, inter_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        partial_sum.new_empty(partial_sum.shape),
        query.new_empty(query.shape),
        inter_out.new_empty(inter_out.shape),
        inter_lse.new_empty(inter_lse.shape),
    )


def _phase2_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *tensors, eps = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)
    ctx.eps = eps


def _phase2_gradients(ctx: Any, dout: Gradient, dlse: Gradient) -> tuple[Gradient, ...]:
    if dout is None and dlse is None:
        return (None,) * 5
    gradients = _phase2_backward_op(dout, dlse, *ctx.saved_tensors, ctx.eps)
    needs = ctx.needs_input_grad
    return (*(gradient if need else None for gradient, need in zip(gradients, needs, strict=False)), None)


_phase2_op.register_autograd(_phase2_gradients, setup_context=_phase2_context)


def attnres_phase2(
    partial_sum: torch.Tensor,
    query: torch.Tensor,
    inter_out: torch.Tensor,
    inter_lse: torch.Tensor,
    eps: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Online-softmax merge of an inter-block result with the intra-block partial sum, differentiable in both outputs.

    partial_sum and inter_out `[..., D]`, query `[D]` in fp32, fp16 or bf16 (dtypes may differ), inter_lse `[...]` in
    any float dtype; any strides. A position whose inter_lse is -inf gives its partial sum. eps defaults to
    `torch.finfo(torch.float32).eps`.

    Returns:
        out `[..., D]` in the partial sum's dtype and lse `[...]` in fp32 (natural log), both contiguous.

    Raises:
        TypeError, ValueError: a dtype, shape or device is wrong, or the tensors are on a CPU outside Triton's
            interpreter.
    """
    check_phase2(partial_sum, query, inter_out, inter_lse)
    out, lse = _phase2_op(partial_sum, query, inter_out, inter_lse, check_eps(eps))
    return out, lse


def attnres_phase2_forward(
    partial_sum: torch.Tensor,
    query: torch.Tensor,
    inter_out: torch.Tensor,
    inter_lse: torch.Tensor,
    eps: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) without autograd: the kernel's own entry point."""
    check_phase2(partial_sum, query, inter_out, inter_lse)
    return _launch_phase2(partial_sum, query, inter_out, inter_lse, check_eps(eps))


def attnres_phase2_backward(
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    partial_sum: torch.Tensor,
    query: torch.Tensor,
    inter_out: torch.Tensor,
    inter_lse: torch.Tensor,
    eps: float | None = None,
    *,
    dpartial_sum: torch.Tensor | None = None,
    dquery: torch.Tensor | None = None,
    accumulate: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dpartial_sum, dquery, dinter_out, dinter_lse) without autograd.

    dout `[..., D]` and dlse `[...]` may have any strides; None stands for zeros. Contiguous buffers may be given for
    the first two; with `accumulate` these gradients are added to what they hold (added in fp32, rounded once).

    Raises:
        TypeError, ValueError: a tensor has the wrong dtype, shape, device or layout, or `accumulate` lacks a buffer.
    """
    check_phase2(partial_sum, query, inter_out, inter_lse)
    check_gradient("dout", dout, partial_sum.shape)
    check_gradient("dlse", dlse, partial_sum.shape[:-1])
    gradients = (
        _buffer("dpartial_sum", dpartial_sum, partial_sum, accumulate),
        _buffer("dquery", dquery, query, accumulate),
        inter_out.new_empty(inter_out.shape),
        inter_lse.new_empty(inter_lse.shape),
    )
    _launch_phase2_backward(dout, dlse, partial_sum, query, inter_out, inter_lse, check_eps(eps), gradients, accumulate)
    return gradients
