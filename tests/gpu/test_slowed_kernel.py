"""The kernel that is slowed on purpose is slowed by what was asked, as a run's own clock sees it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from attnbench.backends.custom import load
from attnbench.measure.timer import DeviceClock
from attnbench.ops import operation
from attnbench.scenario.case import AttnresCase

EXAMPLE = Path(__file__).parents[2] / "examples/slowed_kernel.py"


@pytest.mark.quiet
@pytest.mark.parametrize("percent", [3.0, 8.0])
def test_a_forward_is_slowed_by_what_was_asked(percent: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOWED_PERCENT", str(percent))
    case = AttnresCase(phase=2, dtype="bf16", rows=65536, hidden=2048)
    inputs = operation("attnres_phase2").make_inputs(case, "cuda")
    backend = load(f"{EXAMPLE}:TRITON")
    slowed = backend.prepare(case, inputs)
    assert slowed.tune is not None
    slowed.tune()
    assert (slowed.reason or "").startswith("slowed by ")
    monkeypatch.setenv("SLOWED_PERCENT", "0")
    clock = DeviceClock()
    plain, slow = clock.prepare(backend.prepare(case, inputs).forward), clock.prepare(slowed.forward)
    clock.back_to_back(plain, 0.2)
    ratios = []
    for _ in range(5):
        samples, _ = clock.sample([plain] * 10 + [slow] * 20 + [plain] * 10)
        fast, late = sorted(samples[:10] + samples[30:]), sorted(samples[10:30])
        ratios.append(late[10] / fast[10] - 1)
    assert 100 * sorted(ratios)[2] == pytest.approx(percent, abs=0.6)
