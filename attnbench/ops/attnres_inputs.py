"""Seeded inputs of a case of block attention residuals."""

from __future__ import annotations

from math import prod

import torch

from attnbench.ops.base import Inputs
from attnbench.scenario.case import AttnresCase

TORCH_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
ON_DEVICE = 1 << 25  # elements: from here on drawing on the CPU would take longer than measuring
_FP32 = ("inter_lse", "lse")


def make_inputs(case: AttnresCase, device: str) -> Inputs:
    """Standard normal tensors in the case's dtype (log-sum-exps in fp32), leaves that require grad.

    Pseudo-queries are scaled by `logit_scale / sqrt(D)`, so that logits have a standard deviation of `logit_scale`.
    Without `lse_grad` there is no cotangent of lse. Up to 2^25 elements in all are drawn on the CPU, so that equal
    cases get equal values on any device; larger cases are drawn on their device.
    """
    dtype = TORCH_DTYPES[case.dtype]
    tensors, cotangents = _shapes(case)
    shapes = {**tensors, **{f"d{name}": shape for name, shape in cotangents.items()}}
    on_device = sum(prod(shape) for shape in shapes.values()) > ON_DEVICE
    source = device if on_device else "cpu"
    generator = torch.Generator(device=source).manual_seed(case.seed)
    drawn: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        kept = torch.float32 if name.removeprefix("d") in _FP32 else dtype
        query = name in ("query", "queries")
        values = torch.randn(
            shape, generator=generator, device=source, dtype=kept if on_device and not query else torch.float32
        )
        if query:
            values = values * (case.logit_scale * case.hidden**-0.5)
        drawn[name] = values.to(device, kept)
    return Inputs(
        tensors={name: drawn[name].requires_grad_() for name in tensors},
        cotangents={name: drawn[f"d{name}"] for name in cotangents},
        extras={"eps": case.eps},
    )


def _shapes(case: AttnresCase) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    rows, hidden = case.rows, case.hidden
    lead: tuple[int, ...] = ()
    if case.phase == 1:
        lead = (case.queries,)
        tensors: dict[str, tuple[int, ...]] = {"values": (case.blocks, rows, hidden), "queries": (case.queries, hidden)}
    else:
        tensors = {
            "partial_sum": (rows, hidden),
            "query": (hidden,),
            "inter_out": (rows, hidden),
            "inter_lse": (rows,),
        }
    cotangents: dict[str, tuple[int, ...]] = {"out": (*lead, rows, hidden)}
    if case.lse_grad:
        cotangents["lse"] = (*lead, rows)
    return tensors, cotangents
