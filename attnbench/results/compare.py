"""Two runs side by side: a verdict for every (case, backend, pass) of either.

A time counts as changed only where three things agree: the interval of the ratio of medians excludes 1 after Holm's
correction over all cases, the change is larger than the threshold, and the other views of the same measurement (SM
cycles, and the ratio to the interleaved baseline) point the same way.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from attnbench.backends import judged
from attnbench.results.comparable import Footing, differing_fields, footing, near_identity, reason_against
from attnbench.results.record import COULD_NOT_RUN, Record
from attnbench.results.runs import Key, Run
from attnbench.results.statistics import Ratio, bootstrap_ratio, geometric_mean, holm, ratio_of_medians, run_to_run

Verdict = Literal["regressed", "improved", "same", "ambiguous", "incomparable", "missing"]
VERDICTS: tuple[Verdict, ...] = ("regressed", "improved", "same", "ambiguous", "incomparable", "missing")

LEVEL = 0.05
_UNSTEADY = frozenset({"unconverged", "bimodal", "throttled", "contended"})
_DISTURBED = frozenset({"throttled", "contended"})
CLOSE_CALLS = 200
"""How many of the cases nearest to a different verdict are judged again from their samples."""
BUDGET_GROWTH, BUDGET_FLOOR = 1.25, 0.5


@dataclass(frozen=True)
class Row:
    """One (case, backend, pass). `ratio` is NEW's time over BASE's: above 1 is slower."""

    key: Key
    label: str
    verdict: Verdict
    reason: str = ""
    ratio: Ratio | None = None
    base_ms: float | None = None
    new_ms: float | None = None
    views: dict[str, float] = field(default_factory=dict)  # the same ratio in cycles and against the baseline
    failed: bool = False  # NEW failed its check
    could_not_run: bool = False  # NEW died, ran out of memory, did not build …
    known: bool = False  # a peer that BASE could not use either: shown, but no news and not in the exit code


@dataclass
class Comparison:
    base: Run
    new: Run
    threshold: float
    footing: Footing
    rows: list[Row]
    notes: list[str]

    @property
    def counts(self) -> dict[Verdict, int]:
        found = Counter(row.verdict for row in self.rows)
        return {verdict: found[verdict] for verdict in VERDICTS}

    def mean(self) -> tuple[float, float] | None:
        """Geometric mean of all time ratios; None where a time has no counterpart: a mean over a part misleads."""
        if any(row.ratio is None and (row.base_ms or row.new_ms) for row in self.rows):
            return None
        ratios = [row.ratio for row in self.rows if row.ratio is not None]
        return geometric_mean(ratios) if ratios else None

    def exit_code(self, *, allow_missing: bool = False) -> int:
        """1 before 3 before 4 before 0, as the command line documents."""
        news = [row for row in self.rows if not row.known]
        found = {row.verdict for row in news}
        if "regressed" in found or any(row.failed for row in news):
            return 1
        if any(row.could_not_run for row in news):
            return 3
        if not found & {"improved", "same", "ambiguous"} or "incomparable" in found:
            return 4
        return 4 if "missing" in found and not allow_missing else 0


def compare(base: Run, new: Run, *, threshold: float = 0.02) -> Comparison:
    """Judge every record of `new` against its counterpart in `base`. `threshold` is the least change that counts."""
    ground = footing(base, new)
    margin = math.log1p(threshold + ground.spread)
    both: list[tuple[Key, Record, Record, Ratio]] = []
    rows: dict[Key, Row] = {}
    for key in dict.fromkeys([*base.records, *new.records]):
        one, other = base.records.get(key), new.records.get(key)
        if _planned_gap(one, other):
            continue
        settled = _settle(key, one, other, ground)
        if settled is not None:
            rows[key] = settled
            continue
        assert one is not None
        assert other is not None
        both.append((key, one, other, _stored_ratio(one, other, ground)))
        rows[key] = Row(key, other.label, "same")  # keeps the order; judged below
    _name_near_misses(rows, base, new)
    both = _sharpen(both, margin, ground)
    adjusted = holm([ratio.p for *_, ratio in both])
    for (key, one, other, ratio), p in zip(both, adjusted, strict=True):
        rows[key] = _judge(key, one, other, replace(ratio, p=p), margin, ground)
    same_run = ["BASE and NEW are one and the same run"] if base.folder == new.folder else []
    notes = [*same_run, *ground.notes, *base.notes, *new.notes]
    return Comparison(base, new, threshold, ground, list(rows.values()), notes)


def _planned_gap(base: Record | None, new: Record | None) -> bool:
    """Unsupported on each side where it exists: as planned, and nothing to say."""
    present = [record for record in (base, new) if record is not None]
    return all(record.outcome == "unsupported" for record in present)


def _settle(key: Key, base: Record | None, new: Record | None, ground: Footing) -> Row | None:
    """The row where times need not, or cannot, be compared."""
    if new is None:
        assert base is not None
        return Row(key, base.label, "missing", "only in BASE", base_ms=base.median_ms)
    failed, could_not_run = new.outcome == "check-failed", new.outcome in COULD_NOT_RUN
    words = f"{new.outcome}: {new.reason}" if new.reason else new.outcome
    row = Row(
        key,
        new.label,
        "missing",
        base_ms=base.median_ms if base else None,
        new_ms=new.median_ms,
        failed=failed,
        could_not_run=could_not_run,
        known=base is not None and not judged(key[1]) and _broken(base) and _broken(new),
    )
    if base is None:
        return replace(row, reason=f"only in NEW ({words})" if failed or could_not_run else "only in NEW")
    if failed:
        if base.outcome == "check-failed":
            return replace(row, verdict="incomparable", reason="failed its check on both sides")
        return replace(row, verdict="regressed", reason=_failed_tensors(new) or words)
    if could_not_run or new.outcome == "unsupported":
        return replace(row, reason=f"NEW: {words}")
    if base.outcome == "check-failed":
        return replace(row, verdict="improved", reason="passes its check now")
    if base.outcome in COULD_NOT_RUN or base.outcome == "unsupported":
        return replace(row, reason=f"BASE: {base.outcome}")
    # Some peers add up in an order that changes from run to run, and their worst error with it.
    if judged(key[1]) and (worse := _accuracy(base, new)):
        return replace(row, verdict="regressed", reason=worse)
    if base.outcome == new.outcome == "checked":
        return replace(row, verdict="same")
    if base.outcome != new.outcome:
        return replace(row, verdict="incomparable", reason=f"BASE {base.outcome}, NEW {new.outcome}")
    against = ground.reason or reason_against(base, new)
    return replace(row, verdict="incomparable", reason=against) if against else None


def _broken(record: Record) -> bool:
    return record.outcome == "check-failed" or record.outcome in COULD_NOT_RUN


def _failed_tensors(record: Record) -> str:
    names = [f"{name} {c.budget_ratio:.2g}×" for name, c in record.check.items() if not c.passed]
    return f"check failed: {', '.join(names)} of the error budget" if names else ""


def _accuracy(base: Record, new: Record) -> str:
    """Which tensors' share of the error budget grew by more than a quarter and past one half; empty where none did."""
    grown = []
    for name, check in new.check.items():
        before = base.check.get(name)
        if before is None or math.isnan(before.budget_ratio):
            continue
        now = check.budget_ratio
        if (
            math.isnan(now)
            or now > max(BUDGET_FLOOR, BUDGET_GROWTH * before.budget_ratio)
            or now > 1 >= before.budget_ratio
        ):
            grown.append(f"{name} {before.budget_ratio:.2f} → {now:.2f}")
    return f"less accurate: {', '.join(grown)} of the error budget" if grown else ""


