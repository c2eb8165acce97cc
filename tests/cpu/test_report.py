"""`report`: one page that needs nothing else, and its twin in Markdown."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from synthetic_runs import attention_records, attnres_records, store

from attnbench.cli.report import report
from attnbench.errors import UserError
from attnbench.results.record import TensorCheck
from attnbench.results.report_data import anchor, facts, reproduction, verdict
from attnbench.results.report_html import as_html
from attnbench.results.report_md import MOST_LETTERS, as_markdown
from attnbench.results.report_plots import in_the_dark, roofline
from attnbench.results.runs import Run

ROOT = Path(__file__).parents[2]
REFERENCE = sorted((ROOT / "results/reference/h200").glob("*/run.json"))
VOID = {"meta", "br", "input"}


class Page(HTMLParser):
    """Checks that tags are balanced; collects ids, links, sources and the text of each tag."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids += [name for name in [given.get("id")] if name]
        self.links += [place for name in ("href", "src", "xlink:href") if (place := given.get(name))]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.text.append(data)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    records = attention_records(seqlens=(1024, 4096)) + attnres_records()
    records[2].outcome, records[2].reason = "crashed", "signal <11> & gone"
    records[2].stderr_tail = ["Fatal: <here>"]
    bad = next(r for r in records if r.backend == "triton")
    bad.outcome, bad.reason = "check-failed", "out: off by 1"
    bad.check = {"out": TensorCheck(1.0, 1.0, float("nan"), False, [0, 1], "NaN at [0, 1]")}
    bad.median_ms, bad.samples_ms, bad.ci_ms = None, [], None
    gpu = {"name": "NVIDIA H200", "power_cap_w": 700.0, "peak": {"tensor16": 989.4, "fp32": 66.9, "tb_s": 4.8}}
    return store(tmp_path_factory.mktemp("results"), records, gpu=gpu, rows=len(records))


def test_the_page_is_whole_and_needs_no_network(run: Run) -> None:
    text = as_html(run)
    page = Page(text)
    assert len(page.ids) == len(set(page.ids)) or _only_shapes_repeat(page.ids)
    assert all(link.startswith("#") for link in page.links)
    assert all(link[1:] in page.ids for link in page.links)
    assert not re.search(r"@import|url\((?!#)|src=", text)
    for record in run.records.values():
        assert anchor(record) in page.ids
    said = " ".join(page.text)
    assert "signal <11> & gone" in said, "what a driver says is text, not markup"
    assert "Fatal: <here>" in said


def _only_shapes_repeat(ids: list[str]) -> bool:
    """Markers and clips are named by a hash of what they are: equal ones may be defined twice."""
    return all(re.fullmatch(r"[mpC][0-9a-f]{8,}(_\w+)?", name) for name in ids if ids.count(name) > 1)


def test_every_colour_has_a_light_and_a_dark_value(run: Run) -> None:
    text = as_html(run)
    used = set(re.findall(r"var\(--s-([0-9a-f]{6})\)", text))
    assert len(used) > 8
    for shade in used:
        assert f"--s-{shade}:#{shade};" in text
        assert f"--s-{shade}:#{in_the_dark(shade)};" in text


def test_dark_greys_turn_round_and_colours_stay_readable() -> None:
    assert in_the_dark("ffffff") < "30" * 3
    assert in_the_dark("000000") > "d0" * 3
    red, green, blue = (int(in_the_dark("0060a0")[i : i + 2], 16) for i in (0, 2, 4))
    assert blue > red
    assert red + green + blue > 3 * 128


def test_it_says_what_the_run_says(run: Run) -> None:
    said = " ".join(Page(as_html(run)).text)
    assert "1 row of judged backends failed the check" in said
    assert "crashed" in said
    assert "NVIDIA H200" in said
    assert "989 TFLOP/s datasheet" in said
    assert "16-bit tensor 989.4 TFLOP/s" in said
    assert "bf16 671 TFLOP/s measured" in said
    assert "Speed-up over eager" in said
    for name in ("Telemetry", "Errors by tensor", "Provenance", "Roofline"):
        assert name in said


def test_each_row_has_its_samples_and_its_command(run: Run) -> None:
    text = as_html(run)
    timed = [r for r in run.records.values() if r.samples_ms and r.median_ms]
    assert text.count('class="strip"') == len(timed)
    for record in list(run.records.values())[:5]:
        assert reproduction(run, record) in text
    strokes = re.search(r'class="strip".*?<path d="([^"]+)"', text)
    assert strokes
    assert strokes[1].count("M") == len(timed[0].samples_ms)


