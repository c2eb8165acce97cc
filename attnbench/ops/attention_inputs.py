"""Seeded inputs of an attention case."""

from __future__ import annotations

from itertools import accumulate
from math import prod

import torch

from attnbench.ops.base import Inputs
from attnbench.scenario.case import AttentionCase

TORCH_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
ON_DEVICE = 1 << 25  # elements: from here on drawing on the CPU would take longer than measuring


def make_inputs(case: AttentionCase, device: str, *, extra_rows: int = 0) -> Inputs:
    """Standard normal q, k, v and cotangents of out (in the case's dtype) and lse (fp32), leaves that require grad.

    Up to 2^25 elements in all they are drawn on the CPU, so equal cases get equal values on any device; larger cases
    are drawn on their device, and are equal between devices of one kind only. `extra_rows` (packed only) appends rows
    beyond `cu_seqlens[-1]` to every tensor.

    `extras` are the keyword arguments of `attnbench.attention`: causal, softmax_scale and, packed, `cu_seqlens_q/k`
    (int32 `[N + 1]`) and `max_seqlen_q/k`.
    """
    shapes = _shapes(case, extra_rows)
    dtype = TORCH_DTYPES[case.dtype]
    on_device = sum(prod(s) for s in shapes.values()) > ON_DEVICE
    source = device if on_device else "cpu"
    generator = torch.Generator(device=source).manual_seed(case.seed)
    drawn: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        drawn_dtype = torch.float32 if name == "lse" or not on_device else dtype
        values = torch.randn(shape, generator=generator, device=source, dtype=drawn_dtype)
        drawn[name] = values.to(device, torch.float32 if name == "lse" else dtype)
    extras: dict[str, object] = {"causal": case.causal, "softmax_scale": case.softmax_scale}
    if case.layout == "varlen":
        extras |= {
            "cu_seqlens_q": cu_seqlens(case.seqlens_q, device),
            "cu_seqlens_k": cu_seqlens(case.seqlens_k, device),
            "max_seqlen_q": max(case.seqlens_q, default=0),
            "max_seqlen_k": max(case.seqlens_k, default=0),
        }
    return Inputs(
        tensors={name: drawn[name].requires_grad_() for name in ("q", "k", "v")},
        cotangents={name: drawn[name] for name in ("out", "lse")},
        extras=extras,
    )


def cu_seqlens(lengths: tuple[int, ...], device: str) -> torch.Tensor:
    """Offsets int32 `[N + 1]` of packed sequences."""
    return torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32, device=device)


def _shapes(case: AttentionCase, extra_rows: int) -> dict[str, tuple[int, ...]]:
    batch: tuple[int, ...] = (case.batch,)
    rows_q, rows_k = case.seqlen_q, case.seqlen_k
    if case.layout == "varlen":
        batch, rows_q, rows_k = (), sum(case.seqlens_q) + extra_rows, sum(case.seqlens_k) + extra_rows
    lead_q, lead_k, lse = (*batch, rows_q), (*batch, rows_k), (*batch, case.heads, rows_q)
    return {
        "q": (*lead_q, case.heads, case.head_dim),
        "k": (*lead_k, case.kv_heads, case.head_dim),
        "v": (*lead_k, case.kv_heads, case.dv),
        "out": (*lead_q, case.heads, case.dv),
        "lse": lse,
    }
