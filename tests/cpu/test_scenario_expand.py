"""Defaults, matrix, exclude, tokens, lengths: what a scenario comes to, and the identity of its cases."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnbench.scenario import CheckPolicy, MeasurePolicy, ScenarioError, loads
from attnbench.scenario.case import AttentionCase, AttnresCase, case_from_semantic
from attnbench.scenario.lengths import draw


def plan(cases: str, backends: str = "[eager, triton]", rest: str = ""):
    return loads(f"name: t\nbackends: {backends}\n{rest}\ncases:\n{cases}").plan()


def only(cases: str, **kwargs):
    (planned,) = plan(cases, **kwargs)
    return planned


def test_least_scenario():
    planned = only("- {heads: 4, head_dim: 64, seqlen: 128}")
    assert planned.case == AttentionCase(
        dtype="bf16", heads=4, kv_heads=4, head_dim=64, causal=False, batch=1, seqlen_q=128, seqlen_k=128
    )
    assert planned.backends == ("eager", "triton")
    assert planned.passes == ("forward", "backward")
    assert planned.check == CheckPolicy()


def test_policy_defaults_are_those_of_the_dataclasses():
    scenario = loads("name: t\nbackends: [eager]\ncases: [{heads: 4, head_dim: 64, seqlen: 128}]")
    assert scenario.measure == MeasurePolicy()
    assert scenario.check == CheckPolicy()
    assert scenario.baseline is None


def test_policies():
    scenario = loads(
        """name: t
description: two lines
  of words
backends: [eager, triton]
baseline: triton
measure: {samples: 50, min_seconds: 1, max_seconds: 3, half_width_percent: 1, call: false, warm: false, duty: burst,
          timeout_seconds: 10, passes: [backward, backward, forward_backward], ceilings: false, split: true}
check: {after: false, repeats: 5}
cases:
  - {heads: 4, head_dim: 64, seqlen: 128}
  - {heads: 4, head_dim: 64, seqlen: 64, check: {rtol: 1e-3, atol: 0}, passes: [forward]}
""",
        "f.yaml",
    )
    assert scenario.measure == MeasurePolicy(
        50, 1.0, 3.0, 1.0, False, False, "burst", 10.0, ("backward", "forward_backward"), ceilings=False, split=True
    )
    first, second = scenario.plan()
    assert first.check == CheckPolicy(after=False, repeats=5)
    assert first.passes == ("backward", "forward_backward")
    assert second.check == CheckPolicy(after=False, repeats=5, rtol=1e-3, atol=0.0)
    assert second.passes == ("forward",)
    assert (scenario.baseline, scenario.description, scenario.file) == ("triton", "two lines of words", "f.yaml")


def test_tokens_fix_the_batch():
    cases = plan("- {heads: 4, head_dim: 64, tokens: 16384, matrix: {seqlen: [512, 16384]}}")
    assert [(p.case.batch, p.case.seqlen_q) for p in cases] == [(32, 512), (1, 16384)]


def test_tokens_count_queries():
    assert only("- {heads: 4, head_dim: 64, tokens: 64, seqlen_q: 16, seqlen_k: 100}").case.batch == 4


@pytest.mark.parametrize(
    ("defaults", "own", "batch", "layout"),
    [
        ("tokens: 1024", "seqlen: 128, batch: 3", 3, "dense"),
        ("batch: 7", "seqlen: 128, tokens: 256", 2, "dense"),
        ("batch: 7", "seqlen: 128, batch: null", 1, "dense"),
        ("seqlen: 64", "seqlen_q: 2, seqlen_k: 128", 1, "dense"),
        ("tokens: 1000, seqlen: 10", "lens: [3, 0, 4]", 0, "varlen"),
        ("lens: [1, 2]", "seqlen: 128", 1, "dense"),
        ("lens_q: [1, 2], lens_k: [3, 4]", "lens: [5]", 0, "varlen"),
    ],
)
def test_own_shape_goes_before_the_defaults(defaults, own, batch, layout):
    case = only(f"- {{{own}}}", rest=f"defaults: {{heads: 4, head_dim: 64, {defaults}}}").case
    assert (case.batch, case.layout) == (batch, layout)


def test_null_takes_a_default_back():
    rest = "defaults: {heads: 8, kv_heads: 2, head_dim: 64, seqlen: 8}"
    assert only("- {kv_heads: null}", rest=rest).case.kv_heads == 8
    assert only("- {}", rest=rest).case.kv_heads == 2


def test_defaults_of_other_operations_are_passed_over():
    rest = "defaults: {heads: 8, head_dim: 64, seqlen: 8, rows: 5, hidden: 96, blocks: 3, queries: 2}"
    cases = [p.case for p in plan("- {}\n- {op: attnres_phase1}\n- {op: attnres_phase2, lse_grad: false}", rest=rest)]
    assert cases[1] == AttnresCase(phase=1, dtype="bf16", rows=5, hidden=96, blocks=3, queries=2)
    assert cases[2] == AttnresCase(phase=2, dtype="bf16", rows=5, hidden=96, lse_grad=False)


def test_varlen():
    case = only("- {heads: 4, head_dim: 64, lens_q: [0, 3], lens_k: [5, 0], causal: true}").case
    assert case.lengths == ((0, 5), (3, 0))
    assert case.seqlens_q == (0, 3)


@pytest.mark.parametrize(
    "fields",
    [
        "lens_q: [0, 0, 1023], lens_k: [0, 1, 2045], heads: 8, head_dim: 128",
        "lens_q: [0, 0, 0, 1], lens_k: [3, 0, 5, 7], heads: 21, kv_heads: 7, head_dim: 120",
        "lens_q: [524544, 256], lens_k: [256, 256], heads: 32, head_dim: 128",
        "lengths: {distribution: uniform, min: 1, max: 1, sequences: 8301}, heads: 16, head_dim: 128",
        "lens: [0], heads: 1, head_dim: 8",
        "seqlen_q: 239, seqlen_k: 1, heads: 4, head_dim: 64",
        "seqlen: 256, heads: 4, head_dim: 192, value_head_dim: 128",
        "op: attnres_phase1, rows: 0, hidden: 64, blocks: 1, queries: 1",
        "op: attnres_phase2, rows: 1000, hidden: 7168, eps: 0, logit_scale: 30",
    ],
)
def test_odd_but_legal_cases_are_planned(fields):
    assert only(f"- {{{fields}, dtype: fp16}}").case.dtype == "fp16"


def test_first_axis_varies_slowest_in_the_files_order():
    cases = plan("- {head_dim: 64, seqlen: 8, matrix: {seed: [1, 0], heads: [4, 2], causal: [true, false]}}")
    assert [(p.case.seed, p.case.heads, p.case.causal) for p in cases] == [
        (s, h, c) for s in (1, 0) for h in (4, 2) for c in (True, False)
    ]


def test_exclude():
    cases = plan(
        """
