"""Named model shapes: what a name stands for, what goes before it, and what a wrong one says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest

from attnbench.cli.list_ import list_
from attnbench.measure.jobs import select
from attnbench.scenario import ScenarioError, loads
from attnbench.scenario.case import AttentionCase, AttnresCase, Case
from attnbench.scenario.model import json_schema
from attnbench.scenario.models import MODELS, ModelName


def cases(entries: str, rest: str = "") -> list[Case]:
    return [planned.case for planned in loads(f"name: t\nbackends: [eager]\n{rest}\ncases:\n{entries}").plan()]


def test_every_name_is_a_shape_with_a_source() -> None:
    assert get_args(ModelName) == tuple(MODELS)
    for name, shape in MODELS.items():
        assert "arXiv:" in shape.source or "config.json" in shape.source, name
        assert shape.heads % shape.kv_heads == 0
        assert (shape.blocks is None) == (shape.queries is None)
        (attention,) = cases(f"- {{model: {name}, seqlen: 128}}")
        assert isinstance(attention, AttentionCase)
        assert attention.causal
        (phase2,) = cases(f"- {{model: {name}, op: attnres_phase2, rows: 16}}")
        assert isinstance(phase2, AttnresCase)
        assert phase2.hidden == shape.hidden


def test_a_model_is_its_numbers_and_no_part_of_the_identity() -> None:
    named = cases("- {model: llama3-8b, seqlen: 4096, batch: 2}")
    assert named == cases("- {heads: 32, kv_heads: 8, head_dim: 128, causal: true, seqlen: 4096, batch: 2}")
    assert "model" not in named[0].semantic()
    (latent,) = cases("- {model: deepseek-v3, seqlen: 4096}")
    assert isinstance(latent, AttentionCase)
    assert (latent.heads, latent.kv_heads, latent.head_dim, latent.dv) == (128, 128, 192, 128)
    (phase1,) = cases("- {model: kimi-k3, op: attnres_phase1, rows: 8192}")
    assert phase1 == AttnresCase(1, "bf16", rows=8192, hidden=7168, blocks=8, queries=24)


def test_what_stands_beside_a_model_goes_before_it_and_it_before_the_defaults() -> None:
    (shard,) = cases("- {model: llama3-70b, heads: 8, kv_heads: 1, causal: false, seqlen: 64}")
    assert isinstance(shard, AttentionCase)
    assert (shard.heads, shard.kv_heads, shard.head_dim, shard.causal) == (8, 1, 128, False)
    (own,) = cases("- {model: qwen3-8b, seqlen: 64}", "defaults: {heads: 2, head_dim: 8, causal: false}")
    assert isinstance(own, AttentionCase)
    assert (own.heads, own.head_dim, own.causal) == (32, 128, True)
    defaults = "defaults: {model: qwen3-8b, heads: 64, head_dim: 8}"
    first, second = cases("- {seqlen: 64}\n- {seqlen: 64, model: null}", defaults)
    assert isinstance(first, AttentionCase)
    assert isinstance(second, AttentionCase)
    assert (first.heads, first.kv_heads, first.head_dim, first.causal) == (64, 8, 8, True)
    assert (second.heads, second.kv_heads, second.head_dim, second.causal) == (64, 64, 8, False)


def test_models_are_an_axis_and_a_tag() -> None:
    plan = loads(
        "name: t\nbackends: [eager]\ncases:\n"
        "  - matrix: {model: [llama3-8b, qwen3-32b, gemma2-9b], seqlen: [64, 128]}\n"
        "    exclude: [{model: gemma2-9b, seqlen: 64}]\n"
    ).plan()
    assert [planned.tags for planned in plan] == [("llama3-8b",)] * 2 + [("qwen3-32b",)] * 2 + [("gemma2-9b",)]
    assert [planned.case for planned in select(plan, ["gemma2*"])] == [plan[-1].case]


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (
            "- {model: lama3-8b, seqlen: 64}",
            r"f.yaml:4: cases\[0\].model: .* Did you mean 'llama3-8b'",
        ),
        (
            "- matrix: {model: [llama3-8b, kimi-k9], seqlen: [64]}",
            r"matrix.model\[1\].*Did you mean 'kimi-k3'",
        ),
        ("- {model: llama3-8b, op: attnres_phase1, rows: 16}", r"cases\[0\].*missing: `blocks`, `queries`"),
        ("- {model: llama3-8b, heads: 12, seqlen: 64}", r"kv_heads 8 does not divide heads 12"),
    ],
)
def test_a_wrong_name_gets_the_nearest_one(entry: str, words: str) -> None:
    with pytest.raises(ScenarioError, match=words):
        loads(f"name: t\nbackends: [eager]\ncases:\n{entry}", "f.yaml")


def test_the_schema_and_the_list_have_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    schema = json.dumps(json_schema())
    assert all(f'"{name}"' in schema for name in MODELS)
    assert list_(what="models", results=Path("results"), format="json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert [row["model"] for row in listed] == list(MODELS)
    assert next(row for row in listed if row["model"] == "deepseek-v3")["head dim"] == "192/128"


def test_the_documentation_has_the_same_figures() -> None:
    text = (Path(__file__).parents[2] / "docs" / "scenarios.md").read_text(encoding="utf-8")
    for name, shape in MODELS.items():
        heads = f"{shape.heads}/{shape.kv_heads}" if shape.heads != shape.kv_heads else str(shape.heads)
        dims = f"{shape.head_dim}/{shape.value_head_dim}" if shape.value_head_dim else str(shape.head_dim)
        assert f"| `{name}` | {heads} | {dims} | {shape.hidden} |" in text
        assert f"| {shape.source} |" in text
