"""Several boards: which are taken, who runs what, and that no case is lost, counted twice or spread over two."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from attnbench import scenario as scenarios
from attnbench.cli import places
from attnbench.cli.plan_text import plan_text
from attnbench.cli.run import run
from attnbench.errors import UserError
from attnbench.measure.board import Board
from attnbench.measure.job import CaseJob, Hello, Phase, Row, blank_record
from attnbench.measure.jobs import plan_jobs
from attnbench.measure.pool import LocalPool, Survey, local_boards, more_boards, surveys_info
from attnbench.measure.provenance import provenance
from attnbench.measure.schedule import at_home, job_seconds, longest_first, simulate
from attnbench.measure.supervisor import Supervisor, worker_environment
from attnbench.results.comparable import footing
from attnbench.results.record import Record
from attnbench.results.runs import Run, read_run, same_run
from attnbench.scenario.case import AttentionCase

H200 = [Board("NVIDIA H200", f"GPU-{i}{i}") for i in range(4)]
TEXT = """
name: tiny
backends: [eager, triton]
defaults: {dtype: fp32, heads: 1, head_dim: 8, causal: true}
measure: {samples: 3, min_seconds: 0.0, max_seconds: 0.02, timeout_seconds: 60}
cases:
  - matrix: {seqlen: [8, 9, 10, 11, 12, 13]}
"""
BIG = """
name: big
backends: [sdpa_cudnn, triton, sm90, fa4]
cases:
  - matrix:
      dtype: [bf16, fp16]
      causal: [false, true]
      heads: [4, 8, 16, 32, 64]
      head_dim: [64, 80, 96, 128, 192]
      batch: [1, 2]
      seqlen: [{}]