- heads: 4
  matrix: {head_dim: [64, 128], seqlen: [8, 16, 32], causal: [false, true]}
  exclude:
    - {head_dim: 128, seqlen: [16, 32]}
    - {seqlen: 8, causal: true}
"""
    )
    got = {(p.case.head_dim, p.case.seqlen_q, p.case.causal) for p in cases}
    assert got == {(64, 8, False), (128, 8, False)} | {(64, s, c) for s in (16, 32) for c in (False, True)}


def test_exclude_knows_the_defaults():
    cases = plan("- {heads: 4, seqlen: 8, matrix: {head_dim: [64, 128]}, exclude: [{head_dim: 64, dtype: bf16}]}")
    assert [p.case.head_dim for p in cases] == [128]


def test_the_same_case_is_planned_once():
    (planned,) = plan(
        """
- {name: first, tags: [a], heads: 4, head_dim: 64, seqlen: 128, backends: [triton]}
- {name: second, tags: [b, a], heads: 4, head_dim: 64, value_head_dim: 64, kv_heads: 4, softmax_scale: 0.125,
   seqlen_q: 128, seqlen_k: 128, dtype: bf16, batch: 1, backends: [eager, triton]}
- {tags: [c], heads: 4, head_dim: 64, seqlen: 128, backends: [triton]}
"""
    )
    assert planned.backends == ("triton", "eager")
    assert planned.tags == ("a", "b", "c")
    assert planned.name == "first"


def test_other_passes_of_the_same_case_are_planned_apart():
    rows = plan(
        """
- {heads: 4, head_dim: 64, seqlen: 128, passes: [forward]}
- {heads: 4, head_dim: 64, seqlen: 128, passes: [forward, backward], backends: [triton, compile]}
"""
    )
    assert [(p.backends, p.passes) for p in rows] == [
        (("eager", "triton"), ("forward",)),
        (("triton",), ("backward",)),
        (("compile",), ("forward", "backward")),
    ]


def test_backends_of_other_operations_are_left_out():
    rows = plan(
        "- {heads: 4, head_dim: 64, seqlen: 8}\n- {op: attnres_phase2, rows: 4, hidden: 8}",
        backends="[sm90, eager, flash_attn_res, 'my.mod:obj']",
    )
    assert [p.backends for p in rows] == [("sm90", "eager", "my.mod:obj"), ("eager", "flash_attn_res", "my.mod:obj")]


def test_identity_survives_renaming_and_reordering():
    one = loads(
        """name: one
backends: [eager]
defaults: {heads: 4, head_dim: 64}
cases:
  - {name: a, matrix: {seqlen: [8, 16], causal: [false, true]}}
  - {name: b, lens: [1, 2]}