@pytest.mark.skipif(not REFERENCE, reason="no committed runs")
def test_commands_of_committed_runs_name_cases_that_their_scenario_has() -> None:
    from attnbench.measure.jobs import plan_jobs
    from attnbench.results.runs import read_run
    from attnbench.scenario import load

    for head in REFERENCE:
        stored = read_run(head)
        record = next(iter(stored.records.values()))
        assert f"--only {record.case_id} --backend {record.backend}" in reproduction(stored, record)
        plan = load(ROOT / str(stored.info["scenario_file"]))
        assert plan_jobs(plan, "cuda", [record.backend], [record.case_id])


def test_markdown_holds_the_same_and_fits_a_comment(run: Run) -> None:
    text = as_markdown(run)
    assert "❌ **1 row of judged backends failed the check" in text
    assert "signal &lt;11> &amp; gone" in text
    assert "<details open>" not in text, "many rows are folded"
    assert text.count("<details") == text.count("</details>")
    assert reproduction(run, next(iter(run.records.values()))).split(" --backend")[0] in text
    assert len(text) < MOST_LETTERS + 5000


def test_markdown_of_a_large_run_leaves_tables_out_and_says_so(tmp_path: Path) -> None:
    records = []
    for seed in range(12):
        for r in attention_records(seed=seed):
            r.case_id, r.label = f"{seed}-{r.case_id}", f"{r.label} seed {seed}"
            records.append(r)
    text = as_markdown(store(tmp_path, records))
    assert len(text) < 65_536
    assert "Left out for want of room: all rows" in text


def test_a_page_of_many_rows_stays_light(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = store(tmp_path, attention_records(seqlens=(1024, 4096)))
    whole = as_html(stored)
    monkeypatch.setattr("attnbench.results.report_html.MOST_DETAILED", 10)
    text = as_html(stored)
    assert len(text) < len(whole) / 2
    Page(text)
    assert "More than 10 rows" in text
    assert 'class="strip"' not in text
    assert "Speed-up" not in text
    assert all(reproduction(stored, record) in text for record in stored.records.values())


def test_verdicts(tmp_path: Path) -> None:
    good = store(tmp_path, attention_records(seqlens=(1024,)), rows=20)
    assert verdict(good).good is True
    peer = attention_records(seqlens=(1024,))
    peer[0].outcome = "check-failed"  # sdpa_cudnn's own affair
    assert peer[0].backend == "sdpa_cudnn"
    assert verdict(store(tmp_path, peer)).good is True
    gone = attention_records(seqlens=(1024,))
    gone[0].outcome = "oom"
    assert verdict(store(tmp_path, gone)).good is None


def test_a_run_without_anything_timed_or_known_is_still_a_page(tmp_path: Path) -> None:
    empty = store(tmp_path, [], gpu=None, device="cpu", ceilings={}, commit=None)
    assert roofline(empty, []) is None
    assert "none: not in a git repository" in dict(facts(empty))["Commit"]
    Page(as_html(empty))
    assert as_markdown(empty).startswith("## h100 on CPU")


def test_the_command_writes_beside_the_run_or_where_told(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(run=str(run.folder), out=None, format="html", results=tmp_path) == 0
    assert capsys.readouterr().out.strip() == str(run.folder / "report.html")
    assert (run.folder / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert report(run=str(run.folder), out=None, format="md", results=tmp_path) == 0
    assert capsys.readouterr().out.startswith("## h100")
    assert report(run=str(run.folder), out=tmp_path / "r.md", format="md", results=tmp_path) == 0
    assert (tmp_path / "r.md").read_text(encoding="utf-8").startswith("## h100")
    with pytest.raises(UserError, match="--out"):
        report(run=str(run.folder), out=tmp_path / "no" / "r.html", format="html", results=tmp_path)


def test_a_report_imports_no_torch(run: Run, tmp_path: Path) -> None:
    code = (
        "import sys; from attnbench.cli.report import report; from pathlib import Path; "
        f"report(run={str(run.folder)!r}, out=Path({str(tmp_path / 'r.html')!r}), format='html', results=Path('.')); "
        "assert not {'torch', 'triton', 'scipy', 'pydantic'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
