"""The scenarios that come along, the schema, the documentation, `validate` and `schema`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from attnbench.cli.schema import schema, text_of_schema
from attnbench.cli.validate import validate
from attnbench.scenario import load, loads
from attnbench.scenario.case import AttentionCase, AttnresCase, op_name
from attnbench.scenario.model import Check, Distribution, Entry, Measure, ScenarioModel

ROOT = Path(__file__).parents[2]
SCHEMA = ROOT / "attnbench/scenario/scenario.schema.json"
FILES = sorted((ROOT / "scenarios").glob("*.yaml"))
FIRST_LINE = "# yaml-language-server: $schema=../attnbench/scenario/scenario.schema.json\n"


def by_name(name: str):
    return load(ROOT / "scenarios" / f"{name}.yaml")


def test_committed_schema_is_the_generated_one():
    assert SCHEMA.read_text(encoding="utf-8") == text_of_schema(), "run: attnbench schema --out " + str(SCHEMA)


def test_schema_describes_every_field():
    models = json.loads(text_of_schema())["$defs"]
    for model in ("Entry", "CaseFields", "Measure", "Check", "Distribution", "Matrix"):
        assert models[model]["additionalProperties"] is False
        for name, field in models[model]["properties"].items():
            assert field.get("description"), f"{model}.{name}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_scenario_loads(file):
    scenario = load(file)
    assert scenario.name == file.stem
    assert scenario.description
    assert scenario.text.startswith(FIRST_LINE)
    assert loads(scenario.text).plan() == scenario.plan()


def test_all_scenarios_are_there():
    assert {"smoke", "h100", "rl_varlen", "attnres", "phase2_backward"} <= {file.stem for file in FILES}


def test_smoke_is_small_and_covers_every_operation():
    plan = by_name("smoke").plan()
    assert {op_name(p.case) for p in plan} == {"attention", "attnres_phase1", "attnres_phase2"}
    assert {p.case.layout for p in plan if isinstance(p.case, AttentionCase)} == {"dense", "varlen"}
    assert {p.case.dtype for p in plan} == {"fp32", "fp16", "bf16"}
    assert all(p.backends == ("eager", "triton") for p in plan)
    for planned in plan:
        case = planned.case
        if isinstance(case, AttentionCase):
            assert sum(q * k for q, k in case.lengths) * case.heads <= 150 * 32 * 32
        else:
            assert case.rows <= 32


def test_h100_has_the_measured_table():
    scenario = by_name("h100")
    assert scenario.baseline == "sdpa_cudnn"
    found = {p.case.label for p in scenario.plan()}
    for mask in ("full", "causal"):
        for shape, heads, dim in [
            ("16x1024", "16", 128),
            ("4x4096", "16", 128),
            ("1x16384", "16", 128),
            ("4x4096", "32", 64),
            ("4x4096", "8", 256),
            ("4x4096", "32/8", 128),
            ("varlen 12 seqs 24540 tok", "16", 128),
        ]:
            assert f"bf16 {shape} h{heads} d{dim} {mask}" in found
        for dim, heads in ((64, 32), (128, 16)):
            for seqlen in (512, 1024, 2048, 4096, 8192, 16384):
                assert f"bf16 {16384 // seqlen}x{seqlen} h{heads} d{dim} {mask}" in found


def test_h100_fits_eight_minutes():
    scenario = by_name("h100")
    rows = sum(len(p.backends) * len(p.passes) for p in scenario.plan())
    seconds = rows * (2 * scenario.measure.min_seconds + scenario.measure.max_seconds)
    assert seconds < 5 * 60, "leaves no time for checking and side figures"
    assert sum("eager" in p.backends for p in scenario.plan()) == 3
    assert sum("compile" in p.backends for p in scenario.plan()) == 3


def test_rl_batches():
    for planned in by_name("rl_varlen").plan():
        case = planned.case
        assert (case.heads, case.kv_heads, case.head_dim, case.causal, case.dtype) == (32, 8, 128, True, "bf16")
        assert 32_000 <= sum(case.seqlens_q) <= 66_000
        assert len(case.seqlens_q) > 5


def test_phase2_backward_is_the_thirteen_cases():
    rows = by_name("phase2_backward").plan()
    half = [AttnresCase(phase=2, dtype="fp16", rows=20, hidden=hidden) for hidden in (32, 64, 128)]
    full = [
        AttnresCase(phase=2, dtype="fp32", rows=6, hidden=hidden, lse_grad=lse_grad)
        for hidden in (16, 32, 64, 128, 256)
        for lse_grad in (True, False)
    ]
    assert [p.case for p in rows] == full + half
    assert [(p.check.rtol, p.check.atol) for p in rows] == [(2e-4, 2e-4)] * 10 + [(2e-3, 2e-3)] * 3


def test_attnres_has_the_headline_shapes():
    cases = [p.case for p in by_name("attnres").plan()]
    for rows, hidden, blocks, queries in [
        (16384, 4096, 8, 8),
        (8192, 7168, 8, 8),
        (65536, 2048, 5, 8),
        (8192, 7168, 8, 24),
    ]:
        assert any(
            (c.phase, c.rows, c.hidden, c.blocks, c.queries) == (1, rows, hidden, blocks, queries) for c in cases
        )
    for rows, hidden in [(16384, 4096), (8192, 7168), (65536, 2048)]:
        assert any((c.phase, c.rows, c.hidden) == (2, rows, hidden) for c in cases)


DOCS = (ROOT / "docs" / "scenarios.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("block", re.findall(r"```yaml\n(.*?)```", DOCS, re.DOTALL))
def test_documented_example_loads(block):
    missing = {
        "name": "name: example\n",
        "backends": "backends: [eager]\n",
        "cases": "cases: [{heads: 2, head_dim: 64, seqlen: 8}]\n",
    }
    text = block + "".join(line for key, line in missing.items() if not re.search(rf"^{key}:", block, re.MULTILINE))
    assert loads(text).plan()


@pytest.mark.parametrize(
    "model", [ScenarioModel, Entry, Measure, Check, Distribution], ids=lambda model: model.__name__
)
def test_every_field_is_documented(model):
    rows = set(
        re.findall(r"`(\w+)`", "\n".join(line.split("|")[1] for line in DOCS.splitlines() if line.startswith("| `")))
    )
    assert set(model.model_fields) <= rows


@pytest.mark.parametrize(("model", "heading"), [(Measure, "### `measure`"), (Check, "### `check`")])
def test_documented_defaults_are_the_defaults(model, heading):
    section = DOCS.split(heading + "\n")[1].split("\n#")[0]
    documented = dict(re.findall(r"^\| `(\w+)` \|[^|]*\| ([^|]*) \|", section, re.MULTILINE))
    for name, text in documented.items():
        value = getattr(model(), name)
        assert text.strip("`") == (
            f"{value:g}"
            if isinstance(value, int | float) and not isinstance(value, bool)
            else f"[{', '.join(value)}]"
            if isinstance(value, list)
            else str(value).lower()
        )


def test_validate_prints_the_cases(capsys):
    assert validate([ROOT / "scenarios/h100.yaml", ROOT / "scenarios/attnres.yaml"]) == 0
    out = capsys.readouterr().out
    assert "h100: 30 cases, 432 rows" in out
    assert "eeb6a0d823437bbd  attention  bf16 4x4096 h16 d128 causal" in out
    assert "attnres_phase1  bf16 8192x7168 n8 s24" in out


def test_validate_goes_on_after_a_bad_file(tmp_path, capsys):
    bad = tmp_path / "bad.yaml"
    bad.write_text("name: t\nbackends: [eager]\ncases: [{hedas: 4}]\n")
    assert validate([bad, ROOT / "scenarios/smoke.yaml", tmp_path / "absent.yaml"]) == 2
    captured = capsys.readouterr()
    assert f"{bad}:3: cases[0].hedas: unknown key 'hedas'" in captured.err
    assert "absent.yaml: no such file" in captured.err
    assert "smoke: 13 cases" in captured.out


def test_schema_command(tmp_path, capsys):
    assert schema() == 0
    assert json.loads(capsys.readouterr().out)["title"] == "attnbench scenario"
    assert schema(tmp_path / "s.json") == 0
    assert (tmp_path / "s.json").read_text(encoding="utf-8") == text_of_schema()


def test_validate_and_the_package_stay_light():
    """Neither torch nor numpy nor scipy for `validate`; not even pydantic or yaml for importing the package."""
    code = (
        "import sys, attnbench.scenario\n"
        "heavy = {'torch', 'numpy', 'scipy', 'pydantic', 'yaml', 'triton', 'cuda'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "from attnbench.cli.validate import validate\n"
        f"assert validate({str(ROOT / 'scenarios/smoke.yaml')!r}) == 0\n"
        "heavy = {'torch', 'numpy', 'scipy', 'triton', 'cuda'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
