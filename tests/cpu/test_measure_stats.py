"""Medians, intervals and the shape of samples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnbench.measure.sampling import converged, measure_host
from attnbench.measure.stats import is_bimodal, median_interval, summarise
from attnbench.scenario.plan import MeasurePolicy


def test_interval_covers_the_true_median_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(300):
        low, high = median_interval(rng.lognormal(0.0, 0.1, 31))
        hits += low <= 1.0 <= high
    assert 0.90 <= hits / 300 <= 0.99


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=60))
@settings(max_examples=50, deadline=None)
def test_median_lies_within_its_interval(samples: list[float]) -> None:
    summary = summarise(samples)
    assert summary.low <= summary.median <= summary.high
    assert summary.minimum <= summary.p10 <= summary.p90
    assert summary == summarise(samples)  # seeded: equal samples, equal interval


@pytest.mark.parametrize("count", [1, 2])
def test_one_and_two_samples_have_their_own_range(count: int) -> None:
    samples = [1.0, 3.0][:count]
    assert median_interval(samples) == (samples[0], samples[-1])


def test_no_samples_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        summarise([])


def test_two_modes_are_flagged_and_kept() -> None:
    rng = np.random.default_rng(2)
    slow = [*rng.normal(1.0, 0.004, 40), *rng.normal(1.1, 0.004, 10)]
    assert is_bimodal(slow)
    assert summarise(slow).n == 50


@pytest.mark.parametrize("seed", range(5))
def test_one_mode_is_not_flagged(seed: int) -> None:
    rng = np.random.default_rng(seed)
    assert not is_bimodal(rng.normal(1.0, 0.02, 60))
    assert not is_bimodal(rng.uniform(0.9, 1.1, 60))
    assert not is_bimodal([*rng.normal(1.0, 0.01, 57), 1.5, 1.5, 1.5])  # outliers, no second mode


def test_sampling_stops_when_narrow_and_flags_what_never_is() -> None:
    policy = MeasurePolicy(samples=10, max_seconds=0.05, half_width_percent=0.5)
    assert converged([1.0] * 10, policy)
    assert not converged([1.0] * 9, policy)
    assert not converged([1.0, 1.2] * 10, policy)
    state = {"n": 0}

    def uneven() -> None:
        import time

        state["n"] += 1
        time.sleep(0.001 if state["n"] % 2 else 0.004)

    found = measure_host(uneven, policy)
    assert "unconverged" in found.flags
    assert len(found.samples) >= 10
