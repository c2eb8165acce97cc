"""`attnbench selftest`: does this harness, on this machine, catch kernels that are known to be wrong?"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from attnbench.measure.job import CaseJob, Row
from attnbench.measure.jobs import choose_device
from attnbench.measure.supervisor import Supervisor
from attnbench.results.record import Record
from attnbench.results.store import to_json_text
from attnbench.results.text import paint, terminal_width, wrap
from attnbench.scenario.plan import MeasurePolicy

_MODULE = "attnbench.measure.known_bad"
_POLICY = MeasurePolicy(samples=10, min_seconds=0.02, max_seconds=0.1, timeout_seconds=120.0)


@dataclass(frozen=True)
class Catch:
    """What became of one known-bad kernel. `caught` None: it has no meaning on this device."""

    name: str
    what: str
    caught: bool | None
    outcome: str
    reason: str


def selftest(*, device: str | None = None, format: str = "table") -> int:
    """Run every known-bad kernel and a right one; 0 when each bad one is caught and the right one passes, else 1."""
    from attnbench.measure.known_bad import GOOD, KNOWN_BAD, KnownBad

    where = choose_device(device)
    found: list[Catch] = []
    entries: list[tuple[str, KnownBad]] = [*KNOWN_BAD.items(), ("GOOD", GOOD)]
    with Supervisor(where) as supervisor:
        for name, kernel in entries:
            if kernel.gpu_only and where == "cpu":
                catch = Catch(kernel.name, kernel.what, None, "not run", kernel.gpu_only)
            else:
                row = Row(f"{_MODULE}:{name}", ("forward",))
                job = CaseJob(kernel.case, (row,), where, measure=_POLICY)
                (record,) = (message for message in supervisor.run(job) if isinstance(message, Record))
                caught = record.outcome == ("ok" if kernel is GOOD else "check-failed")
                catch = Catch(kernel.name, kernel.what, caught, record.outcome, record.reason or "")
            found.append(catch)
            if format == "table":
                _show(catch, control=kernel is GOOD)
    meant = [catch for catch in found[:-1] if catch.caught is not None]
    right = sum(bool(catch.caught) for catch in meant)
    good = bool(found[-1].caught)
    if format == "json":
        print(to_json_text([asdict(catch) for catch in found], indent=2))
    else:
        left_out = len(found) - 1 - len(meant)
        print(
            f"\n{right} of {len(meant)} known-bad kernels caught on {where}"
            + (f" ({left_out} only a GPU can run)" if left_out else "")
            + ("" if good else "; the right kernel did NOT pass: verdicts of this machine cannot be trusted")
        )
    return 0 if right == len(meant) and good else 1


def _show(catch: Catch, *, control: bool) -> None:
    if catch.caught is None:
        word = paint("GPU only", "dim")
    elif catch.caught:
        word = paint("passes" if control else "caught", "green")
    else:
        word = paint("FAILS" if control else "MISSED", "red")
    text = f"{word:<9} {catch.what}" + (f": {catch.reason}" if catch.reason else "")
    print("\n".join(wrap(text, terminal_width(), " " * 10)), flush=True)
