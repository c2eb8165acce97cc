"""The store: what a kill, a full disk, a second writer or a newer format can and cannot do."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from attnbench.errors import UserError
from attnbench.results import migrations
from attnbench.results.record import Record, TensorCheck
from attnbench.results.store import RunWriter, find_resumable, find_run, find_runs, read_run, safe_name

INFO = {
    "scenario": "smoke",
    "scenario_text": "cases: []",
    "commit": "0123456789abcdef",
    "dirty": False,
    "device": "cpu",
}


def record(n: int = 0, **fields: Any) -> Record:
    values: dict[str, Any] = {
        "case_id": f"{n:016x}",
        "op": "attention",
        "case": {"op": "attention", "seqlen_q": n},
        "label": f"case {n}",
        "backend": "triton",
        "pass_": "forward",
        "outcome": "ok",
        "samples_ms": [1.0] * 30,
        "median_ms": 1.0,
    }
    return Record(**(values | fields))


def test_round_trip_keeps_every_field(tmp_path: Path) -> None:
    check = {"dq": TensorCheck(float("nan"), float("inf"), 0.5, False, [0, 1], "NaN in dq")}
    written = record(check=check, telemetry={"sm_mhz": {"mean": 1500.0}}, ci_ms=[0.9, 1.1], flags=["bimodal"])
    with RunWriter(tmp_path, INFO) as writer:
        writer.append(written)
    run = read_run(writer.folder)
    assert repr(run.lines) == repr([written])  # repr, since NaN differs from itself
    assert run.finished
    assert run.notes == []
    for line in (writer.folder / "cases.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda token: pytest.fail(f"{token} is no JSON"))


def test_two_runs_in_one_second_have_folders_of_their_own(tmp_path: Path) -> None:
    first, second = RunWriter(tmp_path, INFO), RunWriter(tmp_path, INFO)
    assert first.folder != second.folder
    assert len(find_runs(tmp_path)) == 2


@pytest.mark.parametrize("name", ["../../etc/passwd", "/abs", "..", "a/b", "名前 x", "x" * 500, "", "\x00\n"])
def test_a_scenario_name_never_leaves_the_results_folder(tmp_path: Path, name: str) -> None:
    writer = RunWriter(tmp_path / "results", {**INFO, "scenario": name, "commit": "../../x"})
    assert writer.folder.parent == tmp_path / "results"
    assert list(tmp_path.iterdir()) == [tmp_path / "results"]


def test_safe_name_keeps_letters_of_any_script() -> None:
    assert safe_name("été 名前/../x") == "été-名前-..-x"


def test_safe_name_is_one_that_the_locale_can_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnbench.results.store.FILE_NAMES", "ascii")
    assert safe_name("größe-測 1") == "gr-e--1"
    assert safe_name("測") == "run"


def test_paths_that_are_no_utf8_are_stored_readably(tmp_path: Path) -> None:
    info = INFO | {"command": ["run", os.fsdecode(b"gr\xf6\xdfe.yaml")], "scenario_file": "lone \ud800"}
    folder = RunWriter(tmp_path, info).folder
    stored = read_run(folder).info
    assert stored["command"] == ["run", "gr\ufffd\ufffde.yaml"]
    assert stored["scenario_file"] == "lone ?"


def test_an_unwritable_results_folder_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*--out"):
        RunWriter(tmp_path / "file" / "results", INFO)


def test_a_live_run_cannot_be_resumed(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, INFO)
    with pytest.raises(UserError, match="another process"):
        RunWriter(tmp_path, INFO, resume=read_run(writer.folder))
    writer.close(finished=False)
    RunWriter(tmp_path, INFO, resume=read_run(writer.folder)).close(finished=True)


def test_resume_tells_done_from_failed_and_the_newest_record_wins(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, INFO)
    for n, outcome in enumerate(("ok", "unsupported", "check-failed", "oom", "timeout")):
        writer.append(record(n, outcome=outcome))
    writer.close(finished=False)
    run = find_resumable(tmp_path, INFO)
    assert run is not None
    assert {key[0][-1] for key in run.done()} == {"0", "1", "2"}
    assert {key[0][-1] for key in run.failed()} == {"3", "4"}
    with RunWriter(tmp_path, INFO, resume=run) as writer:
        writer.append(record(3))
        writer.append(record(4))
    again = read_run(writer.folder)
    assert len(again.lines) == 7
    assert again.failed() == set()
    assert find_resumable(tmp_path, INFO) is None  # finished, and nothing failed


def test_only_a_run_of_the_same_code_scenario_and_board_is_resumed(tmp_path: Path) -> None:
    RunWriter(tmp_path, INFO).close(finished=False)
    assert find_resumable(tmp_path, INFO) is not None
    for changed in ({"commit": "f"}, {"scenario_text": "x"}, {"diff_hash": "1"}, {"gpu": {"uuid": "GPU-2"}}):
        assert find_resumable(tmp_path, {**INFO, **changed}) is None


@pytest.mark.parametrize("tail", [b'{"case_id": "00', b'{"a": 1', b"\x00\x00", '{"label": "é'.encode()[:-1]])
def test_a_torn_last_line_is_skipped_with_a_note_and_mended_on_resume(tmp_path: Path, tail: bytes) -> None:
    writer = RunWriter(tmp_path, INFO)
    writer.append(record(1))
    writer.close(finished=False)
    with open(writer.folder / "cases.jsonl", "ab") as file:
        file.write(tail)
    run = read_run(writer.folder)
    assert [r.case_id[-1] for r in run.lines] == ["1"]
    assert "cases.jsonl:2" in run.notes[0]
    with RunWriter(tmp_path, INFO, resume=run) as writer:
        writer.append(record(2))
    again = read_run(writer.folder)
    assert [r.case_id[-1] for r in again.lines] == ["1", "2"]
    assert again.notes == []


def test_a_whole_record_without_its_newline_is_kept_on_resume(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, INFO)
    writer.append(record(1))
    writer.close(finished=False)
    path = writer.folder / "cases.jsonl"
    path.write_bytes(path.read_bytes()[:-1])
    with RunWriter(tmp_path, INFO, resume=read_run(writer.folder)) as writer:
        writer.append(record(2))
    assert len(read_run(writer.folder).lines) == 2


WRITE_FOREVER = """
import sys
from attnbench.results.record import Record
from attnbench.results.store import RunWriter
writer = RunWriter(sys.argv[1], {"scenario": "kill"})
for n in range(10**6):
    writer.append(Record(f"{n:016x}", "attention", {}, "x" * 3000, "triton", "forward", "ok"))
    print(n, flush=True)
