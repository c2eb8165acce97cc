"""Isolation: whatever a backend does to its process, each planned row ends in exactly one typed record."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from attnbench.errors import UserError
from attnbench.measure.job import CaseJob, Inbox, Row, send
from attnbench.measure.supervisor import Supervisor
from attnbench.results.record import Record
from attnbench.scenario.case import AttentionCase
from attnbench.scenario.plan import MeasurePolicy

HERE = Path(__file__).parent / "misbehaving_backends.py"
CASE = AttentionCase(dtype="fp32", heads=1, kv_heads=1, head_dim=8, causal=True, batch=1, seqlen_q=9, seqlen_k=9)
POLICY = MeasurePolicy(samples=3, min_seconds=0.0, max_seconds=0.02, timeout_seconds=3.0)
PASSES = ("forward", "backward")


def job(*names: str, **changes: object) -> CaseJob:
    rows = tuple(Row(name if name.islower() else f"{HERE}:{name}", PASSES) for name in names)
    return CaseJob(CASE, rows, "cpu", measure=POLICY, **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def supervisor() -> Iterator[Supervisor]:
    with Supervisor("cpu") as found:
        yield found


def records(supervisor: Supervisor, work: CaseJob) -> list[Record]:
    return [message for message in supervisor.run(work) if isinstance(message, Record)]


def outcomes(found: list[Record]) -> dict[str, set[str]]:
    rows = Counter((r.backend, r.pass_) for r in found)
    assert set(rows.values()) == {1}, rows
    by_name: dict[str, set[str]] = {}
    for r in found:
        by_name.setdefault(r.backend.rpartition(":")[2], set()).add(r.outcome)
    return by_name


def test_a_process_that_dies_costs_its_own_rows_only(supervisor: Supervisor) -> None:
    found = records(supervisor, job("SEGFAULT", "GOOD", "KILL", "EXIT", "SLOW", "eager"))
    assert outcomes(found) == {
        "SEGFAULT": {"crashed"},
        "GOOD": {"ok"},
        "KILL": {"crashed"},
        "EXIT": {"crashed"},
        "SLOW": {"ok"},
        "eager": {"ok"},
    }
    assert len(found) == 12
    why = {r.backend.rpartition(":")[2]: r for r in found}
    assert "SIGSEGV" in (why["SEGFAULT"].reason or "")
    assert "about to touch address 0" in why["SEGFAULT"].stderr_tail
    assert "SIGKILL" in (why["KILL"].reason or "")
    assert "code 7" in (why["EXIT"].reason or "")


def test_a_hang_ends_as_timeout_and_the_rest_goes_on(supervisor: Supervisor) -> None:
    began = time.monotonic()
    found = records(supervisor, job("HANG", "GOOD"))
    assert outcomes(found) == {"HANG": {"timeout"}, "GOOD": {"ok"}}
    assert time.monotonic() - began < 20


def test_exceptions_become_typed_rows_without_a_restart(supervisor: Supervisor) -> None:
    supervisor.start()
    before = supervisor.restarts
    found = records(supervisor, job("MEMORY", "ERROR", "BUILD", "NAN", "ZEROS", "GOOD"))
    assert outcomes(found) == {
        "MEMORY": {"oom"},
        "ERROR": {"crashed"},
        "BUILD": {"build-failed"},
        "NAN": {"check-failed"},
        "ZEROS": {"check-failed"},
        "GOOD": {"ok"},
    }
    assert supervisor.restarts == before
    why = {r.backend.rpartition(":")[2]: r for r in found}
    assert "did not like" in (why["ERROR"].reason or "")
    assert any("misbehaving_backends.py" in line for line in why["ERROR"].stderr_tail)
    assert "semicolon" in (why["BUILD"].reason or "")
    assert all(r.median_ms is None and not r.samples_ms for r in found if r.outcome != "ok")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("UNWRITTEN", "NaN"),
        ("EDITS", "changed its inputs: q"),
        ("DOUBLED", "d"),
        ("RANDOM", "not bitwise reproducible"),
    ],
)
def test_wrong_kernels_fail_their_check(supervisor: Supervisor, name: str, words: str) -> None:
    found = records(supervisor, job(name))
    assert outcomes(found) == {name: {"check-failed"}}
    assert words in (found[0].reason or "")


def test_a_doubled_gradient_is_named(supervisor: Supervisor) -> None:
    found = records(supervisor, job("DOUBLED"))[0]
    assert found.check["out"].passed
    assert not found.check["dq"].passed
    assert not found.check["dv"].passed


def test_interpreted_kernels_are_checked_and_not_timed(supervisor: Supervisor) -> None:
    found = records(supervisor, job("triton", "eager"))
    triton = [r for r in found if r.backend == "triton"]
    assert {r.outcome for r in triton} == {"checked"}
    assert all("interpreted" in r.flags and r.median_ms is None for r in triton)
    assert set(triton[0].check) == {"out", "lse", "dq", "dk", "dv"}
    eager = [r for r in found if r.backend == "eager"]
    assert all(r.timer == "host" and r.median_ms and r.tflops for r in eager)


def test_what_is_too_big_for_the_interpreter_is_unsupported_with_a_reason(supervisor: Supervisor) -> None:
    big = AttentionCase(
        dtype="bf16", heads=16, kv_heads=16, head_dim=64, causal=True, batch=4, seqlen_q=4096, seqlen_k=4096
    )
    found = records(supervisor, CaseJob(big, (Row("triton", PASSES),), "cpu", measure=POLICY))
    assert outcomes(found) == {"triton": {"unsupported"}}
    assert "interpreter" in (found[0].reason or "")


def test_what_cannot_fit_is_skipped_by_plan(supervisor: Supervisor) -> None:
    huge = AttentionCase(
        dtype="fp32", heads=64, kv_heads=64, head_dim=64, causal=True, batch=1, seqlen_q=1 << 17, seqlen_k=1 << 17
    )
    found = records(supervisor, CaseJob(huge, (Row("eager", PASSES),), "cpu", measure=POLICY))
    assert outcomes(found) == {"eager": {"skipped-memory"}}
    assert "GiB" in (found[0].reason or "")


def test_a_backend_that_cannot_be_loaded_is_a_message(supervisor: Supervisor) -> None:
    with pytest.raises(UserError, match="no file"):
        supervisor.load(["no/such/file.py:KERNEL"])
    supervisor.load([f"{HERE}:GOOD"])


def test_messages_survive_any_chunking() -> None:
    import os

    read, write = os.pipe()
    messages = [Row("a", ("forward",)), {"text": "ä" * 1000}, None]
    for message in messages:
        send(write, message)
    os.close(write)
    inbox, found = Inbox(), []
    while data := os.read(read, 7):
        found += inbox.feed(data)
    os.close(read)
    assert found == messages
