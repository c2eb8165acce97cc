"""What a scenario comes to: a flat list of cases with who runs each, and the policies. Plain data, no pydantic."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from attnbench.scenario.case import Case, Pass


@dataclass(frozen=True)
class MeasurePolicy:
    """How each case is timed."""

    samples: int = 30
    """Least number of timed samples of each backend and pass."""
    min_seconds: float = 0.2
    """Least seconds of back-to-back work before samples count."""
    max_seconds: float = 2.0
    """Most seconds spent on sampling one backend and pass; a row that has not converged by then is `unconverged`."""
    half_width_percent: float = 0.5
    """Sampling stops when the 95 % interval of the median is within ± this share of it, in percent."""
    call: bool = True
    """Also measure the host-inclusive call time (`call_ms`)."""
    warm: bool = True
    """Also measure with a warm L2 (`warm_ms`)."""
    duty: Literal["sustained", "burst"] = "sustained"
    """`sustained`: after the median has settled under back-to-back work; `burst`: a few calls from idle."""
    timeout_seconds: float = 300.0
    """A case that takes longer than this, building and checking included, is ended as `timeout`."""
    passes: tuple[Pass, ...] = ("forward", "backward")
    """Passes that are timed where a case does not name its own."""
    ceilings: bool = True
    """Also measure the board's ceilings and cross-check its clocks, once at the start of the run."""
    split: bool = False
    """Also profile each row: device time by part, host time that autograd adds (`split_ms`)."""


@dataclass(frozen=True)
class CheckPolicy:
    """How each case is checked against fp64."""

    enabled: bool = True
    after: bool = True
    """Check once more after timing."""
    repeats: int = 2
    """Executions on equal inputs whose results are compared bit for bit; 1 compares nothing."""
    rtol: float | None = None
    """With `atol`: pass when `|x - ref| <= atol + rtol |ref|` everywhere, in place of the eager error budget."""
    atol: float | None = None


@dataclass(frozen=True)
class PlannedCase:
    """One case, the backends that run it and the passes that are timed."""

    case: Case
    backends: tuple[str, ...]
    passes: tuple[Pass, ...] = ("forward", "backward")
    tags: tuple[str, ...] = ()
    name: str = ""
    """The name of the scenario's entry that the case comes from; may be shared by many cases, or empty."""
    check: CheckPolicy = field(default_factory=CheckPolicy)


@dataclass(frozen=True)
class Scenario:
    """A validated scenario file."""

    file: str
    text: str
    name: str
    description: str
    backends: tuple[str, ...]
    baseline: str | None
    """None: the default, `sdpa_cudnn` on a GPU where it computes the operation, else `eager`."""
    measure: MeasurePolicy
    check: CheckPolicy
    planned: tuple[PlannedCase, ...]

    def plan(self) -> list[PlannedCase]:
        """Every case once for each set of passes, in the file's order."""
        return list(self.planned)
