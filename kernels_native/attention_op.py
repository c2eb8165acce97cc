"""FlashAttention for Hopper in CUDA C++: the public function, its custom ops, and the raw entry points.

Semantics: causal is aligned bottom-right; a row that sees no key gives out 0, lse -inf and no gradient; zero-length
sequences and rows beyond `cu_seqlens[-1]` are legal. Out and lse are both differentiable.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from kernels_native import sm90_backward, sm90_forward, sm90_mma
from kernels_triton.arguments import AttentionArgs, attention_arguments
from kernels_triton.second_order import refuse_second_order

KERNELS = ("sm90", "sm90_mma")
_DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


@functools.cache
def attention_unsupported(
    kernel: str,
    *,
    dtype: torch.dtype | str,
    head_dim: int,
    value_head_dim: int,
    heads: int,
    kv_heads: int,
    causal: bool = False,
    varlen: bool = False,
    deterministic: bool = False,
    requires_grad: bool = False,
) -> str | None:
    """Why `kernel` ("sm90" or "sm90_mma") cannot take such a call, or None. Needs no GPU.

    Raises:
        ValueError: there is no such kernel.
    """
    del causal, varlen, deterministic
    if kernel not in KERNELS:
        raise ValueError(f"kernel is {kernel!r}: want 'sm90' or 'sm90_mma'")
    name = dtype if isinstance(dtype, str) else _DTYPES.get(dtype, str(dtype))
    if name not in ("fp16", "bf16"):
        return f"{kernel} takes fp16 and bf16, not {name}"
    most = sm90_forward.HEAD_DIMS[-1] if kernel == "sm90" else sm90_mma.HEAD_DIMS[-1]
    for what, dim in (("head_dim", head_dim), ("value_head_dim", value_head_dim)):
        if dim <= 0 or dim % 8 or dim > most:
            return f"{kernel} takes a {what} that is a multiple of 8 up to {most}, not {dim}"
    if kv_heads <= 0 or heads % kv_heads:
        return f"{kernel} takes kv_heads that divide heads, not {kv_heads} and {heads}"
    most = sm90_backward.HEAD_DIMS[-1]
    if kernel == "sm90" and requires_grad and max(head_dim, value_head_dim) > most:
        return f"the backward of sm90 takes head dims up to {most}, not {max(head_dim, value_head_dim)}"
    if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
        return f"{kernel} needs compute capability 9.0 (H100, H200), this GPU is of another"
    return None


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
    positive, scale = sm90_mma.positive_scale(q, softmax_scale)
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
        backward = sm90_backward.backward if kernel == "sm90" else sm90_mma.backward
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
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    rows = (q.shape[1], q.shape[0]) if q.dim() == 3 else (q.shape[0], q.shape[2], q.shape[1])
    return out, q.new_empty(rows, dtype=torch.float32)


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


@torch.compiler.assume_constant_result
def _reason(
    kernel: str,
    dtype: torch.dtype,
    head_dim: int,
    value_head_dim: int,
    heads: int,
    kv_heads: int,
    requires_grad: bool,
) -> str | None:
    """Dynamo takes the answer for a constant, so that no graph breaks on it."""
    return attention_unsupported(
        kernel,
        dtype=dtype,
        head_dim=head_dim,
        value_head_dim=value_head_dim,
        heads=heads,
        kv_heads=kv_heads,
        requires_grad=requires_grad,
    )


def _check(kernel: str, args: AttentionArgs, requires_grad: bool) -> None:
    sizes = args.head_dim, args.value_head_dim, args.heads, args.kv_heads
    reason = _reason(kernel, args.q.dtype, *sizes, requires_grad)
    if reason:
        raise ValueError(f"{reason}; backend='triton' takes more")
    if args.q.device.type != "cuda":
        raise ValueError(f"q is on {args.q.device}: want CUDA tensors (backend='eager' takes others)")


_checked_scales: dict[tuple[Any, ...], float] = {}
_MOST = 4096


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
    `kernel` is "sm90" (wgmma; gradients for head dims up to 128) or "sm90_mma" (mma.sync). `deterministic` makes the
    gradients bitwise reproducible; out and lse always are.

    Returns:
        out `[…, H, Dv]` in q's dtype, contiguous; with `return_lse` also lse, fp32, natural log, `[B, H, Sq]` or
        `[H, Tq]`.

    Raises:
        TypeError, ValueError: see `attention_arguments`; or the kernel does not take the call (the message says why).
        BuildFailed: the kernel did not build or load.
    """
    requires_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    tracing = torch.compiler.is_compiling()
    call: tuple[Any, ...] | None = None
    if not validate and not tracing and cu_seqlens_q is cu_seqlens_k is max_seqlen_q is max_seqlen_k is None:
        # What the checks of a dense call look at: a call that passed them once passes them again.
        tensors = q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device
        call = (tensors, type(causal), softmax_scale, type(softmax_scale), kernel, requires_grad)
    scale = None if call is None else _checked_scales.get(call)
    if scale is None:
        packed = cu_seqlens_q is not None
        args = attention_arguments(
            q,
            k,
            v,
            causal=causal,
            softmax_scale=softmax_scale,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            # These kernels find the sequences on the device; without `validate` a missing maximum costs no wait.
            max_seqlen_q=0 if packed and max_seqlen_q is None and not validate else max_seqlen_q,
            max_seqlen_k=0 if packed and max_seqlen_k is None and not validate else max_seqlen_k,
            validate=validate,
        )
        _check(kernel, args, requires_grad)
        scale = args.softmax_scale
        if call is not None:
            if len(_checked_scales) >= _MOST:
                _checked_scales.clear()
            _checked_scales[call] = scale
    if requires_grad or tracing:
        out, lse = _forward_op(q, k, v, cu_seqlens_q, cu_seqlens_k, causal, scale, kernel, deterministic)
    else:
        # The dispatcher would cost more than the rest of the host's work.
        out, lse = _forward(q, k, v, cu_seqlens_q, cu_seqlens_k, causal, scale, kernel)
    return (out, lse) if return_lse else out


def attention_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, kernel: str = "sm90", **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) without autograd: the kernel's own entry point. Options are those of `attention_arguments`."""
    args = attention_arguments(q, k, v, **options)
    _check(kernel, args, False)
    return _forward(q, k, v, args.cu_seqlens_q, args.cu_seqlens_k, args.causal, args.softmax_scale, kernel)


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
    """
    args = attention_arguments(q, k, v, **options)
    _check(kernel, args, True)
    for name, gradient, like in (("dout", dout, out), ("dlse", dlse, lse)):
        if gradient is not None and gradient.shape != like.shape:
            raise ValueError(f"{name} has shape {list(gradient.shape)}: want {list(like.shape)}")
    cu = args.cu_seqlens_q, args.cu_seqlens_k
    return _backward(dout, dlse, q, k, v, out, lse, *cu, args.causal, args.softmax_scale, kernel, deterministic)
