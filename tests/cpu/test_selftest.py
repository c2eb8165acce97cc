"""The harness catches every known-bad kernel that has a meaning on the CPU, and passes the right one."""

from __future__ import annotations

import json

import pytest

from attnbench.cli import selftest as module
from attnbench.cli.selftest import selftest
from attnbench.measure.known_bad import KNOWN_BAD


def test_all_thirteen_are_there() -> None:
    assert len(KNOWN_BAD) == 13
    assert [bad.name for bad in KNOWN_BAD.values() if bad.gpu_only] == ["other-stream"]


def test_every_bad_kernel_is_caught_and_the_good_one_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert selftest(device="cpu", format="json") == 0
    found = {catch["name"]: catch for catch in json.loads(capsys.readouterr().out)}
    assert len(found) == 14
    missed = [name for name, catch in found.items() if catch["caught"] is False]
    assert missed == []
    assert found["other-stream"]["caught"] is None
    reasons = {
        "nan-gradient": "dk: has NaN",
        "dk-doubled": "dk: off by",
        "edits-inputs": "changed its inputs: k",
        "caches": "earlier result",
        "uninitialised": "NaN",
        "lazy": "after the timed calls",
    }
    for name, words in reasons.items():
        assert words in found[name]["reason"]
    assert found["one-element"]["reason"].startswith("out: off by 0.")


def test_a_harness_that_misses_one_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from attnbench.measure import known_bad

    # GOOD among the bad ones is right, so nothing can catch it: the worker loads it by that name.
    monkeypatch.setattr(known_bad, "KNOWN_BAD", {"GOOD": known_bad.DK_DOUBLED})
    assert module.selftest(device="cpu") == 1
    shown = capsys.readouterr().out
    assert "MISSED" in shown
    assert "0 of 1 known-bad kernels caught" in shown
