"""Plots: which files a run gives, what stands in them, and that drawing twice gives the same bytes."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox
from synthetic_runs import attention_records, attnres_records, store

from attnbench.errors import UserError
from attnbench.results.plot import plot_run, throughput
from attnbench.results.plot_cases import bandwidth, by_case, speed_up
from attnbench.results.plot_data import by_speed
from attnbench.results.plot_style import short_name
from attnbench.results.runs import Run
from attnbench.results.store import RunWriter


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return store(tmp_path, attention_records() + attnres_records())


def test_a_sweep_gives_throughput_speed_up_and_bandwidth(run: Run) -> None:
    paths = plot_run(run)
    assert [path.name for path in paths] == [
        "throughput-bf16-h16-d128.png",
        "speedup-over-sdpa_cudnn.png",
        "bandwidth-attnres.png",
    ]
    for path in paths:
        assert path.parent == run.folder / "plots"
        assert path.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.parent.iterdir()) == sorted(paths)  # no temporary file stays


def test_svg_holds_machine_commit_units_and_every_backend_and_is_reproducible(run: Run, tmp_path: Path) -> None:
    one, two = (plot_run(run, tmp_path / name, "svg")[0].read_text() for name in ("one", "two"))
    assert one == two
    for text in ("NVIDIA H200, 700 W", "commit aaaaaaaaaa", "TFLOP/s", "sequence length", "16k tokens", "cold L2"):
        assert text in one
    for backend in ("eager", "triton", "flex", "sdpa_cudnn", "sdpa_flash"):
        assert one.count(f">{backend}<") == 4  # a label in each panel
    for panel in ("forward, full", "forward, causal", "backward, full", "backward, causal"):
        assert panel in one


def test_labels_at_line_ends_do_not_overlap(run: Run) -> None:
    records = [r for r in run.records.values() if r.op == "attention"]
    for r in records:
        r.tflops = 300.0 + 0.1 * len(r.backend)  # every line ends in the same place
    figure = throughput(run, records, "x")
    figure.canvas.draw()
    for axes in figure.axes:
        names = {text.get_text(): text for text in axes.texts if text.get_text() != "matmul, measured"}
        assert len(names) == 5
        boxes = sorted((text.get_window_extent() for text in names.values()), key=lambda box: box.y0)
        overlaps = [lower.y1 - upper.y0 for lower, upper in pairwise(boxes)]
        assert max(overlaps) < 3  # pixels at 160 a inch: less than a descender
        assert boxes[-1].y1 < axes.get_window_extent().y1 + 12


def test_few_lengths_give_rows_by_case(tmp_path: Path) -> None:
    run = store(tmp_path, attention_records(seqlens=(1024, 4096)))
    assert [path.name for path in plot_run(run)] == ["throughput-by-case.png", "speedup-over-sdpa_cudnn.png"]


def test_a_cpu_run_of_eager_alone_is_drawn_in_gflops(tmp_path: Path) -> None:
    records = [r for r in attention_records(seqlens=(1024,)) if r.backend == "eager"]
    for r in records:
        r.tflops, r.timer, r.baseline = 0.005, "host", None
    run = store(tmp_path, records, device="cpu", gpu=None, ceilings={})
    (path,) = plot_run(run, format="svg")
    text = path.read_text()
    assert "GFLOP/s" in text
    assert "CPU" in text


def test_what_was_not_timed_is_not_drawn(tmp_path: Path) -> None:
    records = attention_records(seqlens=(1024,))
    for r in records:
        r.outcome, r.median_ms = "checked", None
    assert plot_run(store(tmp_path, records)) == []
    with RunWriter(tmp_path, {"scenario": "empty"}) as writer:
        pass
    from attnbench.results.runs import read_run

    assert plot_run(read_run(writer.folder)) == []


def test_many_residual_shapes_become_rows(tmp_path: Path) -> None:
    records = attnres_records()
    for i, r in enumerate(records):
        r.label = f"shape {i % 12}"
    names = [path.name for path in plot_run(store(tmp_path, records))]
    assert "bandwidth-attnres.png" in names


def test_speed_up_leaves_eager_out_beside_a_faster_reference(run: Run) -> None:
    records = [r for r in run.records.values() if r.op == "attention"]
    figure = speed_up(run, records, "sdpa_cudnn")
    assert figure is not None
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["triton", "flex", "sdpa_flash"]


def test_a_baseline_that_was_timed_apart_still_serves(tmp_path: Path) -> None:
    records = attnres_records()
    for r in records:
        r.baseline = "eager" if r.backend != "eager" else None  # and no interleaved median
    assert "speedup-over-eager.png" in [path.name for path in plot_run(store(tmp_path, records))]


def test_backends_are_ordered_by_speed(run: Run) -> None:
    records = [r for r in run.records.values() if r.op == "attention"]
    assert by_speed(records) == ["sdpa_cudnn", "triton", "flex", "sdpa_flash", "eager"]


def test_an_unwritable_folder_is_named(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*--out"):
        plot_run(run, tmp_path / "file" / "plots")


def test_users_own_kernels_are_told_apart() -> None:
    names = [
        short_name(name)
        for name in ("examples/a.py:backend", "examples/b.py:backend", "mine.py:fast", "package.kernels:slow", "triton")
    ]
    assert names == ["a", "b", "mine:fast", "kernels:slow", "triton"]


def drawn_labels(figure: Figure) -> list[list[Bbox]]:
    """Where each panel's labels of the horizontal axis stand."""
    figure.draw_without_rendering()
    return [[text.get_window_extent() for text in axes.get_xticklabels() if text.get_text()] for axes in figure.axes]


