"""Where each row's time goes, as `run --detail` prints it."""

from __future__ import annotations

from attnbench.results.record import Record
from attnbench.results.split_text import split_table


def row(pass_: str, split: dict[str, float] | None, **fields: object) -> Record:
    return Record("1", "attention", {}, "bf16 4x4096", "sm90", pass_, "ok", split_ms=split, **fields)  # type: ignore[arg-type]


def test_parts_and_host_time_stand_in_columns_of_their_own(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = split_table(
        [
            row("forward", {"main": 0.5, "call_no_grad": 0.03}, call_ms=0.09),
            row(
                "backward",
                {"preprocess": 0.1, "main": 2.0, "postprocess": 0.2, "autograd_host": 0.04},
                telemetry={"kernels_ms": {"sm90_backward_prepare": 0.1, "sm90_backward": 2.0}},
            ),
            row("backward", None),
            row("forward", {"call_no_grad": 0.03}),
        ]
    ).splitlines()
    assert len(shown) == 3
    for title in ("preprocess", "main", "postprocess", "host: call", "host: no grad", "host: autograd", "kernels"):
        assert title in shown[0]
    assert "zero fill" not in shown[0]
    assert "0.5 " in shown[1]
    assert "0.09 " in shown[1]
    assert "sm90_backward_prepare, sm90_backward" in shown[2]


def test_nothing_is_shown_where_nothing_was_split() -> None:
    assert split_table([row("forward", None)]) == ""
