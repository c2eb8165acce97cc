"""FlashAttention for Hopper in CUDA C++: the public function, its custom ops, and the raw entry points.

Semantics: causal is aligned bottom-right; a row that sees no key gives out 0, lse -inf and no gradient; zero-length
sequences and rows beyond `cu_seqlens[-1]` are legal. Out and lse are both differentiable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernels_native import sm90_backward, sm90_backward_wide, sm90_forward, sm90_mma
from kernels_native.attention_checks import check, checked_scale
from kernels_native.geometry import positive_scale
from kernels_triton.arguments import attention_arguments, check_backward, empty_results
from kernels_triton.dispatch import differentiated, watched
from kernels_triton.second_order import refuse_second_order


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    causal: bool,
    softmax_scale: float,
    kernel: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    if torch._C._cuda_getDevice() != q.get_device():
        with torch.cuda.device(q.device):
            return _forward(q, k, v, cu_seqlens_q, cu_seqlens_k, causal, softmax_scale, kernel)
    if kernel == "sm90_mma":
        return sm90_mma.forward(q, k, v, cu_seqlens_q, cu_seqlens_k, causal, softmax_scale)
    positive, scale = positive_scale(q, softmax_scale)
    return sm90_forward.forward(
        positive, k, v, causal=causal, softmax_scale=scale, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k
    )


def _backward(
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    causal: bool,
    softmax_scale: float,
    kernel: str,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    with torch.cuda.device(q.device):
        dout = torch.zeros_like(out) if dout is None else dout
        backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
        if kernel == "sm90_mma":
            backward = sm90_mma.backward
        elif max(q.shape[-1], v.shape[-1]) <= sm90_backward.HEAD_DIMS[-1]:
            backward = sm90_backward.backward
        else:
            backward = sm90_backward_wide.backward
        return backward(dout, dlse, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, causal, softmax_scale, deterministic)


@torch.library.custom_op("attnbench_native::attention_forward", mutates_args=(), device_types="cuda")
def _forward_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    causal: bool,
    softmax_scale: float,
    kernel: str,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    del deterministic  # the forward always is; the backward reads it
    return _forward(q, k, v, cu_seqlens_q, cu_seqlens_k, causal, softmax_scale, kernel)


@_forward_op.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    causal: bool,
    softmax_scale: float,
    kernel: str,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    return empty_results(q, v)


@torch.library.custom_op("attnbench_native::attention_backward", mutates_args=(), device_types="cuda")
def _backward_op(
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    causal: bool,
    softmax_scale: float,
    kernel: str,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    cu = cu_seqlens_q, cu_seqlens_k
    return _backward(dout, dlse, q, k, v, out, lse, *cu, causal, softmax_scale, kernel, deterministic)


@_backward_op.register_fake
def _(
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    causal: bool,
    softmax_scale: float,
    kernel: str,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


refuse_second_order(_backward_op, 'attnbench.attention(..., backend="eager")')


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, cu_seqlens_q, cu_seqlens_k, causal, softmax_scale, kernel, deterministic = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, cu_seqlens_q, cu_seqlens_k, *output)
    ctx.rest = causal, softmax_scale, kernel, deterministic


def _autograd(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    q, k, v, cu_seqlens_q, cu_seqlens_k, out, lse = ctx.saved_tensors
    if dout is None and dlse is None:
        return (None,) * 9
    gradients = _backward_op(dout, dlse, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, *ctx.rest)
    wanted = (gradient if need else None for gradient, need in zip(gradients, ctx.needs_input_grad, strict=False))
    return (*wanted, *(None,) * 6)


_forward_op.register_autograd(_autograd, setup_context=_setup_context)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    validate: bool = False,
    kernel: str = "sm90",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of queries over keys and values, differentiable in out and lse.

    Dense: q `[B, Sq, H, D]`, k `[B, Sk, Hkv, D]`, v `[B, Sk, Hkv, Dv]`. Packed (with cu_seqlens, int32 `[N + 1]`):
    q `[Tq, H, D]`, k `[Tk, Hkv, D]`, v `[Tk, Hkv, Dv]`. fp16 or bf16; any strides (what TMA cannot read is copied).
    `kernel` is "sm90" (wgmma) or "sm90_mma" (mma.sync). `deterministic` makes the
    gradients bitwise reproducible; out and lse always are.

    Returns:
        out `[…, H, Dv]` in q's dtype, contiguous; with `return_lse` also lse, fp32, natural log, `[B, H, Sq]` or
        `[H, Tq]`.

    Raises:
        TypeError, ValueError: see `attention_arguments`; or the kernel does not take the call (the message says why).
        BuildFailed: the kernel did not build or load.
    """
    requires_grad = differentiated(q, k, v)
    scale = checked_scale(
        q,
        k,
        v,
        causal,
        softmax_scale,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        validate,
        kernel,
        requires_grad,
    )
    if requires_grad or watched(q, k, v):
        out, lse = _forward_op(q, k, v, cu_seqlens_q, cu_seqlens_k, causal, scale, kernel, deterministic)
    else:
        out, lse = _forward(q, k, v, cu_seqlens_q, cu_seqlens_k, causal, scale, kernel)
    return (out, lse) if return_lse else out


def attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    validate: bool = False,
    kernel: str = "sm90",
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) without autograd: the kernel's own entry point. Arguments are those of `attention`."""
    most = max_seqlen_q, max_seqlen_k
    cu = cu_seqlens_q, cu_seqlens_k
    scale = checked_scale(q, k, v, causal, softmax_scale, *cu, *most, validate, kernel, False)
    return _forward(q, k, v, *cu, causal, scale, kernel)


def attention_backward(
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    deterministic: bool = False,
    kernel: str = "sm90",
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv) without autograd, from the forward's out and lse.

    `dout` has out's shape and any strides, `dlse` lse's; None stands for zeros. Options are those of
    `attention_arguments`.

    Raises:
        TypeError, ValueError: see `attention_arguments` and `check_backward`.
    """
    args = attention_arguments(q, k, v, **options)
    check(kernel, args, True)
    check_backward(args, out, lse, dout, dlse)
    cu = args.cu_seqlens_q, args.cu_seqlens_k
    return _backward(dout, dlse, q, k, v, out, lse, *cu, args.causal, args.softmax_scale, kernel, deterministic)
