"""The public functions: one call for every kernel here, sent to the fastest that takes it.

`backend="auto"` is `sm90`, then `triton`, on a GPU and `eager` on the CPU. A backend takes a call whole, forward and
backward, or not at all. One that is asked for by name and does not take the call is an error with the reason.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from attnbench.errors import did_you_mean
from kernels_triton.arguments import AttentionArgs, attention_arguments

ATTENTION_BACKENDS = ("auto", "sm90", "sm90_mma", "triton", "eager")
RESIDUAL_BACKENDS = ("auto", "triton", "eager")


class Unsupported(ValueError):
    """The backend that was asked for does not take this call; the message says why not."""


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
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of queries over keys and values, differentiable through out and lse.

    Args:
        q: `[B, Sq, H, D]`, or packed `[Tq, H, D]`; fp16, bf16 or fp32, any strides.
        k: `[B, Sk, Hkv, D]` or `[Tk, Hkv, D]`; Hkv divides H.
        v: `[B, Sk, Hkv, Dv]` or `[Tk, Hkv, Dv]`.
        causal: key j is visible to query i where `j <= i + Sk - Sq` (aligned bottom-right), per sequence.
        softmax_scale: multiplies the scores; `D ** -0.5` by default.
        cu_seqlens_q: offsets of packed sequences, int32 `[N + 1]`; given together with `cu_seqlens_k`. Empty sequences
            are legal, and so are rows beyond the last offset.
        max_seqlen_q: longest packed sequence; left out, it is read from cu_seqlens, which waits for the device.
        deterministic: equal calls give equal bits, gradients included, at whatever cost in time.
        validate: also check the values of cu_seqlens, which waits for the device.
        backend: "auto", "sm90", "sm90_mma", "triton" or "eager".

    Returns:
        out `[…, H, Dv]` in q's dtype; with `return_lse` also lse, fp32, natural logarithm, `[B, H, Sq]` or `[H, Tq]`. A
        query that sees no key has out 0, lse -inf and no gradient.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it and what is wanted.
        Unsupported: `backend` does not take this call.
    """
    args = attention_arguments(
        q,
        k,
        v,
        causal=causal,
        softmax_scale=softmax_scale,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        validate=validate,
    )
    chosen = _attention_backend(args, backend, deterministic)
    if chosen == "eager":
        from attnbench.ops.attention_eager import attention as eager

        out, lse = eager(
            q,
            k,
            v,
            causal=causal,
            softmax_scale=args.softmax_scale,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
        )
        return (out, lse) if return_lse else out
    options = {
        "causal": causal,
        "softmax_scale": args.softmax_scale,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "max_seqlen_q": args.max_seqlen_q if args.varlen else None,
        "max_seqlen_k": args.max_seqlen_k if args.varlen else None,
        "return_lse": return_lse,
        "deterministic": deterministic,
    }
    result: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    if chosen == "triton":
        import kernels_triton

        result = kernels_triton.attention(q, k, v, **options)
    else:
        import kernels_native

        result = kernels_native.attention(q, k, v, kernel=chosen, **options)
    return result