"""


def test_sigkill_loses_no_finished_record(tmp_path: Path) -> None:
    for attempt in range(5):
        results = tmp_path / str(attempt)
        process = subprocess.Popen([sys.executable, "-c", WRITE_FOREVER, str(results)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.02 * attempt)
        process.send_signal(signal.SIGKILL)
        acknowledged = len(process.stdout.read().splitlines()) + 1
        process.wait()
        run = read_run(find_runs(results)[0].folder)
        assert acknowledged <= len(run.lines) <= acknowledged + 1
        assert not run.finished


def _fill_the_disk(results: Path, queue: Any) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    writer = RunWriter(results, INFO)
    writer.append(record(0))
    size = os.stat(writer.folder / "cases.jsonl").st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, size + 100))  # the next line does not fit
    try:
        writer.append(record(1))
    except UserError as error:
        queue.put(str(error))


def test_a_write_that_fails_half_way_leaves_whole_lines(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=_fill_the_disk, args=(tmp_path, queue))
    process.start()
    assert "cannot write" in queue.get(timeout=30)
    process.join()
    run = read_run(find_runs(tmp_path)[0].folder)
    assert len(run.lines) == 1
    assert run.notes == []


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = RunWriter(tmp_path, INFO)
    writer.append(record(0))

    def no_space(file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(UserError, match=r"disk is full.*--resume"):
        writer.append(record(1))
    monkeypatch.undo()
    assert len(read_run(writer.folder).lines) == 1


@pytest.mark.parametrize("name", ["run.json", "cases.jsonl"])
def test_a_newer_format_is_refused(tmp_path: Path, name: str) -> None:
    with RunWriter(tmp_path, INFO) as writer:
        writer.append(record())
    path = writer.folder / name
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | {"version": 99}))
    with pytest.raises(UserError, match=rf"{name}.*format 99 is newer.*Update attnbench"):
        read_run(writer.folder)


def test_an_older_format_passes_through_each_step() -> None:
    steps = {
        1: lambda data: {"median_ms": data.pop("time_us") / 1000, **data},
        2: lambda data: {**data, "flags": []},
    }
    old = {"version": 1, "time_us": 1500.0}
    new = migrations.migrate(old, steps, place="x:1", current=3)
    assert new == {"version": 3, "median_ms": 1.5, "flags": []}
    assert old == {"version": 1, "time_us": 1500.0}
    with pytest.raises(UserError, match="too old"):
        migrations.migrate({"version": 0}, steps, place="x:1", current=3)
    with pytest.raises(UserError, match="`version` is None"):
        migrations.migrate({}, steps, place="x:1")


def test_fields_that_a_later_attnbench_added_are_ignored(tmp_path: Path) -> None:
    data = record().to_json() | {"invented_later": 1}
    data["check"] = {"out": {"max_abs": 0, "rel_fro": 0, "budget_ratio": 0.1, "passed": True, "new": 3}}
    assert Record.from_json(data).check["out"].budget_ratio == 0.1


def test_a_line_that_is_no_record_names_its_place(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, INFO)
    (writer.folder / "cases.jsonl").write_text('{"version": 1, "backend": "triton"}\n')
    with pytest.raises(UserError, match=r"cases\.jsonl:1: not a record"):
        read_run(writer.folder)


def test_a_run_is_found_by_folder_name_and_commit(tmp_path: Path) -> None:
    runs = []
    for started, dirty in (
        ("2026-01-01T00:00:00Z", False),
        ("2026-01-02T00:00:00Z", False),
        ("2026-01-03T00:00:00Z", True),
    ):
        with RunWriter(tmp_path, INFO | {"started_at": started, "dirty": dirty}) as writer:
            runs.append(writer.folder)
    assert find_run(str(runs[0]), tmp_path).folder == runs[0]
    assert find_run(runs[2].name, tmp_path).folder == runs[2]
    assert find_run("0123456", tmp_path).folder == runs[1]  # the newest clean one
    with pytest.raises(UserError, match="Did you mean '20260101-"):
        find_run(runs[0].name[:-2], tmp_path)
    with pytest.raises(UserError, match="no git commit"):
        find_run("nothing-like-it", tmp_path)


def test_a_commit_with_dirty_runs_only_asks_for_a_name(tmp_path: Path) -> None:
    RunWriter(tmp_path, INFO | {"dirty": True}).close(finished=True)
    with pytest.raises(UserError, match="uncommitted changes"):
        find_run("0123456", tmp_path)