def _stored_ratio(base: Record, new: Record, ground: Footing) -> Ratio:
    assert base.median_ms is not None
    assert new.median_ms is not None
    no_interval = (0.0, math.inf)
    allowance = run_to_run(new.timer, in_turns=ground.in_turns)
    return ratio_of_medians(
        base.median_ms, base.ci_ms or no_interval, new.median_ms, new.ci_ms or no_interval, allowance=allowance
    )


def _sharpen(
    both: list[tuple[Key, Record, Record, Ratio]], margin: float, ground: Footing
) -> list[tuple[Key, Record, Record, Ratio]]:
    """The bootstrap from samples for the cases whose interval comes near the threshold, the closest first."""

    def distance(i: int) -> float:
        ratio = both[i][3]
        if ratio.low <= 0:
            return 0.0
        edges = (math.log(ratio.low), math.log(ratio.high))
        return min(abs(abs(edge) - limit) for edge in edges for limit in (0.0, margin))

    changed = [i for i in range(len(both)) if not -margin / 2 < math.log(both[i][3].value) < margin / 2]
    close = sorted((i for i in changed if distance(i) < margin / 4), key=distance)[:CLOSE_CALLS]
    out = list(both)
    for i in close:
        key, base, new, _ = both[i]
        allowance = run_to_run(new.timer, in_turns=ground.in_turns)
        out[i] = (key, base, new, bootstrap_ratio(base.samples_ms, new.samples_ms, allowance=allowance))
    return out


