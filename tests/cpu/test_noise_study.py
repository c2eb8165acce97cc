"""The examples that measure how often a verdict is false: calibration of the slowed kernel, and the counting."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from synthetic_runs import attention_case, store, timed

from attnbench.results.compare import compare
from attnbench.results.runs import Run
from attnbench.scenario import load

ROOT = Path(__file__).parents[2]


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def clock(plain_ms: float, launch_ms: float, cycles_per_ms: float) -> Any:
    """A board on which a second launch costs `launch_ms` and sleeping what it should."""
    rng = np.random.default_rng(0)

    def measure(cycles: int) -> tuple[list[float], list[float]]:
        slow = plain_ms + launch_ms + cycles / cycles_per_ms
        return tuple((ms * rng.normal(1, 0.001, 30)).tolist() for ms in (plain_ms, slow))  # type: ignore[return-value]

    return measure


@pytest.mark.parametrize("percent", [1.0, 3.0, 10.0])
@pytest.mark.parametrize("believed", [1.2e6, 1.8e6, 2.5e6])
def test_a_kernel_is_slowed_by_what_was_asked(percent: float, believed: float) -> None:
    cycles, reached = example("slowed_kernel").calibrate(clock(0.3, 0.0012, 1.8e6), believed, percent)
    assert reached == pytest.approx(percent, abs=0.15)
    assert (0.0012 + cycles / 1.8e6) / 0.3 == pytest.approx(percent / 100, abs=0.003)


def test_a_call_too_short_to_be_slowed_by_so_little_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be slowed by 3 %"):
        example("slowed_kernel").calibrate(clock(0.01, 0.0012, 1.8e6), 1.8e6, 3.0)


def runs(folder: Path, factors: list[float]) -> list[Run]:
    backends = ("sm90", "examples/slowed_kernel.py:SM90")
    cases = [attention_case(seqlen) for seqlen in (1024, 2048)]
    return [
        store(folder, [timed(c, b, "forward", 0.3 * f, rng=np.random.default_rng(i)) for c in cases for b in backends])
        for i, f in enumerate(factors)
    ]


def test_false_verdicts_and_missed_ones_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = example("noise_study")
    equal = runs(tmp_path, [1.0, 1.0, 1.0])
    assert study.equal_pairs([compare(a, b) for a, b in combinations(equal, 2)]) == 0
    assert "3 pairs, 12 rows: 0 false verdicts" in capsys.readouterr().out
    drifted = runs(tmp_path, [1.0, 1.1])
    assert study.equal_pairs([compare(*drifted)]) == 4
    assert "regressed" in capsys.readouterr().out
    slowed = runs(tmp_path, [1.0, 1.05, 1.0])
    assert study.slowed_pairs([compare(*slowed[:2])], 5.0)
    assert "SM90: regressed in 1 of 1" in capsys.readouterr().out
    assert not study.slowed_pairs([compare(slowed[0], run) for run in slowed[1:]], 5.0)
    assert not study.slowed_pairs([], 5.0)


def test_the_scenario_has_twenty_short_cases_of_one_pass() -> None:
    plan = load(ROOT / "scenarios/noise.yaml").plan()
    assert len({entry.case.case_id for entry in plan}) == len(plan) == 20
    assert all(entry.passes == ("forward",) and len(entry.backends) == 1 for entry in plan)
    slowed = [entry for entry in plan if "slowed" in entry.tags]
    assert all("slowed_kernel.py:" in entry.backends[0] for entry in slowed)
    assert len(slowed) == 3


def test_a_slowed_backend_is_the_other_one_where_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLOWED_PERCENT", raising=False)
    slowed = example("slowed_kernel").TRITON
    case = replace(attention_case(1024), dtype="fp32", seqlen_q=8, seqlen_k=8, batch=1, heads=1, kv_heads=1, head_dim=8)
    assert slowed.supports(case, "cpu") is None
    assert example("slowed_kernel").SM90.supports(case, "cpu") == "needs a CUDA GPU"