"""


def job(seqlen: int = 8, **changes: object) -> CaseJob:
    case = AttentionCase("fp32", 1, 1, 8, True, batch=1, seqlen_q=seqlen, seqlen_k=seqlen)
    return CaseJob(case, (Row("eager", ("forward", "backward")), Row("triton", ("forward",))), "cpu", **changes)  # type: ignore[arg-type]


class FakeSupervisor(Supervisor):
    """A board that answers at once; `fails_at` is the length at which it is lost."""

    def __init__(self, board: str, pause: float = 0.0, fails_at: int | None = None) -> None:
        super().__init__("cpu", board=board)
        self.pause, self.fails_at = pause, fails_at

    def start(self) -> Hello:
        self.hello = Hello(1, "cpu", uuid=self.board)
        return self.hello

    def run(self, job: CaseJob) -> Iterator[Record | Phase]:
        assert isinstance(job.case, AttentionCase)
        if job.case.seqlen_q == self.fails_at:
            raise UserError("the board fell off the bus")
        for row in job.rows:
            yield Phase("time", row.backend, 1.0)
            for pass_ in row.passes:
                time.sleep(self.pause)
                found = blank_record(job, row.backend, pass_, "ok")
                yield replace(found, board=self.board, median_ms=1.0, ci_ms=[1.0, 1.0], samples_ms=[1.0] * 3)


def executed(pool: LocalPool, jobs: list[CaseJob]) -> list[Record]:
    stored: list[Record] = []
    with pool:
        pool.start()
        pool.execute(jobs, stored.append)
    return stored


def boards_of_cases(records: list[Record]) -> dict[str, set[str | None]]:
    found: dict[str, set[str | None]] = {}
    for record in records:
        found.setdefault(record.case_id, set()).add(record.board)
    return found


# --- planning ---


def test_ten_thousand_cases_over_eight_boards_are_planned_in_two_seconds() -> None:
    began = time.process_time()
    plan = scenarios.loads(BIG.format(", ".join(str(128 + 64 * i) for i in range(50))))
    jobs = plan_jobs(plan, "cuda")
    text = plan_text(jobs, 8)
    assert time.process_time() - began < 2
    assert text.count("\n") > 10_000
    assert "on 8 GPUs" in text
    durations = [job_seconds(one) for one in jobs]
    assignment = simulate(durations, 8)
    assert sorted(index for indices in assignment for index in indices) == list(range(10_000))
    makespan = max(sum(durations[index] for index in indices) for indices in assignment)
    assert makespan <= 1.05 * max(sum(durations) / 8, max(durations))


def test_the_longest_case_goes_first() -> None:
    jobs = [job(8), job(2048), job(64)]
    assert [one.case for one in longest_first(jobs)] == [jobs[1].case, jobs[2].case, jobs[0].case]
    assert simulate([3, 1, 1, 1], 2) == [[0], [1, 2, 3]]
    assert simulate([], 2) == [[], []]


def test_a_dry_run_plans_for_boards_that_are_not_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(TEXT)
    assert run(scenario=path, out=tmp_path / "r", dry_run=True, gpus="4") == 0
    shown = capsys.readouterr().out
    assert "6 cases, 24 rows" in shown
    assert "on cuda" in shown
    assert [line.split()[0] for line in shown.splitlines()[-5:-1]] == ["0", "1", "2", "3"]
    with pytest.raises(UserError, match="say how many boards"):
        run(scenario=path, out=tmp_path / "r", dry_run=True, executor="ray")


# --- choosing boards ---


@pytest.mark.parametrize(
    ("visible", "asked", "found"),
    [
        (None, "all", [0, 1, 2, 3]),
        (None, "2", [0, 1]),
        ("3,1", "all", [3, 1]),
        ("GPU-22,GPU-00", "all", [2, 0]),
        ("1,9,2", "all", [1]),  # CUDA, too, stops at what it does not know
    ],
)
def test_boards_are_those_that_cuda_may_see(
    visible: str | None, asked: str, found: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert local_boards(asked, H200) == [H200[i] for i in found]


def test_wrong_wishes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    mixed = [*H200, Board("NVIDIA H100", "GPU-99")]
    wrong: list[tuple[str, list[Board], str]] = [
        ("5", H200, "there are 4, and two workers are never put on one GPU"),
        ("0", H200, "`all` or a number"),
        ("many", H200, "`all` or a number"),
        ("all", [], "every board"),
        ("all", mixed, "different models"),
    ]
    for asked, found, words in wrong:
        with pytest.raises(UserError, match=words):
            local_boards(asked, found)
    assert local_boards("4", mixed) == H200
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,1")
    with pytest.raises(UserError, match="two workers on one GPU"):
        local_boards("all", H200)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(UserError, match="PCI_BUS_ID"):
        local_boards("all", mixed)
    with pytest.raises(UserError, match="not on the CPU"):
        places.pool_of("cpu", "2", "local", None, None)
    with pytest.raises(UserError, match="--executor ray"):
        places.pool_of("cpu", None, "local", "auto", None)


def test_a_worker_sees_its_board_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert worker_environment("cuda", "GPU-7")["CUDA_VISIBLE_DEVICES"] == "GPU-7"
    assert worker_environment("cuda")["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert worker_environment("cpu", "GPU-7")["CUDA_VISIBLE_DEVICES"] == ""


def test_two_workers_on_one_board_are_refused() -> None:
    with (
        LocalPool([FakeSupervisor("GPU-1"), FakeSupervisor("GPU-1")]) as pool,
        pytest.raises(UserError, match="one GPU"),
    ):
        pool.start()


# --- running ---


def test_each_case_goes_whole_to_one_board() -> None:
    jobs = [job(n) for n in range(8, 40)]
    pool = LocalPool([FakeSupervisor("A", 0.001), FakeSupervisor("B", 0.003)])
    stored = executed(pool, jobs)
    assert Counter((r.case_id, r.backend, r.pass_) for r in stored).most_common(1)[0][1] == 1
    assert len(stored) == 3 * len(jobs)
    found = boards_of_cases(stored)
    assert all(len(boards) == 1 for boards in found.values())
    shares = Counter(board for (board,) in found.values())
    assert shares["A"] > shares["B"] > 0  # the faster board takes more


def test_a_begun_case_goes_back_to_its_board() -> None:
    jobs = [job(n, board="B" if n % 4 == 0 else None) for n in range(8, 40)]
    stored = executed(LocalPool([FakeSupervisor("A"), FakeSupervisor("B", 0.001)]), jobs)
    pinned = {one.case.case_id for one in jobs if one.board}
    assert all(record.board == "B" for record in stored if record.case_id in pinned)
    assert len(stored) == 3 * len(jobs)


def test_a_lost_board_costs_the_case_it_was_at() -> None:
    jobs = [job(n) for n in range(8, 20)]
    stored: list[Record] = []
    with LocalPool([FakeSupervisor("A", 0.01), FakeSupervisor("B", 0.01, fails_at=19)]) as pool:
        pool.start()
        pinned = [replace(one, board="B") if one.case == job(19).case else one for one in jobs]
        with pytest.raises(UserError, match=r"1 cases could not be run: the board fell off the bus\n.*--resume"):
            pool.execute(pinned, stored.append)
    assert len(stored) == 3 * 11


def test_what_is_left_of_a_case_never_joins_rows_of_another_board() -> None:
    whole = [job(8), job(9), job(10), job(11)]
    left = [replace(one, rows=one.rows[1:]) for one in whole]

    def record(one: CaseJob, board: str | None, backend: str = "eager") -> Record:
        return replace(blank_record(one, backend, "forward", "ok"), board=board, median_ms=1.0)

    earlier = [record(whole[0], "A"), record(whole[1], "C"), record(whole[3], "A"), record(whole[3], "B", "triton")]
    placed = at_home(left, whole, earlier, {"A", "B"})
    assert placed == [replace(left[0], board="A"), whole[1], left[2], whole[3]]
    untimed = [replace(entry, median_ms=None) for entry in earlier]
    assert at_home(left, whole, untimed, {"A", "B"}) == left


@pytest.fixture
def two_boards(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """`run` on two simulated boards of this CPU."""
    same = provenance()
    monkeypatch.setattr("attnbench.cli.run.provenance", lambda own: same)

    def pool(*_: object) -> LocalPool:
        return LocalPool([Supervisor("cpu", board="SIM-0"), Supervisor("cpu", board="SIM-1")])

    return lambda: monkeypatch.setattr(places, "pool_of", pool)


def test_a_run_on_two_boards_has_the_records_of_a_run_on_one(tmp_path: Path, two_boards: Callable[[], None]) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(TEXT)
    assert run(scenario=path, out=tmp_path / "one", device="cpu") == 0
    two_boards()
    assert run(scenario=path, out=tmp_path / "two", device="cpu") == 0
    one, two = (read_run(next((tmp_path / name).iterdir())) for name in ("one", "two"))
    assert two.finished
    assert len(two.lines) == len(two.records) == 24
    assert two.records.keys() == one.records.keys()
    assert {key: r.outcome for key, r in two.records.items()} == {key: r.outcome for key, r in one.records.items()}
    found = boards_of_cases(two.lines)
    assert all(len(boards) == 1 for boards in found.values())
    assert {board for boards in found.values() for board in boards} == {"SIM-0", "SIM-1"}


def test_resume_on_other_boards_mixes_none_within_a_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    same = provenance()
    monkeypatch.setattr("attnbench.cli.run.provenance", lambda own: same)
    path, out = tmp_path / "tiny.yaml", tmp_path / "r"
    path.write_text(TEXT)

    def run_on_boards(*names: str, resume: bool = False) -> Run:
        boards = [FakeSupervisor(name, 0.01) for name in names]
        monkeypatch.setattr(places, "pool_of", lambda *_: LocalPool(boards))
        assert run(scenario=path, out=out, device="cpu", resume=resume) == 0
        return read_run(next(out.iterdir()))

    first = run_on_boards("A", "B")
    assert {record.board for record in first.lines} == {"A", "B"}
    kept = first.lines[:5] + [record for record in first.lines[5:] if record.backend == "eager"]
    (first.folder / "cases.jsonl").write_text("".join(json.dumps(record.to_json()) + "\n" for record in kept))
    info = {**first.info, "finished_at": None}
    (first.folder / "run.json").write_text(json.dumps(info))
    again = run_on_boards("B", "C", resume=True)
    assert again.finished
    assert len(again.records) == 24
    found = boards_of_cases(list(again.records.values()))
    assert all(len(boards) == 1 for boards in found.values())
    assert again.lines[: len(kept)] == kept  # what was stored stays


# --- stored runs of several boards ---


def run_on(folder: Path, *uuids: str, name: str = "NVIDIA H200", cap: float = 700.0) -> Run:
    described = [{"name": name, "uuid": uuid, "power_cap_w": cap} for uuid in uuids]
    info = {"scenario": "s", "device": "cuda", "gpu": described[0]}
    return Run(folder, info | ({"gpus": described} if len(described) > 1 else {}))


def test_several_boards_of_one_model_go_on_with_each_other(tmp_path: Path) -> None:
    one, two, other = run_on(tmp_path, "A"), run_on(tmp_path, "B", "C"), run_on(tmp_path, "B")
    assert same_run(one, run_on(tmp_path, "A").info)
    assert not same_run(one, other.info)
    assert same_run(one, two.info)
    assert same_run(two, one.info)
    assert not same_run(two, run_on(tmp_path, "A", "B", cap=500.0).info)
    assert [gpu["uuid"] for gpu in more_boards(one.info, two.info)["gpus"]] == ["A", "B", "C"]
    assert more_boards(one.info, one.info) == {}


def test_runs_of_several_boards_are_compared_with_an_allowance(tmp_path: Path) -> None:
    one, two = run_on(tmp_path, "A"), run_on(tmp_path, "A", "B")
    assert footing(one, one).spread == 0
    assert footing(one, two).spread > 0
    assert footing(two, two).spread > 0  # a case may have lain on either
    assert "several boards" in footing(two, two).notes[0]


def test_each_board_has_its_own_ceilings() -> None:
    surveys = [Survey("A", {"copy": 4.0}, {"noise_floor_percent": 0.1}), Survey("B", {"copy": 3.9})]
    found = surveys_info(surveys)
    assert found["ceilings"] == {"copy": 4.0}
    assert {board: each["ceilings"]["copy"] for board, each in found["surveys"].items()} == {"A": 4.0, "B": 3.9}
    assert "surveys" not in surveys_info(surveys[:1])