def _views(base: Record, new: Record, ratio: Ratio) -> dict[str, float]:
    """The ratio seen in SM cycles and against the interleaved baseline, where both records have them."""
    views = {}
    clocks = [record.reading("sm_mhz") for record in (base, new)]
    if clocks[0] and clocks[1]:
        views["SM cycles"] = ratio.value * clocks[1] / clocks[0]
    one, other = base.baseline_median_ms, new.baseline_median_ms
    if one and other and base.baseline == new.baseline and base.baseline != base.backend:
        views[f"time over {new.baseline}"] = ratio.value * one / other
    return views


def _judge(key: Key, base: Record, new: Record, ratio: Ratio, margin: float, ground: Footing) -> Row:
    """Verdict of one timed pair; `ratio.p` is already corrected for the number of cases."""
    views = _views(base, new, ratio)
    row = Row(key, new.label, "same", _remarks(base, new), ratio, base.median_ms, new.median_ms, views)
    change = math.log(ratio.value)
    if abs(change) > margin:
        against = [name for name, value in views.items() if math.log(value) * math.copysign(1, change) < margin / 2]
        if ratio.p >= LEVEL or ratio.low <= 1 <= ratio.high:
            return replace(row, verdict="ambiguous", reason=_join("the interval is too wide to tell", row.reason))
        if against:
            told = ", ".join(f"{name} {views[name] - 1:+.1%}" for name in against)
            return replace(
                row, verdict="ambiguous", reason=_join(f"time {ratio.value - 1:+.1%}, but {told}", row.reason)
            )
        if disturbed := sorted(_DISTURBED.intersection([*base.flags, *new.flags])):
            told = f"time {ratio.value - 1:+.1%}, but the board was {' and '.join(disturbed)}"
            return replace(row, verdict="ambiguous", reason=_join(told, row.reason))
        hosts = (base.timer, new.timer) == ("host", "host") and not ground.in_turns
        if hosts and "unconverged" in {*base.flags, *new.flags}:
            # Other work on the same cores shifts whole runs, by more than samples of one run can show.
            told = f"time {ratio.value - 1:+.1%}, but CPU times that did not settle cannot tell"
            return replace(row, verdict="ambiguous", reason=_join(told, row.reason))
        if ground.same_kernels and _retuned(base, new):
            told = f"time {ratio.value - 1:+.1%}, of the same kernels"
            return replace(row, verdict="ambiguous", reason=_join(told, row.reason))
        return replace(row, verdict="regressed" if change > 0 else "improved")
    if math.exp(-margin) <= ratio.low and ratio.high <= math.exp(margin):
        return row
    return replace(row, verdict="ambiguous", reason=_join("the interval reaches past the threshold", row.reason))


def _remarks(base: Record, new: Record) -> str:
    parts = []
    for flag in dict.fromkeys([*base.flags, *new.flags]):
        both = flag in base.flags and flag in new.flags
        if not both or flag in _UNSTEADY:  # other flags on both sides are no news, and throw no doubt on a time
            parts.append(f"{flag} ({'both' if both else 'BASE' if flag in base.flags else 'NEW'})")
    if base.ran_by != new.ran_by:
        parts.append(f"ran by {base.ran_by or base.backend} → {new.ran_by or new.backend}")
    if _retuned(base, new):
        parts.append("autotuning chose differently")
    return ", ".join(parts)


def _retuned(base: Record, new: Record) -> bool:
    return (base.tuned or {}) != (new.tuned or {})


def _join(*parts: str) -> str:
    return "; ".join(part for part in parts if part)


def _name_near_misses(rows: dict[Key, Row], base: Run, new: Run) -> None:
    """Turn "missing on each side" into "incomparable" where two cases differ in dtype, layout or seed alone."""
    lonely = [key for key, row in rows.items() if row.reason == "only in BASE"]
    found: dict[tuple[Any, ...], list[Key]] = {}
    for key in lonely:
        found.setdefault(near_identity(base.records[key]), []).append(key)
    if not found:
        return
    for key, row in list(rows.items()):
        if row.reason != "only in NEW" or not (partners := found.get(near_identity(new.records[key]))):
            continue
        partner = partners.pop(0)
        told = differing_fields(base.records[partner], new.records[key])
        rows[key] = replace(row, verdict="incomparable", reason=told, base_ms=rows[partner].base_ms)
        del rows[partner]
