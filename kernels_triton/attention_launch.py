"""From checked arguments to kernel launches: descriptors, grids and outputs, without autograd."""

from __future__ import annotations

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels_triton.arguments import AttentionArgs
from kernels_triton.attention_backward_kernels import attention_dkv_kernel, attention_dq_kernel
from kernels_triton.attention_config import TileConfig, config_for, config_key, padded
from kernels_triton.attention_forward_kernel import attention_forward_kernel

LOG2_E = 1.4426950408889634
# Keys and values of the heads walked together should stay in half of an H200's 50 MB L2.
L2_SHARE = 24 * 2**20
Gradient = torch.Tensor | None


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself where TMA can read it (16-byte strides and base, dense last dimension), else a copy."""
    unit = 16 // tensor.element_size()
    strides = [s for s, n in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if n > 1]
    usable = all(s > 0 and s % unit == 0 and s * tensor.element_size() < 2**40 for s in strides)
    if usable and tensor.stride(-1) == 1 and tensor.data_ptr() % 16 == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _descriptor(tensor: torch.Tensor, rows: int) -> TensorDescriptor:
    """`[batch or 1, heads, rows, head_dim]` view of a natural-layout tensor, read in blocks of `rows` whole rows."""
    if tensor.dim() == 3:
        tensor = tensor.unsqueeze(0)
    shape = [tensor.shape[0], tensor.shape[2], tensor.shape[1], tensor.shape[3]]
    strides = [tensor.stride(0), tensor.stride(2), tensor.stride(1), 1]
    # The stride of a dimension of one means nothing, yet must be legal.
    strides = [tensor.shape[3] if n == 1 else s for s, n in zip(strides[:3], shape[:3], strict=True)] + [1]
    return TensorDescriptor(tensor, shape, strides, [1, 1, rows, padded(shape[3])])


def _tiles(args: AttentionArgs, block: int, *, keys: bool) -> int:
    longest = args.max_seqlen_k if keys else args.max_seqlen_q
    assert longest is not None
    return max(1, -(-longest // block))


def _pairs(args: AttentionArgs, heads: int) -> int:
    # Packed input has one more index, for the rows beyond the last sequence.
    return (args.batch + 1 if args.varlen else args.batch) * heads


def _group(args: AttentionArgs, heads_per_kv: int, *, keys: bool) -> int:
    """How many (sequence, head) pairs run side by side: as many as L2 holds the streamed operands of."""
    if not args.causal:
        return 1
    rows = (args.max_seqlen_q if keys else args.max_seqlen_k) or 1
    bytes_per_pair = rows * (args.head_dim + args.value_head_dim) * args.q.element_size()
    if keys:
        bytes_per_pair *= heads_per_kv
        heads_per_kv = 1
    return max(1, min(L2_SHARE // max(1, bytes_per_pair), 32)) * heads_per_kv


def _precision(args: AttentionArgs) -> str:
    return "ieee" if args.q.dtype == torch.float32 else "tf32"


def _row_shape(args: AttentionArgs) -> tuple[int, ...]:
    return (args.heads, args.q.shape[0]) if args.varlen else (args.batch, args.heads, args.q.shape[1])


def forward(args: AttentionArgs, config: TileConfig | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """out `[…, H, Dv]` in q's dtype and lse (fp32, natural log; `[B, H, Sq]`, packed `[H, Tq]`), both contiguous."""
    q, k, v = args.q, args.k, args.v
    out = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device=q.device)
    lse = torch.empty(_row_shape(args), dtype=torch.float32, device=q.device)
    if q.numel() == 0 or k.numel() == 0 or args.batch == 0:
        return out.zero_(), lse.fill_(float("-inf"))
    config = config or config_for(config_key("forward", args))
    q, k, v = _aligned(q), _aligned(k), _aligned(v)
    tiles = _tiles(args, config.block_m, keys=False)
    pairs = _pairs(args, args.heads)
    with torch.cuda.device_of(q):
        attention_forward_kernel[(tiles * pairs,)](
            _descriptor(q, config.block_m),
            _descriptor(k, config.block_n),
            _descriptor(v, config.block_n),
            out,
            lse,
            args.cu_seqlens_q,
            args.cu_seqlens_k,
            args.batch,
            args.heads,
            0 if args.varlen else q.shape[1],
            0 if args.varlen else k.shape[1],
            q.shape[0] if args.varlen else 0,
            tiles,
            _group(args, args.heads // args.kv_heads, keys=False),
            args.softmax_scale * LOG2_E,
            GROUP_SIZE=args.heads // args.kv_heads,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            D=padded(args.head_dim),
            DV=padded(args.value_head_dim),
            HEAD_DIM_V=args.value_head_dim,
            CAUSAL=args.causal,
            VARLEN=args.varlen,
            NEGATIVE_SCALE=args.softmax_scale < 0,
            ALL_LIVE=_all_live(args, config),
            PRECISION=_precision(args),
            STAGES=config.num_stages,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
    return out, lse


def _all_live(args: AttentionArgs, config: TileConfig) -> bool:
    return not args.varlen and not args.causal and args.k.shape[1] % config.block_n == 0


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
    if dout is None:
        dout = torch.zeros_like(out)
    q, k, v, out, dout = _aligned(q), _aligned(k), _aligned(v), _aligned(out), _aligned(dout.to(out.dtype))
    lse = lse.contiguous()
    dlse_strides = (0, 0, 0)
    if dlse is not None:
        dlse = dlse.to(torch.float32)
        dlse_strides = (0, *dlse.stride()) if args.varlen else dlse.stride()  # type: ignore[assignment]
    shift = torch.empty_like(lse)
    delta = torch.empty_like(lse)
    group_size = args.heads // args.kv_heads
    seqlen_q, seqlen_k = (0, 0) if args.varlen else (q.shape[1], k.shape[1])
    tokens_q, tokens_k = (q.shape[0], k.shape[0]) if args.varlen else (0, 0)

    with torch.cuda.device_of(q):
        config = (configs or {}).get("dq") or config_for(config_key("dq", args))
        tiles = _tiles(args, config.block_m, keys=False)
        attention_dq_kernel[(tiles * _pairs(args, args.heads),)](
            _descriptor(q, config.block_m),
            _descriptor(k, config.block_n),
            _descriptor(v, config.block_n),
            _descriptor(dout, config.block_m),
            _descriptor(out, config.block_m),
            lse,
            dlse,
            shift,
            delta,
            dq,
            args.cu_seqlens_q,
            args.cu_seqlens_k,
            args.batch,
            args.heads,
            seqlen_q,
            seqlen_k,
            tokens_q,
            tiles,
            _group(args, group_size, keys=False),
            args.softmax_scale * LOG2_E,
            args.softmax_scale,
            *dlse_strides,
            GROUP_SIZE=group_size,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            D=padded(args.head_dim),
            DV=padded(args.value_head_dim),
            HEAD_DIM=args.head_dim,
            CAUSAL=args.causal,
            VARLEN=args.varlen,
            ALL_LIVE=_all_live(args, config),
            HAS_DLSE=dlse is not None,
            COMPUTE_DQ=needs_dq,
            PRECISION=_precision(args),
            STAGES=config.num_stages,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
        if needs_dkv:
            config = (configs or {}).get("dkv") or config_for(config_key("dkv", args))
            tiles = _tiles(args, config.block_n, keys=True)
            attention_dkv_kernel[(tiles * _pairs(args, args.kv_heads),)](
                _descriptor(q, config.block_m),
                _descriptor(k, config.block_n),
                _descriptor(v, config.block_n),
                _descriptor(dout, config.block_m),
                shift,
                delta,
                dk,
                dv,
                args.cu_seqlens_q,
                args.cu_seqlens_k,
                args.batch,
                args.kv_heads,
                seqlen_q,
                seqlen_k,
                tokens_q,
                tokens_k,
                tiles,
                _group(args, group_size, keys=True),
                args.softmax_scale * LOG2_E,
                args.softmax_scale,
                GROUP_SIZE=group_size,
                BLOCK_M=config.block_m,
                BLOCK_N=config.block_n,
                D=padded(args.head_dim),
                DV=padded(args.value_head_dim),
                HEAD_DIM=args.head_dim,
                HEAD_DIM_V=args.value_head_dim,
                CAUSAL=args.causal,
                VARLEN=args.varlen,
                PRECISION=_precision(args),
                STAGES=config.num_stages,
                num_warps=config.num_warps,
                num_stages=config.num_stages,
            )
    return gradients


def workspace_bytes(args: AttentionArgs) -> int:
    """What a backward allocates beside its gradients: two fp32 values a query row and head."""
    rows = 1
    for n in _row_shape(args):
        rows *= n
    return 2 * 4 * rows