def attnres_phase1(
    values: torch.Tensor, queries: torch.Tensor, eps: float | None = None, *, backend: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention residuals between blocks: each pseudo-query attends to the block representations of its row.

    Args:
        values: `[N, …, D]`, the representations of N blocks.
        queries: `[S, D]` pseudo-queries.
        eps: of the RMS norm of the keys; `torch.finfo(torch.float32).eps` by default.
        backend: "auto", "triton" or "eager".

    Returns:
        (out, lse): out `[S, …, D]` in the dtype of values, lse `[S, …]` fp32. Logits are not scaled.

    Raises:
        TypeError, ValueError: an argument is wrong.
        Unsupported: `backend` does not take this call.
    """
    result: tuple[torch.Tensor, torch.Tensor]
    if _residual_backend(values, backend) == "eager":
        from attnbench.ops.attnres_eager import phase1

        result = phase1(values, queries, eps)
    else:
        import kernels_triton

        result = kernels_triton.attnres_phase1(values, queries, eps)
    return result


def attnres_phase2(
    partial_sum: torch.Tensor,
    query: torch.Tensor,
    inter_out: torch.Tensor,
    inter_lse: torch.Tensor,
    eps: float | None = None,
    *,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention residuals within a block: merge the partial sum of this block into what phase 1 gave.

    Args:
        partial_sum: `[…, D]`.
        query: `[D]` pseudo-query.
        inter_out: `[…, D]` and inter_lse: `[…]`, an output of phase 1.
        eps: of the RMS norm of the keys; `torch.finfo(torch.float32).eps` by default.
        backend: "auto", "triton" or "eager".

    Returns:
        (out, lse): merged out `[…, D]` and merged lse `[…]`, fp32.

    Raises:
        TypeError, ValueError: an argument is wrong.
        Unsupported: `backend` does not take this call.
    """
    result: tuple[torch.Tensor, torch.Tensor]
    if _residual_backend(partial_sum, backend) == "eager":
        from attnbench.ops.attnres_eager import phase2

        result = phase2(partial_sum, query, inter_out, inter_lse, eps)
    else:
        import kernels_triton

        result = kernels_triton.attnres_phase2(partial_sum, query, inter_out, inter_lse, eps)
    return result


def _attention_backend(args: AttentionArgs, backend: str, deterministic: bool) -> str:
    _known(backend, ATTENTION_BACKENDS)
    if backend == "auto":
        if not args.q.is_cuda:
            return "eager"
        reasons = []
        for name in ("sm90", "triton"):
            reason = _unsupported(args, name, deterministic)
            if reason is None:
                return name
            reasons.append(f"{name}: {reason}")
        raise Unsupported(f"no kernel takes this call; backend='eager' does. {'; '.join(reasons)}")
    reason = _unsupported(args, backend, deterministic)
    if reason is not None:
        raise Unsupported(f"backend {backend!r} does not take this call: {reason}")
    return backend


def _unsupported(args: AttentionArgs, backend: str, deterministic: bool) -> str | None:
    if backend == "eager":
        return None
    return _reason(
        backend,
        args.q.device.type,
        args.q.device.index,
        args.q.dtype,
        args.head_dim,
        args.value_head_dim,
        args.heads,
        args.kv_heads,
        args.causal,
        args.varlen,
        torch.is_grad_enabled() and (args.q.requires_grad or args.k.requires_grad or args.v.requires_grad),
        deterministic,
    )


@torch.compiler.assume_constant_result
def _reason(*call: Any) -> str | None:
    """Dynamo takes the answer for a constant, so that no graph breaks on it."""
    return _reason_of(*call)


@cache
def _reason_of(
    backend: str,
    device_type: str,
    device_index: int | None,
    dtype: torch.dtype,
    head_dim: int,
    value_head_dim: int,
    heads: int,
    kv_heads: int,
    causal: bool,
    varlen: bool,
    requires_grad: bool,
    deterministic: bool,
) -> str | None:
    call = {
        "dtype": dtype,
        "head_dim": head_dim,
        "value_head_dim": value_head_dim,
        "heads": heads,
        "kv_heads": kv_heads,
        "causal": causal,
        "varlen": varlen,
    }
    reason: str | None
    if backend == "triton":
        import kernels_triton

        reason = kernels_triton.attention_unsupported(**call)
        return reason
    if device_type != "cuda":
        return f"the tensors are on {device_type}, it wants a CUDA device"
    capability = torch.cuda.get_device_capability(device_index)
    if capability != (9, 0):
        return f"the device has compute capability {capability[0]}.{capability[1]}, it wants 9.0 (Hopper)"
    import kernels_native

    reason = kernels_native.attention_unsupported(
        backend, **call, requires_grad=requires_grad, deterministic=deterministic
    )
    return reason


def _residual_backend(values: torch.Tensor, backend: str) -> str:
    _known(backend, RESIDUAL_BACKENDS)
    if backend == "auto":
        return "triton" if values.is_cuda else "eager"
    return backend


def _known(backend: str, names: tuple[str, ...]) -> None:
    if backend not in names:
        raise ValueError(f"unknown backend {backend!r}: want one of {', '.join(names)}.{did_you_mean(backend, names)}")
