"""Which launches are the same but for their tensors, and the launches that were made so far."""

from __future__ import annotations

from typing import Any

from kernels_triton.arguments import AttentionArgs
from kernels_triton.attention_config import changes
from kernels_triton.attention_runtime import Launch

prepared: dict[tuple[Any, ...], Launch] = {}
"""Launches by kind of call."""
_MOST = 4096


def kind_of_call(args: AttentionArgs, *more: Any) -> tuple[Any, ...]:
    """All that a launch depends on but the tensors' addresses beyond their alignment."""
    q, k, v, cu_q, cu_k = args.q, args.k, args.v, args.cu_seqlens_q, args.cu_seqlens_k
    places = q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), q.dtype, q.get_device()
    at: tuple[int, ...] = q.data_ptr() % 16, k.data_ptr() % 16, v.data_ptr() % 16
    if cu_q is not None and cu_k is not None:
        at += (cu_q.shape[0], cu_q.data_ptr() % 16, cu_k.data_ptr() % 16)
    rest = args.causal, args.softmax_scale, args.max_seqlen_q, args.max_seqlen_k, changes()
    return places, at, rest, more


def keep(key: tuple[Any, ...], made: Launch | None) -> None:
    """Remember a launch for later calls of its kind; None, under the interpreter, is no launch."""
    if made is not None:
        if len(prepared) >= _MOST:
            prepared.clear()
        prepared[key] = made
