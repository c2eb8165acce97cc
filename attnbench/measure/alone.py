"""Batch invariance: does a sequence give the same bits alone as among others of a batch?

Training and inference that must agree need it; a kernel may well split its work by the size of the batch instead, so
this is reported and never a failure.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from attnbench.backends.base import Backend, Prepared
from attnbench.measure.verify import Truth, compute, same_bits
from attnbench.ops.base import Inputs
from attnbench.scenario.case import AttentionCase, Case

_KEY_SIDE = ("k", "v", "dk", "dv")


def batched(case: Case) -> bool:
    """Whether the case is attention over more than one sequence that has queries and keys."""
    return isinstance(case, AttentionCase) and sum(1 for q, k in case.lengths if q and k) > 1


def longest(case: AttentionCase) -> int:
    """The sequence with most query-key pairs; the last of several, so that others stand before it."""
    return max(range(len(case.lengths)), key=lambda i: (case.lengths[i][0] * case.lengths[i][1], i))


def part(case: AttentionCase, name: str, tensor: torch.Tensor, index: int) -> torch.Tensor:
    """What belongs to one sequence of an input, a cotangent, an output or a gradient called `name`."""
    if case.layout == "dense":
        return tensor[index : index + 1]
    lengths = case.seqlens_k if name in _KEY_SIDE else case.seqlens_q
    first = sum(lengths[:index])
    rows = slice(first, first + lengths[index])
    return tensor[:, rows] if name == "lse" else tensor[rows]


def alone(case: AttentionCase, inputs: Inputs, index: int) -> tuple[AttentionCase, Inputs]:
    """The case and inputs of one sequence by itself, in the same layout (packed stays packed)."""
    seqlen_q, seqlen_k = case.lengths[index]
    leaves = {
        name: part(case, name, tensor.detach(), index).requires_grad_() for name, tensor in inputs.tensors.items()
    }
    cotangents = {name: part(case, name, tensor, index) for name, tensor in inputs.cotangents.items()}
    if case.layout == "dense":
        return replace(case, batch=1), Inputs(leaves, cotangents, inputs.extras)
    extras: dict[str, Any] = dict(inputs.extras)
    for side, length in (("q", seqlen_q), ("k", seqlen_k)):
        given = extras[f"cu_seqlens_{side}"]
        extras[f"cu_seqlens_{side}"] = torch.tensor([0, length], dtype=given.dtype, device=given.device)
        extras[f"max_seqlen_{side}"] = length
    return replace(case, seqlens_q=(seqlen_q,), seqlens_k=(seqlen_k,)), Inputs(leaves, cotangents, extras)


def variant(backend: Backend, truth: Truth, prepared: Prepared) -> list[str]:
    """Names of the tensors in which the longest sequence has other bits alone than in the batch.

    What differs between equal calls anyway (sums in no fixed order) is left out.
    """
    case = truth.case
    assert isinstance(case, AttentionCase)
    index = longest(case)
    whole = compute(truth.operation, truth.inputs, prepared)
    again = compute(truth.operation, truth.inputs, prepared)
    one, own = alone(case, truth.inputs, index)
    single = compute(truth.operation, own, backend.prepare(one, own))
    return [
        name
        for name, tensor in whole.items()
        if name in single
        and same_bits(tensor, again[name])
        and not same_bits(part(case, name, tensor, index), single[name])
    ]