@pytest.mark.parametrize("spread", [1.03, 1.5, 4.0, 30.0, 300.0])
def test_labels_of_a_speed_up_axis_do_not_overlap(run: Run, spread: float) -> None:
    records = [r for r in run.records.values() if r.op == "attention" and r.backend in ("sdpa_cudnn", "triton")]
    for i, r in enumerate(records):
        if r.backend == "triton":
            r.baseline_median_ms = (r.median_ms or 1) * spread ** (1 if i % 4 < 2 else -1)
    figure = speed_up(run, records, "sdpa_cudnn")
    assert figure is not None
    for boxes in drawn_labels(figure):
        assert len(boxes) >= 2
        assert all(left.x1 < right.x0 for left, right in pairwise(boxes))


def test_an_interval_that_never_settled_does_not_squeeze_the_rest(run: Run) -> None:
    records = [r for r in run.records.values() if r.op == "attention" and r.pass_ == "forward"]
    records[0].ci_ms = [(records[0].median_ms or 0) / 100, (records[0].median_ms or 0) * 2]
    run.info["ceilings"] = {}
    fastest = max(r.tflops or 0 for r in records)
    top = throughput(run, records, "x").axes[0].get_ylim()[1]
    right = by_case(run, records).axes[0].get_xlim()[1]
    assert fastest < top < 1.5 * fastest
    assert fastest < right < 1.5 * fastest


@pytest.mark.parametrize("causal", [(False,), (False, True)])
def test_no_text_leaves_the_figure(run: Run, causal: tuple[bool, ...]) -> None:
    own = "my/kernels/flash_attention_for_hopper.py:pingpong"
    run.info["packages"] = {"torch": "2.13.0.dev20261201+cu130", "triton": "3.7.1"}
    records = [r for r in run.records.values() if r.op == "attention" and bool(r.case["causal"]) in causal]
    one_pass = [r for r in records if r.pass_ == "forward"]
    for r in records:
        r.backend = own if r.backend == "triton" else r.backend
    for figure in (throughput(run, records, "x"), by_case(run, one_pass), speed_up(run, one_pass, "sdpa_cudnn")):
        assert figure is not None
        figure.draw_without_rendering()
        texts = [*figure.texts, *(text for axes in figure.axes for text in axes.texts)]
        assert any("commit" in text.get_text() for text in texts)
        assert max(text.get_window_extent().x1 for text in texts) <= figure.bbox.x1
        panels = [axes.get_window_extent() for axes in figure.axes]
        names = [t.get_window_extent() for axes in figure.axes for t in axes.texts if "pingpong" in t.get_text()]
        assert not any(box.overlaps(name) and box.x0 > name.x0 for box in panels for name in names)


def test_backends_that_were_checked_alone_are_named(tmp_path: Path) -> None:
    records = attention_records(seqlens=(1024,))
    for r in records:
        if r.backend == "triton":
            r.outcome, r.median_ms = "checked", None
    run = store(tmp_path, records)
    texts = [text.get_text() for text in by_case(run, [r for r in records if r.median_ms]).texts]
    assert any("checked, not timed: triton" in text for text in texts)
    assert not any("sdpa_flash" in text for text in texts)


def test_a_bar_too_small_to_see_is_not_called_zero(tmp_path: Path) -> None:
    records = [r for r in attnres_records() if r.tb_s]
    records[0].tb_s = 0.0014
    texts = [text.get_text() for axes in bandwidth(store(tmp_path, records), records).axes for text in axes.texts]
    assert "0.001" in texts
    assert "0.00" not in texts
