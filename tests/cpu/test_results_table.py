"""Tables and sentences over a run."""

from __future__ import annotations

import csv
import io
import json
import re

import numpy as np
import pytest
from synthetic_runs import attention_case, attention_records, attnres_records, timed

from attnbench.results.record import Record
from attnbench.results.table import as_table, figures, sentences
from attnbench.results.text import Column, aligned, markdown, text_width, wrap


def pair(n: int = 3, speed: float = 1.12) -> list[Record]:
    rng = np.random.default_rng(0)
    cases = [attention_case(2 ** (9 + i)) for i in range(n)]
    return [timed(c, b, "forward", ms, rng=rng) for c in cases for b, ms in (("triton", 1.0), ("flex", speed))]


@pytest.fixture
def eighty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.usefixtures("eighty")
def test_every_row_is_one_aligned_line_within_80_columns() -> None:
    records = attention_records(seqlens=(1024, 4096)) + attnres_records()
    lines = as_table(records).split("\n")
    assert max(len(line) for line in lines) <= 80
    rows = [line for line in lines if line.startswith("bf16")]
    assert len(rows) == len(records)
    assert {"fwd", "bwd"} <= set(" ".join(rows).split())
    assert "Not shown for want of width" in " ".join(lines)
    assert "\x1b" not in "".join(lines)


def test_a_pipe_gets_every_column_in_full() -> None:
    table = as_table(attention_records(seqlens=(1024,)))
    assert "bf16 16x1024 h16 d128 causal" in table
    for title in ("median ms", "TFLOP/s", "TB/s", "of matmul", "× baseline", "× eager", "MHz", "W", "outcome"):
        assert title in table.split("\n")[0]


@pytest.mark.parametrize("columns", ["", "80"])
def test_what_failed_says_why_below_its_row(monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    records = pair()
    records[0].outcome, records[0].reason, records[0].median_ms = "oom", "tried to allocate 90 GiB", None
    records[1].flags = ["bimodal", "unconverged", "interpreted"]
    lines = as_table(records).split("\n")
    assert lines[1].split()[-1] == "oom"
    assert lines[2] == "    tried to allocate 90 GiB"
    if columns:  # no room for a column of flags
        assert lines[4] == "    bimodal, unconverged"
    else:
        assert lines[3].endswith("ok       bimodal, unconverged")
    assert sentences(records)[-2:] == [
        "1 row oom (triton).",
        "1 row did not settle within the time cap: raise `max_seconds` in `measure:`.",
    ]


def test_json_and_csv_hold_raw_figures() -> None:
    records = pair()
    data = json.loads(as_table(records, "json"))
    assert [row["median_ms"] for row in data] == [r.median_ms for r in records]
    rows = list(csv.DictReader(io.StringIO(as_table(records, "csv"))))
    assert [float(row["median_ms"]) for row in rows] == [r.median_ms for r in records]
    assert rows[0]["pass"] == "forward"
    assert rows[0]["tflops"] == ""


def test_markdown_is_a_table() -> None:
    lines = as_table(pair(), "md").split("\n")
    assert len(lines) == 2 + 6
    assert len({line.count("|") for line in lines}) == 1


def test_speed_up_over_eager_and_baseline() -> None:
    rows = figures(attention_records(seqlens=(4096,)))
    by_backend = {row["backend"]: row for row in rows if row["pass"] == "forward" and "full" in row["case"]}
    assert by_backend["triton"]["vs_eager"] == pytest.approx(520 / 99, rel=0.02)
    assert by_backend["triton"]["vs_baseline"] == pytest.approx(520 / 600, rel=0.02)
    assert by_backend["eager"]["vs_eager"] is None
    assert by_backend["sdpa_cudnn"]["vs_baseline"] is None


def test_the_sentence_names_times_cases_and_mean() -> None:
    assert sentences(pair()) == [
        "triton, attention forward:",
        "  ran 1.12 ± 0.01 times faster than flex over 3 cases (geometric mean)",
    ]
    assert re.fullmatch(
        r"  ran (1.9[5-9]|2.0\d) ± 0.0\d times slower than flex over 1 case", sentences(pair(1, 0.5))[1]
    )


def test_against_the_baseline_its_interleaved_median_counts() -> None:
    records = pair()
    for r in records[::2]:
        r.baseline, r.baseline_median_ms = "flex", 1.5
    assert "ran 1.50 ± 0.01 times faster than flex" in sentences(records)[1]


def test_a_mean_over_a_part_of_the_cases_is_withheld() -> None:
    records = pair()
    records[3].outcome, records[3].median_ms = "timeout", None
    assert sentences(records)[1] == "  no mean against flex: 1 of 3 cases has no time on one side"


def test_a_mean_skips_cases_that_one_side_does_not_take_and_counts_the_rest() -> None:
    records = pair()
    records[3].outcome, records[3].median_ms = "unsupported", None
    assert "over 2 cases" in sentences(records)[1]


def test_a_table_of_nothing() -> None:
    assert as_table([]).startswith("case")
    assert sentences([]) == []


def test_wide_letters_are_aligned() -> None:
    lines = aligned([Column("name"), Column("n", ">")], [["名前", "1"], ["ab", "22"]]).split("\n")
    assert len({text_width(line) for line in lines}) == 1


def test_a_cpu_is_told_in_giga() -> None:
    records = pair()
    for r in records:
        r.tflops, r.tb_s = 0.0123, 0.004
    title, row = as_table(records).split("\n")[:2]
    assert "GFLOP/s" in title
    assert "GB/s" in title
    assert row.split()[9:11] == ["12.3", "4.00"]
    assert as_table(records, "csv").split("\n")[0].count("tflops") == 1  # files keep one unit


def test_a_users_own_file_is_named_without_its_folders() -> None:
    records = pair()
    for r in records:
        r.backend = r.backend.replace("triton", "some/where/my_kernel.py:MINE")
    assert "  my_kernel.py:MINE  " in as_table(records)
    assert "some/where/my_kernel.py:MINE" in as_table(records, "csv")
    assert sentences(records)[0] == "my_kernel.py:MINE, attention forward:"


def test_helpers() -> None:
    assert markdown([Column("a")], [["x|y"]]).endswith("| x\\|y |")
    assert wrap("attnbench run --only aaaa-bbbb", 10, "  ")[-1] == "  aaaa-bbbb"


def test_a_mean_that_its_interval_does_not_decide_is_said_to_be_uncertain() -> None:
    for ms in (0.98, 1.02):
        records = pair(1, ms)
        records[0].ci_ms = [0.8, 1.3]
        assert sentences(records)[1].endswith("over 1 case: too uncertain to tell")


def test_a_small_rate_is_not_called_zero() -> None:
    records = pair(1)
    for r in records:
        r.tflops, r.tb_s = 0.3e-6, 2e-6
    row = as_table(records).split("\n")[1]
    assert "0.002" in row.split()
    assert "0.00" not in row.split()


def test_a_folded_column_loses_no_words() -> None:
    columns = [Column("name"), Column("what", shrink=True, fold=True), Column("n", ">")]
    words = "every word of a description that is far too long for one line"
    lines = aligned(columns, [["one", words, "1"], ["two", "short", "22"]], width=40).split("\n")
    assert max(map(len, lines)) <= 40
    assert "…" not in "".join(lines)
    assert " ".join(line[6:36].strip() for line in lines[1:-1]).split() == words.split()
    assert re.fullmatch(r"one   every .* 1", lines[1])
    assert re.fullmatch(r"two   short +22", lines[-1])
