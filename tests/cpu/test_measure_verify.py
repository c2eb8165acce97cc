"""What timed calls compute is judged against what they were asked for."""

from __future__ import annotations

import pytest

from attnbench.backends import backend
from attnbench.measure.timing import pass_call, pass_truth
from attnbench.measure.verify import Truth, judge
from attnbench.ops import operation
from attnbench.scenario.case import AttentionCase, AttnresCase, Case, op_name

CASES: list[Case] = [
    AttentionCase("bf16", 2, 1, 32, True, batch=1, seqlen_q=40, seqlen_k=40),
    AttnresCase(1, "bf16", 6, 64, 3, 2),
    AttnresCase(2, "fp32", 6, 64),
]


def truth_of(case: Case) -> Truth:
    op = operation(op_name(case))
    return Truth(op, case, "cpu", op.make_inputs(case, "cpu"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
@pytest.mark.parametrize("name", ["eager", "triton"])
@pytest.mark.parametrize("pass_", ["backward", "forward_backward"])
def test_a_right_timed_backward_passes(case: Case, name: str, pass_: str) -> None:
    truth = truth_of(case)
    prepared = backend(name).prepare(case, truth.inputs)
    got = {k: v.detach() for k, v in pass_call(truth, prepared, pass_)().items()}
    checks = judge(pass_truth(truth, prepared, pass_), got)
    assert set(truth.operation.grad_names) <= set(checks)
    assert all(check.passed for check in checks.values()), checks


def test_attention_is_timed_without_a_gradient_through_lse() -> None:
    """So the timed gradients are others than the checked ones, and judging them by those would fail a right kernel."""
    truth = truth_of(CASES[0])
    prepared = backend("eager").prepare(CASES[0], truth.inputs)
    got = pass_call(truth, prepared, "backward")()
    assert not all(check.passed for check in judge(truth, got).values())
    assert truth.timed is truth.without_lse_grad
    assert truth.without_lse_grad.timed is truth.without_lse_grad
