"""FlashAttention in Triton: the public function, its custom ops, and the raw entry points.

Semantics: causal is aligned bottom-right; a row that sees no key gives out 0, lse -inf and no gradient; zero-length
sequences and rows beyond `cu_seqlens[-1]` are legal. Out and lse are both differentiable. Every call is deterministic.
"""

from __future__ import annotations

from typing import Any

import torch

from kernels_triton import attention_launch as launch
from kernels_triton.arguments import AttentionArgs, attention_arguments, check_backward, empty_results, resolved
from kernels_triton.attention_config import TileConfig, candidates, choose, config_for, config_key, record, tuned
from kernels_triton.attention_tiles import INTERPRETED
from kernels_triton.dispatch import differentiated, watched
from kernels_triton.second_order import refuse_second_order


def attention_unsupported(
    *,
    dtype: torch.dtype,
    head_dim: int,
    value_head_dim: int,
    heads: int,
    kv_heads: int,
    causal: bool = False,
    varlen: bool = False,
) -> str | None:
    """Why these kernels cannot take such a call, or None. Causal, packed and grouped calls are all supported."""
    del causal, varlen
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"triton takes float16, bfloat16 and float32, not {dtype}"
    for name, dim in (("head_dim", head_dim), ("value_head_dim", value_head_dim)):
        if dim <= 0 or dim % 8 or dim > 256:
            return f"triton takes a {name} that is a multiple of 8 up to 256, not {dim}"
    if kv_heads <= 0 or heads % kv_heads:
        return f"triton takes kv_heads that divide heads, not {kv_heads} and {heads}"
    if not INTERPRETED and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < 9:
        return "triton's attention kernels load through TMA, which needs compute capability 9.0 or newer"
    return None


def _packed_args(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    causal: bool,
    softmax_scale: float,
) -> AttentionArgs:
    if cu_seqlens_q is None:
        max_seqlen_q, max_seqlen_k = q.shape[1], k.shape[1]
    return resolved(
        AttentionArgs(q, k, v, causal, softmax_scale, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    )


@torch.library.custom_op("attnbench_triton::attention_forward", mutates_args=())
def _forward_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    causal: bool,
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    return launch.forward(
        _packed_args(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, softmax_scale)
    )


@_forward_op.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    causal: bool,
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    return empty_results(q, v)


@torch.library.custom_op("attnbench_triton::attention_backward", mutates_args=())
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
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    causal: bool,
    softmax_scale: float,
    needs_dq: bool,
    needs_dk: bool,
    needs_dv: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    args = _packed_args(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, softmax_scale)
    gradients = launch.backward(args, out, lse, dout, dlse, (needs_dq, needs_dk, needs_dv))
    dq, dk, dv = (q.new_empty(0) if gradient is None else gradient for gradient in gradients)
    return dq, dk, dv


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
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    causal: bool,
    softmax_scale: float,
    needs_dq: bool,
    needs_dk: bool,
    needs_dv: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        q.new_empty(q.shape if needs_dq else (0,)),
        k.new_empty(k.shape if needs_dk else (0,)),
        v.new_empty(v.shape if needs_dv else (0,)),
    )


refuse_second_order(_backward_op, 'attnbench.attention(..., backend="eager")')


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, cu_seqlens_q, cu_seqlens_k, *rest = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, cu_seqlens_q, cu_seqlens_k, *output)
    ctx.rest = rest


def _backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    q, k, v, cu_seqlens_q, cu_seqlens_k, out, lse = ctx.saved_tensors
    if dout is None and dlse is None:
        return (None,) * 9
    needs = ctx.needs_input_grad[:3]
    gradients = _backward_op(dout, dlse, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, *ctx.rest, *needs)
    wanted = (gradient if need else None for gradient, need in zip(gradients, needs, strict=True))
    return (*wanted, *(None,) * 6)


_forward_op.register_autograd(_backward, setup_context=_setup_context)


