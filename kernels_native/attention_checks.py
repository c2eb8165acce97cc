"""Which calls the native kernels take, and the checks of one call: made once for each kind of call."""

from __future__ import annotations

import functools
from typing import Any

import torch

from kernels_native import sm90_forward, sm90_mma
from kernels_triton.arguments import AttentionArgs, attention_arguments, call_key

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
    del causal, varlen, deterministic, requires_grad
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
    if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
        return f"{kernel} needs compute capability 9.0 (H100, H200), this GPU is of another"
    return None


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


def check(kernel: str, args: AttentionArgs, requires_grad: bool) -> None:
    sizes = args.head_dim, args.value_head_dim, args.heads, args.kv_heads
    reason = _reason(kernel, args.q.dtype, *sizes, requires_grad)
    if reason:
        raise ValueError(f"{reason}; backend='triton' takes more")
    if args.q.device.type != "cuda":
        raise ValueError(f"q is on {args.q.device}: want CUDA tensors (backend='eager' takes others)")


_checked_scales: dict[tuple[Any, ...], float] = {}
_MOST = 4096


def checked_scale(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    softmax_scale: float | None,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    validate: bool,
    kernel: str,
    requires_grad: bool,
) -> float:
    """The softmax scale of a call that passed its checks; a call like one that passed them passes again."""
    given = q, k, v, causal, softmax_scale, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    call = None if validate or torch.compiler.is_compiling() else call_key(*given)
    if call is not None:
        call = (call, kernel, requires_grad)
        scale = _checked_scales.get(call)
        if scale is not None:
            return scale
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
    check(kernel, args, requires_grad)
    if call is not None:
        if len(_checked_scales) >= _MOST:
            _checked_scales.clear()
        _checked_scales[call] = args.softmax_scale
    return args.softmax_scale
