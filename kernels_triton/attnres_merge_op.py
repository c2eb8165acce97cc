"""Phase 2 of block attention residuals: the public function, its custom ops, and the raw entry points.

One inter-block result is merged with the intra-block partial sum by an online softmax. Statistics and log-sum-exps are
fp32, each output is rounded once. No atomics: every call is bitwise reproducible.
"""

from __future__ import annotations

from typing import Any

import torch

from kernels_triton import attnres_merge as merge
from kernels_triton.attnres_arguments import check_eps, check_gradient, check_phase2, gradient_buffer
from kernels_triton.attnres_common import dense, on_device_of, rows_of
from kernels_triton.second_order import refuse_second_order

Gradient = torch.Tensor | None


def _launch_phase2(
    partial_sum: torch.Tensor, query: torch.Tensor, inter_out: torch.Tensor, inter_lse: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    out = partial_sum.new_empty(partial_sum.shape)
    lse = partial_sum.new_empty(partial_sum.shape[:-1], dtype=torch.float32)
    with on_device_of(partial_sum):
        merge.forward(rows_of(partial_sum), dense(query), rows_of(inter_out), inter_lse.contiguous(), out, lse, eps)
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
    with on_device_of(partial_sum):
        merge.backward(
            rows_of(partial_sum),
            dense(query),
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


refuse_second_order(_phase2_backward_op, 'attnbench.attnres_phase2(..., backend="eager")')


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
        gradient_buffer("dpartial_sum", dpartial_sum, partial_sum, accumulate),
        gradient_buffer("dquery", dquery, query, accumulate),
        inter_out.new_empty(inter_out.shape),
        inter_lse.new_empty(inter_lse.shape),
    )
    _launch_phase2_backward(dout, dlse, partial_sum, query, inter_out, inter_lse, check_eps(eps), gradients, accumulate)
    return gradients
