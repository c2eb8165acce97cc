"""Batch invariance: one sequence by itself against the same sequence in its batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnbench.backends import backend
from attnbench.backends.base import Prepared
from attnbench.measure.alone import alone, batched, longest, part, variant
from attnbench.measure.verify import Truth
from attnbench.ops import operation
from attnbench.scenario.case import AttentionCase, AttnresCase

ATTENTION = operation("attention")
DENSE = AttentionCase("fp32", 2, 1, 8, True, batch=3, seqlen_q=5, seqlen_k=7)
PACKED = AttentionCase("fp32", 2, 1, 8, True, layout="varlen", seqlens_q=(2, 0, 5, 3), seqlens_k=(4, 3, 6, 1))


def truth_of(case: AttentionCase) -> Truth:
    return Truth(ATTENTION, case, "cpu", ATTENTION.make_inputs(case, "cpu"))


def test_only_batches_of_several_sequences_are_asked() -> None:
    assert batched(DENSE)
    assert batched(PACKED)
    assert not batched(AttentionCase("fp32", 2, 1, 8, True, batch=1, seqlen_q=5, seqlen_k=7))
    assert not batched(AttentionCase("fp32", 2, 1, 8, True, layout="varlen", seqlens_q=(2, 0), seqlens_k=(4, 3)))
    assert not batched(AttnresCase(2, "fp32", 6, 64))


@pytest.mark.parametrize("case", [DENSE, PACKED], ids=["dense", "packed"])
def test_one_sequence_by_itself_is_the_part_of_the_batch(case: AttentionCase) -> None:
    index = longest(case)
    assert index == 2
    truth = truth_of(case)
    one, own = alone(case, truth.inputs, index)
    assert one.lengths == (case.lengths[index],)
    whole, single = truth.reference, ATTENTION.reference(one, own)
    for name, tensor in single.items():
        torch.testing.assert_close(part(case, name, whole[name], index), tensor, rtol=1e-12, atol=1e-12)


class _ByBatch:
    """Right, but rounds dk otherwise where there is one sequence only; `noisy` changes dv with each call."""

    name = "by batch"
    calls = 0

    def supports(self, case: Any, device: str) -> str | None:
        return None

    def prepare(self, case: Any, inputs: Any) -> Prepared:
        eager = backend("eager").prepare(case, inputs)

        def backward(outputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            names = list(inputs.cotangents)
            leaves = list(inputs.tensors.values())
            heads, cotangents = [outputs[n] for n in names], [inputs.cotangents[n] for n in names]
            dq, dk, dv = torch.autograd.grad(heads, leaves, cotangents)
            self.calls += 1
            return {"dq": dq, "dk": dk * (1 + 1e-6) if len(case.lengths) == 1 else dk, "dv": dv + self.calls * 1e-6}

        return Prepared(forward=eager.forward, backward=backward)


@pytest.mark.parametrize("case", [DENSE, PACKED], ids=["dense", "packed"])
def test_what_depends_on_the_batch_is_named_and_noise_is_not(case: AttentionCase) -> None:
    truth, subject = truth_of(case), _ByBatch()
    assert variant(subject, truth, subject.prepare(case, truth.inputs)) == ["dk"]
