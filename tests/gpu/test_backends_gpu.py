"""Every backend that takes a case is right on the GPU; what it does not take has a reason."""

from __future__ import annotations

import pytest
import torch

from attnbench.backends import available, backend
from attnbench.measure.check import check_tensors
from attnbench.measure.verify import Truth, verify
from attnbench.ops import operation
from attnbench.ops.attention_inputs import make_inputs
from attnbench.scenario.case import AttentionCase

ATTENTION = operation("attention")
CASES = [
    AttentionCase("bf16", 8, 8, 128, True, batch=2, seqlen_q=1024, seqlen_k=1024),
    AttentionCase("bf16", 8, 2, 64, False, batch=2, seqlen_q=333, seqlen_k=700),
    AttentionCase("fp16", 8, 2, 128, True, batch=1, seqlen_q=1, seqlen_k=700),
    AttentionCase("fp16", 4, 4, 128, True, batch=1, seqlen_q=300, seqlen_k=700),
    AttentionCase("bf16", 8, 2, 128, True, layout="varlen", seqlens_q=(300, 212, 1), seqlens_k=(300, 400, 1)),
]


@pytest.mark.parametrize("name", available())
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.label)
def test_right_or_unsupported_for_a_reason(name: str, case: AttentionCase) -> None:
    subject = backend(name)
    reason = subject.supports(case, "cuda")
    if reason is not None:
        pytest.skip(reason)
    inputs = ATTENTION.make_inputs(case, "cuda")
    prepared = subject.prepare(case, inputs)
    truth = Truth(ATTENTION, case, "cuda", inputs)
    truth = truth if prepared.lse_grad else truth.without_lse_grad
    verdict = verify(truth, prepared, deterministic=prepared.deterministic)
    assert verdict.passed, verdict.reason
    for entry in (prepared.kernel_forward, prepared.kernel_backward):
        if entry is not None:
            entry()
    torch.cuda.synchronize()


def test_inputs_are_those_of_the_cpu() -> None:
    case = CASES[1]
    here, there = make_inputs(case, "cuda"), make_inputs(case, "cpu")
    for name, tensor in {**there.tensors, **there.cotangents}.items():
        assert torch.equal({**here.tensors, **here.cotangents}[name].cpu(), tensor)


def test_reference_is_that_of_the_cpu() -> None:
    case = AttentionCase("bf16", 4, 2, 64, True, layout="varlen", seqlens_q=(30, 0, 77), seqlens_k=(90, 4, 40))
    here = ATTENTION.reference(case, make_inputs(case, "cuda"))
    there = ATTENTION.reference(case, make_inputs(case, "cpu"))
    for name, tensor in there.items():
        torch.testing.assert_close(here[name].cpu(), tensor, rtol=1e-10, atol=1e-10)


def test_long_and_huge_cases_fit() -> None:
    for case in (
        AttentionCase("bf16", 16, 16, 128, False, batch=1, seqlen_q=16384, seqlen_k=16384),
        AttentionCase("bf16", 32, 8, 128, True, layout="varlen", seqlens_q=(32768,), seqlens_k=(32768,)),
    ):
        inputs = ATTENTION.make_inputs(case, "cuda")
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        reference, yardstick = ATTENTION.reference(case, inputs), ATTENTION.yardstick(case, inputs)
        assert all(c.passed for c in check_tensors(reference, yardstick, yardstick).values())
        assert torch.cuda.max_memory_allocated() <= ATTENTION.memory(case)["check"]
        del inputs, reference, yardstick
