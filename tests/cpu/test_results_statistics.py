"""Intervals of ratios, corrections, means: against closed forms, and by how often they are right."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnbench.measure.stats import median_interval
from attnbench.results.statistics import Ratio, bootstrap_ratio, geometric_mean, holm, ratio_of_medians

positive = st.floats(1e-6, 1e6)
probabilities = st.lists(st.floats(0, 1), min_size=1, max_size=30)


def test_two_intervals_combine_in_quadrature_on_the_log_scale() -> None:
    ratio = ratio_of_medians(1.0, (1 / 1.03, 1.03), 2.0, (2 / 1.04, 2 * 1.04), allowance=0.0)
    reach = math.hypot(math.log(1.03), math.log(1.04))
    assert ratio.value == pytest.approx(2.0)
    assert math.log(ratio.high / ratio.value) == pytest.approx(reach)
    assert math.log(ratio.value / ratio.low) == pytest.approx(reach)


def test_the_p_value_meets_the_interval_at_5_percent() -> None:
    edge = Ratio.of(1.959964 * 0.01, 0.01)
    assert edge.low == pytest.approx(1.0)
    assert edge.p == pytest.approx(0.05, abs=1e-6)


@given(positive, positive, st.floats(1, 2), st.floats(1, 2))
def test_exchanging_sides_inverts_the_ratio(base: float, new: float, a: float, b: float) -> None:
    there = ratio_of_medians(base, (base / a, base * a), new, (new / b, new * b), allowance=0.002)
    back = ratio_of_medians(new, (new / b, new * b), base, (base / a, base * a), allowance=0.002)
    assert there.value * back.value == pytest.approx(1)
    assert there.low * back.high == pytest.approx(1)
    assert there.p == pytest.approx(back.p)
    assert there.low <= there.value <= there.high


@pytest.mark.parametrize("interval", [(0.0, math.inf), (0.0, 1.0), (2.0, 1.0), (math.nan, 1.0)])
def test_an_interval_that_says_nothing_gives_one_that_says_nothing(interval: tuple[float, float]) -> None:
    ratio = ratio_of_medians(1.0, interval, 2.0, (1.9, 2.1), allowance=0.0)
    assert (ratio.low, ratio.high, ratio.p) == (0.0, math.inf, 1.0)


@pytest.mark.parametrize("median", [0.0, -1.0, math.nan, math.inf])
def test_a_median_that_is_no_time_is_refused(median: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        ratio_of_medians(median, (1, 1), 1.0, (1, 1), allowance=0.0)


def test_the_bootstrap_inverts_exactly_and_sees_a_difference() -> None:
    rng = np.random.default_rng(0)
    base, new = rng.lognormal(0, 0.01, 40).tolist(), (1.05 * rng.lognormal(0, 0.01, 40)).tolist()
    there, back = (bootstrap_ratio(*sides, allowance=0.002) for sides in ((base, new), (new, base)))
    assert there.low * back.high == pytest.approx(1)
    assert there.low > 1.03
    assert there.p < 1e-6


def test_the_bootstrap_refuses_few_samples_and_survives_equal_ones() -> None:
    with pytest.raises(ValueError, match="5 samples"):
        bootstrap_ratio([1.0] * 4, [1.0] * 40, allowance=0.0)
    ratio = bootstrap_ratio([1.0] * 10, [1.0] * 10, allowance=0.0)
    assert ratio.value == ratio.low == ratio.high == 1.0


@pytest.mark.parametrize("method", ["stored", "bootstrap"])
def test_a_95_percent_interval_holds_the_truth_about_that_often(method: str) -> None:
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(200):
        base, new = (rng.lognormal(0, 0.02, 40).tolist() for _ in range(2))
        if method == "bootstrap":
            ratio = bootstrap_ratio(base, new, allowance=0.0)
        else:
            ratio = ratio_of_medians(
                float(np.median(base)),
                median_interval(base),
                float(np.median(new)),
                median_interval(new),
                allowance=0.0,
            )
        hits += ratio.low <= 1 <= ratio.high
    assert 180 <= hits <= 200


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([]) == []


@given(probabilities)
def test_holm_never_lowers_keeps_order_and_is_no_harsher_than_bonferroni(p: list[float]) -> None:
    adjusted = holm(p)
    for i, (raw, corrected) in enumerate(zip(p, adjusted, strict=True)):
        assert raw <= corrected <= min(1.0, raw * len(p)) + 1e-12
        for j in range(i):
            if p[j] < raw:
                assert adjusted[j] <= corrected


def test_geometric_mean_of_opposites_is_one() -> None:
    value, half = geometric_mean([Ratio.of(math.log(2), 0.01), Ratio.of(-math.log(2), 0.01)])
    assert value == pytest.approx(1)
    assert half == pytest.approx(1.959964 * 0.01 / math.sqrt(2))
    with pytest.raises(ValueError, match="at least one"):
        geometric_mean([])