def _check_device(q: torch.Tensor) -> None:
    if q.is_cuda or INTERPRETED:
        return
    raise ValueError(
        f"q is on {q.device}: want CUDA tensors (on a CPU, set TRITON_INTERPRET=1 before triton is imported)"
    )


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
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of queries over keys and values, differentiable through out and lse.

    Dense: q `[B, Sq, H, D]`, k `[B, Sk, Hkv, D]`, v `[B, Sk, Hkv, Dv]`. Packed (with cu_seqlens, int32 `[N + 1]`):
    q `[Tq, H, D]`, k `[Tk, Hkv, D]`, v `[Tk, Hkv, Dv]`. fp16, bf16 or fp32; any strides (what TMA cannot read is
    copied). `deterministic` changes nothing: these kernels always are.

    Returns:
        out `[…, H, Dv]` in q's dtype, contiguous; with `return_lse` also lse, fp32, natural log, `[B, H, Sq]` or
        `[H, Tq]`.

    Raises:
        TypeError, ValueError: see `attention_arguments`; also for CPU tensors outside Triton's interpreter.
    """
    del deterministic
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
    _check_device(q)
    if differentiated(q, k, v) or watched(q, k, v):
        packed_q, packed_k = (args.max_seqlen_q, args.max_seqlen_k) if args.varlen else (None, None)
        out, lse = _forward_op(q, k, v, cu_seqlens_q, cu_seqlens_k, packed_q, packed_k, causal, args.softmax_scale)
    else:
        out, lse = launch.forward(args)
    return (out, lse) if return_lse else out


def attention_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) without autograd: the kernel's own entry point. Options are those of `attention_arguments`."""
    args = attention_arguments(q, k, v, **options)
    _check_device(q)
    return launch.forward(args)


def attention_backward(
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    needs: tuple[bool, bool, bool] = (True, True, True),
    **options: Any,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """(dq, dk, dv) without autograd from the forward's out and lse; None where `needs` is False.

    `dout` has out's shape and any strides, `dlse` lse's; None stands for zeros. Options are those of
    `attention_arguments`.

    Raises:
        TypeError, ValueError: see `attention_arguments` and `check_backward`.
    """
    args = attention_arguments(q, k, v, **options)
    _check_device(q)
    check_backward(args, out, lse, dout, dlse)
    return launch.backward(args, out, lse, dout, dlse, needs)


def tune(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, backward: bool = True, **options: Any) -> dict[str, Any]:
    """Times the candidate tiles of each kernel on these inputs and keeps one for calls of this kind in this process.

    The table's tile stays unless another is at least 3 % faster, so that noise changes no result's bits. A phase of its
    own before timing or graph capture: it launches and synchronises. A kind that was tuned before, or has one
    candidate, costs nothing; under the interpreter nothing is timed.

    Returns:
        The choice by kernel (`forward`, `dq`, `dkv`) as JSON-ready values: tile sizes, and whether it was `tuned`.
    """
    args = attention_arguments(q.detach(), k.detach(), v.detach(), **options)
    _check_device(q)
    kernels = ("forward", "dq", "dkv") if backward else ("forward",)
    keys = {kernel: config_key(kernel, args) for kernel in kernels}
    open_keys = {kernel: key for kernel, key in keys.items() if not tuned(key) and len(candidates(key)) > 1}
    if open_keys and not INTERPRETED and q.numel() and k.numel() and args.batch:
        out, lse = launch.forward(args)
        dout = torch.randn_like(out)
        for kernel, key in open_keys.items():
            times = {config: _time(kernel, args, config, out, lse, dout) for config in candidates(key)}
            default, best = candidates(key)[0], min(times, key=lambda config: times[config])
            choose(key, best if times[best] < 0.97 * times[default] else default)
    return {kernel: record(key) for kernel, key in keys.items()}


def _time(
    kernel: str, args: AttentionArgs, config: TileConfig, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor
) -> float:
    """Median milliseconds of a call with this tile; infinity where it does not fit the device."""
    from triton.runtime.errors import OutOfResources
    from triton.testing import do_bench

    def call() -> None:
        if kernel == "forward":
            launch.forward(args, config)
        else:
            needs = (True, False, False) if kernel == "dq" else (False, True, True)
            launch.backward(args, out, lse, dout, None, needs, {kernel: config})

    try:
        return float(do_bench(call, warmup=10, rep=40, return_mode="median"))
    except OutOfResources:
        return float("inf")


def chosen(args: AttentionArgs) -> dict[str, TileConfig]:
    """The tile that each kernel would use for this call."""
    return {kernel: config_for(config_key(kernel, args)) for kernel in ("forward", "dq", "dkv")}
