"""The store: what a kill, a full disk, a second writer or a newer format can and cannot do."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import resource
import signal
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from attnbench.errors import UserError
from attnbench.results import migrations
from attnbench.results.record import Record, TensorCheck
from attnbench.results.runs import key_of
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


def _go_on(results: Path, count: int, acknowledge: int) -> None:
    """What `run --resume` does, with cases that take no time: says which are stored once they are."""
    earlier = find_resumable(results, INFO)
    writer = RunWriter(results, INFO | {"rows": count}, resume=earlier)
    writer.update(ceilings={"copy": 4.0})
    done = read_run(writer.folder).done()
    for n in range(count):
        one = record(n)
        if key_of(one) not in done:
            writer.append(one)
            os.write(acknowledge, n.to_bytes(4, "big"))
            time.sleep(0.0002)  # fifty lives must not be enough, however fast the disk
    writer.close(finished=True)


def test_no_finished_case_of_a_thousand_is_lost_over_fifty_kills(tmp_path: Path) -> None:
    rng, kills = random.Random(0), 0
    acknowledged: set[int] = set()
    there: set[int] = set()
    while not (runs := find_runs(tmp_path)) or not runs[0].finished:
        read, write = os.pipe()
        process = multiprocessing.get_context("fork").Process(target=_go_on, args=(tmp_path, 1000, write))
        process.start()
        os.close(write)
        with open(read, "rb", buffering=0) as stored:
            if kills < 50:
                for _ in range(rng.randrange(0, 25)):
                    acknowledged.add(int.from_bytes(stored.read(4), "big"))
                time.sleep(rng.random() * 0.002)
                assert process.pid is not None
                os.kill(process.pid, signal.SIGKILL)
                kills += 1
            while four := stored.read(4):
                acknowledged.add(int.from_bytes(four, "big"))
        process.join()
        there = {int(r.case_id, 16) for found in find_runs(tmp_path) for r in read_run(found.folder).lines}
        assert acknowledged <= there, "a stored case is gone"
    (folder,) = tmp_path.iterdir()
    run = read_run(folder)
    assert kills == 50
    assert len(run.lines) == len(run.records) == len(acknowledged | there) == 1000, "and none was run twice"
    assert run.notes == []
    assert len(run.info["resumed_at"]) >= 40


def _write_all(results: Path, first: int) -> None:
    with RunWriter(results, INFO) as writer:
        for n in range(first, first + 100):
            writer.append(record(n))


def test_runs_beside_each_other_keep_to_their_own_folders(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_write_all, args=(tmp_path, 100 * i)) for i in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    runs = [read_run(run.folder) for run in find_runs(tmp_path)]
    assert sorted(int(run.lines[0].case_id, 16) for run in runs) == [0, 100, 200, 300]
    assert all(len(run.records) == 100 and run.finished and not run.notes for run in runs)


def test_a_run_killed_before_its_first_words_is_no_run(tmp_path: Path) -> None:
    with RunWriter(tmp_path, INFO) as writer:
        whole = (writer.folder / "run.json").read_bytes()
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / ".run.json.123").write_bytes(whole[:40])
    unreadable: list[str] = []
    assert [run.folder for run in find_runs(tmp_path, unreadable)] == [writer.folder]
    assert unreadable == []


@pytest.mark.skipif(not hasattr(time, "tzset"), reason="this system's clock has one zone")
def test_the_zone_of_the_machine_changes_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stamps = []
    try:
        for zone in ("Asia/Tokyo", "America/St_Johns", "UTC"):
            monkeypatch.setenv("TZ", zone)
            time.tzset()
            with RunWriter(tmp_path, INFO | {"scenario": zone}) as writer:
                stamps.append(writer.info["started_at"])
                assert writer.folder.name.startswith(stamps[-1].replace("-", "").replace(":", "").replace("T", "-"))
    finally:
        monkeypatch.undo()
        time.tzset()
    seconds = [datetime.fromisoformat(stamp).timestamp() for stamp in stamps]
    assert max(seconds) - min(seconds) <= 2
    assert [run.scenario for run in find_runs(tmp_path)][-1] == "Asia/Tokyo" or len(set(stamps)) == 1


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
