"""From checked arguments to kernel launches: descriptors, grids and outputs, without autograd."""

from __future__ import annotations

from typing import Any

import torch

from kernels_triton.arguments import AttentionArgs, empty_results
from kernels_triton.attention_backward_kernels import attention_dkv_kernel, attention_dq_kernel
from kernels_triton.attention_config import TileConfig, config_for, config_key, padded
from kernels_triton.attention_forward_kernel import attention_forward_kernel
from kernels_triton.attention_prepared import keep, kind_of_call, prepared
from kernels_triton.attention_runtime import aligned, descriptor, gluon_kernels, launch

LOG2_E = 1.4426950408889634
# Keys and values of the heads walked together should stay in half of an H200's 50 MB L2.
L2_SHARE = 24 * 2**20
Gradient = torch.Tensor | None


def _tiles(args: AttentionArgs, block: int, *, keys: bool) -> int:
    longest = args.max_seqlen_k if keys else args.max_seqlen_q
    assert longest is not None
    return max(1, -(-longest // block))


def _pairs(args: AttentionArgs, heads: int) -> int:
    # Packed input has one more index, for the rows beyond the last sequence.
    return (args.batch + 1 if args.varlen else args.batch) * heads


def _group(args: AttentionArgs, *, keys: bool) -> int:
    """How many (sequence, head) pairs run side by side: as many as L2 holds the streamed operands of."""
    if not args.causal:
        return 1
    heads_per_kv = args.heads // args.kv_heads
    rows = (args.max_seqlen_q if keys else args.max_seqlen_k) or 1
    bytes_per_pair = rows * (args.head_dim + args.value_head_dim) * args.q.element_size()
    if keys:
        bytes_per_pair *= heads_per_kv
        heads_per_kv = 1
    return max(1, min(L2_SHARE // max(1, bytes_per_pair), 32)) * heads_per_kv


def _precision(args: AttentionArgs) -> str:
    return "ieee" if args.q.dtype == torch.float32 else "tf32"


def forward(args: AttentionArgs, config: TileConfig | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """out `[…, H, Dv]` in q's dtype and lse (fp32, natural log; `[B, H, Sq]`, packed `[H, Tq]`), both contiguous."""
    q, k, v = args.q, args.k, args.v
    out, lse = empty_results(q, v)
    key = kind_of_call(args, "forward", config)
    known = prepared.get(key)
    if known is not None and torch._C._cuda_getDevice() == q.get_device():
        known(q, k, v, out, lse, args.cu_seqlens_q, args.cu_seqlens_k)
        return out, lse
    if q.numel() == 0 or k.numel() == 0 or args.batch == 0:
        return out.zero_(), lse.fill_(float("-inf"))
    config = config or config_for(config_key("forward", args))
    q, k, v = aligned(q), aligned(k), aligned(v)
    tiles = _tiles(args, config.block_m, keys=False)
    seqlen_q, seqlen_k, tokens_q, _ = _lengths(args)
    rows = 64 if config.gluon else config.block_m
    constants = {
        **_constants(args, config, tile="BLOCK_N"),
        "NEGATIVE_SCALE": args.softmax_scale < 0,
        "ALL_LIVE": _all_live(args, config),
        "HEAD_DIM_V": args.value_head_dim,
    }
    if not config.gluon:
        constants |= {"BLOCK_M": config.block_m, "PRECISION": _precision(args)}
    kernel = gluon_kernels().forward if config.gluon else attention_forward_kernel
    with torch.cuda.device_of(q):
        tensors = (
            descriptor(q, rows, config),
            descriptor(k, config.block_n, config),
            descriptor(v, config.block_n, config),
            out,
            lse,
            args.cu_seqlens_q,
            args.cu_seqlens_k,
        )
        numbers = (
            args.batch,
            args.heads,
            seqlen_q,
            seqlen_k,
            tokens_q,
            tiles,
            _group(args, keys=False),
            args.softmax_scale * LOG2_E,
        )
        made = launch(kernel, tiles * _pairs(args, args.heads), tensors, numbers, constants)
    if q is args.q and k is args.k and v is args.v:
        keep(key, made)
    return out, lse


def backward(
    args: AttentionArgs,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    needs: tuple[bool, bool, bool] = (True, True, True),
    configs: dict[str, TileConfig] | None = None,
) -> tuple[Gradient, Gradient, Gradient]:
    """dq, dk, dv in the inputs' dtype, contiguous; None where `needs` says that nobody wants it.

    `dout` and `dlse` are the upstream gradients; None stands for zeros, and a missing `dlse` costs nothing.
    """
    needs_dq, needs_dkv = needs[0], needs[1] or needs[2]
    q, k, v = args.q, args.k, args.v
    dq = torch.empty_like(q, memory_format=torch.contiguous_format) if needs_dq else None
    dk = torch.empty_like(k, memory_format=torch.contiguous_format) if needs_dkv else None
    dv = torch.empty_like(v, memory_format=torch.contiguous_format) if needs_dkv else None
    gradients = (dq, dk if needs[1] else None, dv if needs[2] else None)
    nothing = q.numel() == 0 or k.numel() == 0 or args.batch == 0 or (dout is None and dlse is None)
    if nothing or not (needs_dq or needs_dkv):
        for gradient in (dq, dk, dv):
            if gradient is not None:
                gradient.zero_()
        return gradients
    dout = torch.zeros_like(out) if dout is None else dout.to(out.dtype)
    ready = AttentionArgs(
        aligned(q), aligned(k), aligned(v), args.causal, args.softmax_scale, args.cu_seqlens_q, args.cu_seqlens_k,
        args.max_seqlen_q, args.max_seqlen_k,
    )  # fmt: skip
    lse = lse.contiguous()
    dlse = None if dlse is None else dlse.to(torch.float32)
    shift, delta = torch.empty_like(lse), torch.empty_like(lse)
    dout = aligned(dout)
    configs = configs or {}
    with torch.cuda.device_of(q):
        config = configs.get("dq") or config_for(config_key("dq", args))
        _launch_dq(ready, config, dout, aligned(out.contiguous()), lse, dlse, shift, delta, dq)
        if dk is not None and dv is not None:
            config = configs.get("dkv") or config_for(config_key("dkv", args))
            _launch_dkv(ready, config, dout, shift, delta, dk, dv)
    return gradients


def _launch_dq(
    args: AttentionArgs,
    config: TileConfig,
    dout: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dlse: torch.Tensor | None,
    shift: torch.Tensor,
    delta: torch.Tensor,
    dq: torch.Tensor | None,
) -> None:
    """Fills shift and delta, and dq where it is wanted."""
    raw = (args.q, args.k, args.v, dout, out, lse, dlse, shift, delta, dq, args.cu_seqlens_q, args.cu_seqlens_k)
    given: tuple[Any, ...] = dout.stride(), dout.data_ptr() % 16, out.data_ptr() % 16, lse.data_ptr() % 16, dq is None
    if dlse is not None:
        given += (dlse.stride(), dlse.data_ptr() % 16)
    key = kind_of_call(args, "dq", config, *given)
    known = prepared.get(key)
    if known is not None:
        known(*raw)
        return
    tiles = _tiles(args, config.block_m, keys=False)
    seqlen_q, seqlen_k, tokens_q, _ = _lengths(args)
    dlse_strides: tuple[int, ...] = (0, 0, 0)
    if dlse is not None:
        dlse_strides = (0, *dlse.stride()) if args.varlen else dlse.stride()
    rows = 64 if config.gluon else config.block_m
    constants = {
        **_constants(args, config, tile="BLOCK_N"),
        "HEAD_DIM": args.head_dim,
        "ALL_LIVE": _all_live(args, config),
        "HAS_DLSE": dlse is not None,
        "COMPUTE_DQ": dq is not None,
    }
    if config.gluon:
        constants |= {"HEAD_DIM_V": args.value_head_dim, "AHEAD": config.num_stages >= 3}
    else:
        constants |= {"BLOCK_M": config.block_m, "PRECISION": _precision(args)}
    kernel = gluon_kernels().dq if config.gluon else attention_dq_kernel
    tensors = (
        descriptor(args.q, rows, config),
        descriptor(args.k, config.block_n, config),
        descriptor(args.v, config.block_n, config),
        descriptor(dout, rows, config),
        out if config.gluon else descriptor(out, rows, config),
        lse,
        dlse,
        shift,
        delta,
        dq,
        args.cu_seqlens_q,
        args.cu_seqlens_k,
    )
    numbers = (
        args.batch,
        args.heads,
        seqlen_q,
        seqlen_k,
        tokens_q,
        tiles,
        _group(args, keys=False),
        args.softmax_scale * LOG2_E,
        args.softmax_scale,
        *dlse_strides,
    )
    keep(key, launch(kernel, tiles * _pairs(args, args.heads), tensors, numbers, constants))


def _launch_dkv(
    args: AttentionArgs,
    config: TileConfig,
    dout: torch.Tensor,
    shift: torch.Tensor,
    delta: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
) -> None:
    raw = (args.q, args.k, args.v, dout, shift, delta, dk, dv, args.cu_seqlens_q, args.cu_seqlens_k)
    key = kind_of_call(args, "dkv", config, dout.stride(), dout.data_ptr() % 16)
    known = prepared.get(key)
    if known is not None:
        known(*raw)
        return
    tiles = _tiles(args, config.block_n, keys=True)
    rows = 64 if config.gluon else config.block_n
    constants = {
        **_constants(args, config, tile="BLOCK_M"),
        "HEAD_DIM": args.head_dim,
        "HEAD_DIM_V": args.value_head_dim,
    }
    if not config.gluon:
        constants |= {"BLOCK_N": config.block_n, "PRECISION": _precision(args)}
    kernel = gluon_kernels().dkv if config.gluon else attention_dkv_kernel
    tensors = (
        descriptor(args.q, config.block_m, config),
        descriptor(args.k, rows, config),
        descriptor(args.v, rows, config),
        descriptor(dout, config.block_m, config),
        shift,
        delta,
        dk,
        dv,
        args.cu_seqlens_q,
        args.cu_seqlens_k,
    )
    numbers = (
        args.batch,
        args.kv_heads,
        *_lengths(args),
        tiles,
        _group(args, keys=True),
        args.softmax_scale * LOG2_E,
        args.softmax_scale,
    )
    keep(key, launch(kernel, tiles * _pairs(args, args.kv_heads), tensors, numbers, constants))


def _lengths(args: AttentionArgs) -> tuple[int, int, int, int]:
    """(seqlen_q, seqlen_k, tokens_q, tokens_k); the first two are 0 for packed input, the last two for dense."""
    rows = (args.q.shape[-3], args.k.shape[-3])
    return (0, 0, *rows) if args.varlen else (*rows, 0, 0)


def _constants(args: AttentionArgs, config: TileConfig, *, tile: str) -> dict[str, Any]:
    """What every kernel takes; `tile` names the block that it streams."""
    return {
        "GROUP_SIZE": args.heads // args.kv_heads,
        tile: config.block_n if tile == "BLOCK_N" else config.block_m,
        "D": padded(args.head_dim),
        "DV": padded(args.value_head_dim),
        "CAUSAL": args.causal,
        "VARLEN": args.varlen,
        "STAGES": config.num_stages,
        "num_warps": config.num_warps,
        **({} if config.gluon else {"num_stages": config.num_stages}),
    }


def _all_live(args: AttentionArgs, config: TileConfig) -> bool:
    return not args.varlen and not args.causal and args.k.shape[1] % config.block_n == 0
