"""The error budget passes what is right in its dtype, and nothing that is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnbench.measure import check
from attnbench.measure.check import check_fixed, check_tensors
from attnbench.ops import operation
from attnbench.scenario.case import AttentionCase

ATTENTION = operation("attention")
Tensors = dict[str, torch.Tensor]


def attention(case: AttentionCase) -> tuple[Tensors, Tensors, Tensors]:
    """Reference, yardstick, and what a fused kernel gives: base 2, P in the dtype before it is normalised."""
    inputs = ATTENTION.make_inputs(case, "cpu")
    dtype = inputs.tensors["q"].dtype
    q, k, v = (inputs.tensors[n].detach().float().transpose(1, 2) for n in ("q", "k", "v"))
    ratio, log2e = case.heads // case.kv_heads, math.log2(math.e)
    k, v = k.repeat_interleave(ratio, 1), v.repeat_interleave(ratio, 1)
    d_out, d_lse = inputs.cotangents["out"].float().transpose(1, 2), inputs.cotangents["lse"][..., None]

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x.to(dtype).float()

    scores = q @ k.mT
    if case.causal:
        rows, keys = scores.shape[-2:]
        scores = scores.masked_fill(torch.ones(rows, keys, dtype=torch.bool).triu(keys - rows + 1), -torch.inf)
    top = scores.amax(-1, keepdim=True) * case.scale * log2e
    top = torch.where(top.isinf(), 0.0, top)
    p = torch.exp2(scores * (case.scale * log2e) - top)
    total = p.sum(-1, keepdim=True)
    out = rounded(rounded(p) @ v / torch.where(total == 0, 1.0, total))
    lse = (top + total.log2()) / log2e
    p = torch.exp2(scores * (case.scale * log2e) - torch.where(lse.isinf(), 0.0, lse) * log2e)
    ds = rounded(p * (d_out @ v.mT - ((d_out * out).sum(-1, keepdim=True) - d_lse)))
    heads_first = {
        "out": out,
        "dq": ds @ k * case.scale,
        "dk": (ds.mT @ q * case.scale).unflatten(1, (-1, ratio)).sum(2),
        "dv": (rounded(p).mT @ d_out).unflatten(1, (-1, ratio)).sum(2),
    }
    got = {name: tensor.transpose(1, 2).to(dtype) for name, tensor in heads_first.items()}
    return ATTENTION.reference(case, inputs), ATTENTION.yardstick(case, inputs), {**got, "lse": lse[..., 0]}


def case_of(dtype: str = "bf16", rows: int = 96, keys: int = 96, seed: int = 0, causal: bool = True) -> AttentionCase:
    return AttentionCase(dtype, 4, 2, 64, causal, batch=2, seqlen_q=rows, seqlen_k=keys, seed=seed)


@given(
    dtype=st.sampled_from(["fp32", "fp16", "bf16"]),
    rows=st.integers(1, 70),
    keys=st.integers(1, 70),
    seed=st.integers(0, 99),
    causal=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_a_fused_kernel_passes(dtype: str, rows: int, keys: int, seed: int, causal: bool) -> None:
    checks = check_tensors(*attention(case_of(dtype, rows, keys, seed, causal)))
    assert all(c.passed for c in checks.values()), checks


def _zeros(t: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(t)


def _doubled(t: torch.Tensor) -> torch.Tensor:
    return 2 * t


def _one_element(t: torch.Tensor) -> torch.Tensor:
    t = t.clone()
    t.flatten()[t.numel() // 3] += 0.25 * t[t.isfinite()].abs().max()
    return t


def _one_nan(t: torch.Tensor) -> torch.Tensor:
    t = t.clone()
    t.view(-1)[t.numel() // 2] = torch.nan
    return t


def _last_tile(t: torch.Tensor) -> torch.Tensor:
    t = t.clone()
    t[-1, -16:] = 0.0
    return t


def _negated(t: torch.Tensor) -> torch.Tensor:
    return -t


def _shifted(t: torch.Tensor) -> torch.Tensor:
    return t.roll(1, dims=1)


def _a_little_everywhere(t: torch.Tensor) -> torch.Tensor:
    return t * 1.04


WRONG = [_zeros, _doubled, _one_element, _one_nan, _last_tile, _negated, _shifted, _a_little_everywhere]


@pytest.mark.parametrize("name", ["out", "lse", "dq", "dk", "dv"])
@pytest.mark.parametrize("wrong", WRONG, ids=lambda f: f.__name__.strip("_"))
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_what_is_wrong_fails(dtype: str, wrong: Callable[[torch.Tensor], torch.Tensor], name: str) -> None:
    reference, yardstick, got = attention(case_of(dtype))
    spoilt = {**got, name: wrong(got[name].contiguous())}
    checks = check_tensors(reference, yardstick, spoilt)
    assert [n for n, c in checks.items() if not c.passed] == [name]
    assert checks[name].message


@given(seed=st.integers(0, 1000), at=st.floats(0, 0.999))
@settings(max_examples=30, deadline=None)
def test_one_wrong_element_is_found_where_it_is(seed: int, at: float) -> None:
    reference = {"x": torch.randn(7, 11, 13, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))}
    yardstick = {"x": reference["x"].to(torch.bfloat16)}
    got = {"x": yardstick["x"].clone()}
    flat = int(at * 1001)
    got["x"].view(-1)[flat] += 1.0
    (result,) = check_tensors(reference, yardstick, got).values()
    assert not result.passed
    assert result.worst == [flat // 143, flat // 13 % 11, flat % 13]


def test_masked_rows_want_minus_infinity_and_nothing_else() -> None:
    reference, yardstick, got = attention(case_of(rows=40, keys=8))
    assert reference["lse"].isneginf().any()
    assert all(c.passed for c in check_tensors(reference, yardstick, got).values())
    for value in (torch.inf, torch.nan, -1e30, 0.0):
        lse = torch.where(got["lse"].isneginf(), value, got["lse"])
        result = check_tensors(reference, yardstick, {**got, "lse": lse})["lse"]
        assert not result.passed
        assert "-inf" in result.message or "inf" in result.message or "NaN" in result.message


def test_missing_tensors_and_other_shapes_fail() -> None:
    reference, yardstick, got = attention(case_of())
    short = {**got, "dq": got["dq"][:, :-1]}
    del short["dk"]
    checks = check_tensors(reference, yardstick, short)
    assert checks["dq"].message == "dq has shape [2, 95, 4, 64], want [2, 96, 4, 64]"
    assert checks["dk"].message == "dk is missing"
    assert not checks["dq"].passed
    assert not checks["dk"].passed


def test_a_budget_that_zeros_would_pass_says_nothing() -> None:
    reference = {"x": torch.full((8,), 1e-3, dtype=torch.float64)}
    useless = {"x": torch.zeros(8, dtype=torch.bfloat16)}
    (result,) = check_tensors(reference, useless, {"x": reference["x"].bfloat16()}).values()
    assert not result.passed
    assert "zeros would pass" in result.message


def test_a_reference_or_yardstick_of_nan_passes_nothing() -> None:
    good = torch.ones(4, dtype=torch.float64)
    bad = torch.tensor([1.0, math.nan, 1.0, 1.0], dtype=torch.float64)
    assert not check_tensors({"x": bad}, {"x": bad.float()}, {"x": bad.float()})["x"].passed
    assert not check_tensors({"x": good}, {"x": bad.float()}, {"x": good.float()})["x"].passed


def test_a_gradient_that_cancels_has_room_for_rounding_only() -> None:
    reference = {"dv": torch.randn(64, dtype=torch.float64), "dq": torch.full((64,), 1e-17, dtype=torch.float64)}
    yardstick = {"dv": reference["dv"].half(), "dq": torch.zeros(64, dtype=torch.float16)}
    for size, passes in ((0.0, True), (1e-6, True), (1e-3, False), (math.nan, False)):
        got = {"dv": yardstick["dv"], "dq": torch.full((64,), size, dtype=torch.float16)}
        assert check_tensors(reference, yardstick, got)["dq"].passed is passes


def test_huge_tensors_are_compared_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    reference, yardstick, got = attention(case_of())
    whole = check_tensors(reference, yardstick, got)
    for chunk in (1, 100, 5000):
        monkeypatch.setattr(check, "CHUNK", chunk)
        pieces = check_tensors(
            {"lse": reference["lse"][:1, :2]}, {"lse": yardstick["lse"][:1, :2]}, got | {"lse": got["lse"][:1, :2]}
        )
        assert pieces["lse"].passed
        if chunk > 1:
            again = check_tensors(reference, yardstick, got)
            for name in whole:
                assert again[name].worst == whole[name].worst
                assert again[name].budget_ratio == pytest.approx(whole[name].budget_ratio)


def test_empty_tensors_pass() -> None:
    nothing = torch.zeros(0, 4)
    result = check_tensors({"x": nothing.double()}, {"x": nothing}, {"x": nothing})["x"]
    assert result.passed
    assert result.budget_ratio == 0.0


def test_fixed_tolerances_hold_element_by_element() -> None:
    want = torch.tensor([1.0, -100.0, 0.0, -torch.inf], dtype=torch.float64)
    for error, passes in (([1e-3, 0.1, 1e-4, 0.0], True), ([1e-3, 0.1, 3e-4, 0.0], False), ([3e-3, 0, 0, 0], False)):
        got = want + torch.tensor(error, dtype=torch.float64)
        result = check_fixed({"x": want}, {"x": got}, rtol=1e-3, atol=2e-4)["x"]
        assert result.passed is passes
        assert result.message.startswith("max_rel")
    for value in (torch.nan, torch.inf, 0.0):
        assert not check_fixed({"x": want}, {"x": want.clone().fill_(value)}, rtol=1e-3, atol=2e-4)["x"].passed
    assert not check_fixed({"x": want}, {}, rtol=1.0, atol=1.0)["x"].passed
