"""`attnbench check` on the CPU: corpus and scenario, output, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attnbench.cli import check as check_module
from attnbench.cli.check import check, lines, summary
from attnbench.errors import UserError
from attnbench.measure.job import CaseJob
from attnbench.ops.corpus import CorpusEntry
from attnbench.results.record import Record, TensorCheck
from attnbench.scenario.case import AttentionCase

BAD = Path(__file__).parent / "misbehaving_backends.py"
CASE = AttentionCase(dtype="bf16", heads=2, kv_heads=1, head_dim=16, causal=True, batch=1, seqlen_q=17, seqlen_k=20)


@pytest.fixture
def small_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [CorpusEntry("plain", CASE), CorpusEntry("laid out", CASE, "q:transposed dout:wide", repeats=3)]
    monkeypatch.setattr("attnbench.ops.corpus.corpus", lambda device: entries)


@pytest.mark.usefixtures("small_corpus")
def test_corpus_prints_each_tensor_with_its_budget(capsys: pytest.CaptureFixture[str]) -> None:
    assert check(dtype=["bf16"], device="cpu") == 0
    shown = capsys.readouterr().out
    assert shown.count("max abs") == 2 * 5
    assert "rel Frobenius" in shown
    assert "worst at [" in shown
    assert "[q:transposed dout:wide]" in shown
    assert "triton: 2 of 2 entries ok" in shown


@pytest.mark.usefixtures("small_corpus")
def test_a_wrong_kernel_is_exit_1_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert check(backend=[f"{BAD}:DOUBLED", "eager"], device="cpu", format="json") == 1
    found = json.loads(capsys.readouterr().out)
    by_name = {r["backend"].rpartition(":")[2]: r for r in found}
    assert by_name["DOUBLED"]["outcome"] == "check-failed"
    assert by_name["DOUBLED"]["check"]["out"]["passed"]
    assert not by_name["DOUBLED"]["check"]["dq"]["passed"]
    assert by_name["eager"]["outcome"] == "checked"


@pytest.mark.usefixtures("small_corpus")
def test_what_could_not_run_is_exit_3(capsys: pytest.CaptureFixture[str]) -> None:
    assert check(backend=[f"{BAD}:ERROR"], device="cpu") == 3
    assert "did not like" in capsys.readouterr().out


def test_fixed_tolerances_print_as_the_harness_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "phase2.yaml"
    path.write_text(
        "name: phase2\ndescription: one width\nbackends: [eager]\n"
        "cases:\n  - op: attnres_phase2\n    dtype: fp32\n    rows: 6\n    hidden: 16\n"
        "    check: {rtol: 2e-4, atol: 2e-4}\n"
    )
    assert check(scenario=path, device="cpu") == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert "eager: rows=6, D=16, dtype=fp32, include_lse_grad=True" in lines
    names = [line.split(":")[0] for line in lines if "max_abs=" in line and "max_rel=" in line]
    assert names == ["grad_x", "grad_q", "grad_y0", "grad_l0"]
    assert "PASS" in lines


def test_fixed_tolerances_that_do_not_hold_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tight.yaml"
    path.write_text(
        "name: tight\ndescription: tolerances below fp16\n"
        f"backends: ['{BAD}:ZEROS']\n"
        "cases:\n  - {dtype: fp16, heads: 1, head_dim: 8, seqlen: 8, causal: true, check: {rtol: 1e-3, atol: 1e-3}}\n"
    )
    assert check(scenario=path, device="cpu") == 1
    assert "check-failed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"op": ["atention"]}, "Did you mean 'attention'"),
        ({"dtype": ["bf61"]}, "bf16"),
        ({"backend": ["x"]}, "unknown"),
    ],
)
def test_unknown_words_are_messages(options: dict[str, list[str]], words: str) -> None:
    with pytest.raises(UserError, match=words):
        check(device="cpu", **options)  # type: ignore[arg-type]


def test_tables_for_pipes() -> None:
    record = Record("id", "attention", {}, "a|b", "triton", "check", "checked")
    record.check = {"out": TensorCheck(0.5, 0.25, 0.75, True, [1, 2])}
    assert check_module.as_data([record], "csv").splitlines()[1] == "checked,triton,a|b,out,0.5,0.25,0.75,1 2,"
    assert "a\\|b" in check_module.as_data([record], "md")


def test_batch_invariance_is_said_and_fails_nothing() -> None:
    same, other = (
        Record("1", "attention", {}, "a", "triton", "check", "checked", batch_variant=names)
        for names in ([], ["dq", "dk"])
    )
    assert "alone has other bits than in its batch: dq, dk" in "\n".join(lines(CaseJob(CASE, (), "cpu"), other))
    assert len(lines(CaseJob(CASE, (), "cpu"), same)) == 1
    assert "has the bits that it has in a batch in 1 of 2 entries" in summary([same, other])