"""
    )
    two = loads(
        """cases:
  - {causal: false, lens_k: [1, 2], lens_q: [1, 2], head_dim: 64, heads: 4, tags: [x]}
  - {heads: 4, matrix: {causal: [true, false], batch: [1], seqlen: [16, 8]}, head_dim: 64}
backends: [triton]
name: two
"""
    )
    assert {p.case.case_id for p in one.plan()} == {p.case.case_id for p in two.plan()}


@pytest.mark.parametrize(
    ("cases", "case_id"),
    [
        ("- {heads: 16, head_dim: 128, tokens: 16384, seqlen: 4096, causal: true}", "eeb6a0d823437bbd"),
        ("- {op: attnres_phase2, rows: 6, hidden: 16, dtype: fp32}", "a0186caa653278fe"),
    ],
)
def test_identity_is_pinned(cases, case_id):
    """A change here breaks the history of every stored run."""
    assert only(cases).case.case_id == case_id


def test_twenty_thousand_cases_are_allowed():
    seeds = "[" + ", ".join(str(i) for i in range(20_000)) + "]"
    assert len(plan(f"- {{op: attnres_phase2, rows: 1, hidden: 8, matrix: {{seed: {seeds}}}}}")) == 20_000
    with pytest.raises(ScenarioError, match="one too many"):
        plan(f"- {{op: attnres_phase2, rows: 1, hidden: 8, matrix: {{seed: {seeds}}}}}\n- {{op: attnres_phase2}}")


axis = st.fixed_dictionaries(
    {
        "head_dim": st.lists(st.sampled_from([8, 64, 256]), min_size=1, max_size=3),
        "kv_heads": st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=2),
        "causal": st.lists(st.booleans(), min_size=1, max_size=2),
        "dtype": st.lists(st.sampled_from(["fp32", "fp16", "bf16"]), min_size=1, max_size=2),
        "softmax_scale": st.lists(st.floats(1e-3, 10), min_size=1, max_size=2),
    },
)
shape = st.one_of(
    st.builds(lambda s, b: {"seqlen": s, "batch": b}, st.integers(1, 9999), st.integers(1, 9)),
    st.builds(lambda q, k: {"seqlen_q": q, "seqlen_k": k}, st.integers(1, 99), st.integers(1, 99)),
    st.builds(lambda lens: {"lens": lens}, st.lists(st.integers(0, 99), min_size=1, max_size=5)),
)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(axis, shape, st.randoms(use_true_random=False))
def test_cases_survive_their_record(axes, fixed, rng: random.Random):
    items = list({"heads": 4, "matrix": axes, **fixed}.items())
    rng.shuffle(items)
    scenario = loads(json.dumps({"name": "t", "backends": ["eager"], "cases": [dict(items)]}))
    seen = set()
    for planned in scenario.plan():
        again = case_from_semantic(json.loads(json.dumps(planned.case.semantic())))
        assert again == planned.case
        assert again.case_id == planned.case.case_id
        seen.add(planned.case.case_id)
    assert len(seen) == len(scenario.plan())


def test_drawn_lengths_are_pinned():
    """The same on every machine and Python version: a case's identity depends on it."""
    base = {"shortest": 64, "longest": 4096, "seed": 7, "most": 100}
    lognormal = draw("lognormal", mean=500.0, sigma=1.0, tokens=4000, sequences=None, **base)
    uniform = draw("uniform", mean=None, sigma=None, tokens=None, sequences=5, **base)
    assert sum(lognormal) == 4000
    assert lognormal == LOGNORMAL
    assert uniform == UNIFORM


LOGNORMAL = (192, 108, 447, 71, 332, 215, 64, 309, 64, 257, 69, 80, 251, 778, 95, 142, 420, 106)
UNIFORM = (1370, 672, 2689, 356, 2225)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.sampled_from(["lognormal", "uniform"]),
    st.integers(1, 50),
    st.integers(0, 200),
    st.integers(1, 5000),
    st.integers(0, 2**40),
    st.booleans(),
)
def test_drawn_lengths_keep_their_bounds(kind, shortest, more, tokens, seed, by_tokens):
    longest = shortest + more
    lens = draw(
        kind,
        shortest=shortest,
        longest=longest,
        mean=60.0 if kind == "lognormal" else None,
        sigma=1.5 if kind == "lognormal" else None,
        tokens=tokens if by_tokens else None,
        sequences=None if by_tokens else tokens,
        seed=seed,
        most=10_000,
    )
    inner = lens[:-1] if by_tokens else lens
    assert all(shortest <= length <= longest for length in inner)
    assert sum(lens) == tokens if by_tokens else len(lens) == tokens


def test_the_mean_is_the_mean():
    lens = draw(
        "lognormal",
        shortest=0,
        longest=1 << 20,
        mean=1000.0,
        sigma=0.5,
        tokens=None,
        sequences=20_000,
        seed=0,
        most=20_000,
    )
    assert sum(lens) / len(lens) == pytest.approx(1000, rel=0.02)
