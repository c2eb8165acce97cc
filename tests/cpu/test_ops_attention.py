"""Attention: the fp64 reference against autograd, the yardstick, and exact work against a count of the mask."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnbench.ops import attention_reference, attention_work, operation
from attnbench.ops.base import Inputs, timed_inputs
from attnbench.scenario.case import AttentionCase

ATTENTION = operation("attention")


def dense(**fields: object) -> AttentionCase:
    base = {"dtype": "fp32", "heads": 4, "kv_heads": 2, "head_dim": 16, "causal": True, "batch": 2}
    return AttentionCase(**{**base, **fields})  # type: ignore[arg-type]


def packed(seqlens_q: tuple[int, ...], seqlens_k: tuple[int, ...], **fields: object) -> AttentionCase:
    return dense(layout="varlen", batch=0, seqlens_q=seqlens_q, seqlens_k=seqlens_k, **fields)


CASES = [
    dense(seqlen_q=33, seqlen_k=33),
    dense(seqlen_q=33, seqlen_k=33, causal=False, softmax_scale=1.0),
    dense(seqlen_q=7, seqlen_k=40, value_head_dim=24),
    dense(seqlen_q=40, seqlen_k=7, head_dim=40),
    dense(seqlen_q=5, seqlen_k=0),
    dense(seqlen_q=0, seqlen_k=5),
    packed((0, 5, 5, 0, 7, 5), (3, 0, 9, 0, 2, 9)),
    packed((0, 5, 5, 0, 7, 5), (3, 0, 9, 0, 2, 9), causal=False, heads=6, kv_heads=2),
    packed((0, 0), (4, 0)),
]


def mask(seqlen_q: int, seqlen_k: int, causal: bool) -> torch.Tensor:
    """The definition, entry by entry."""
    return torch.tensor(
        [[not causal or j <= i + seqlen_k - seqlen_q for j in range(seqlen_k)] for i in range(seqlen_q)],
        dtype=torch.bool,
    ).reshape(seqlen_q, seqlen_k)


def by_autograd(case: AttentionCase, inputs: Inputs) -> dict[str, torch.Tensor]:
    """fp64, head by head and sequence by sequence, with a mask written from the definition."""
    q, k, v = (inputs.tensors[n].detach().double().requires_grad_() for n in ("q", "k", "v"))
    starts_q = starts_k = 0
    out = torch.zeros(*q.shape[:-1], case.dv, dtype=torch.float64)
    lse = torch.full(inputs.cotangents["lse"].shape, -torch.inf, dtype=torch.float64)
    loss = torch.zeros((), dtype=torch.float64) + 0.0 * (q.sum() + k.sum() + v.sum())
    for n, (length_q, length_k) in enumerate(case.lengths):
        if case.layout == "dense":
            at_q, at_k, at_lse = (n,), (n,), (n,)
        else:
            at_q, at_k = (slice(starts_q, starts_q + length_q),), (slice(starts_k, starts_k + length_k),)
            at_lse = (slice(None), at_q[0])
        starts_q, starts_k = starts_q + length_q, starts_k + length_k
        visible = mask(length_q, length_k, case.causal)
        for h in range(case.heads):
            kv = h // (case.heads // case.kv_heads)
            scores = q[at_q][:, h] @ k[at_k][:, kv].T * case.scale
            for i in range(length_q):
                if not visible[i].any():
                    continue
                row = scores[i][visible[i]]
                value = row.softmax(0) @ v[at_k][:, kv][visible[i]]
                total = row.logsumexp(0)
                out[at_q][i, h] = value.detach()
                lse_view = lse[at_lse] if case.layout == "dense" else lse[:, at_q[0]]
                lse_view[h, i] = total.detach()
                loss = loss + (value * inputs.cotangents["out"][at_q][i, h].double()).sum()
                d_lse = inputs.cotangents["lse"][at_lse]
                loss = loss + total * d_lse[h, i].double()
    grads = torch.autograd.grad(loss, (q, k, v))
    return {"out": out, "lse": lse, **dict(zip(("dq", "dk", "dv"), grads, strict=True))}


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.label)
def test_reference_is_autograd_in_fp64(case: AttentionCase) -> None:
    inputs = ATTENTION.make_inputs(case, "cpu")
    got, want = ATTENTION.reference(case, inputs), by_autograd(case, inputs)
    assert list(got) == ["out", "lse", "dq", "dk", "dv"]
    for name in want:
        assert got[name].dtype == torch.float64
        torch.testing.assert_close(got[name], want[name], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("tile", [1, 50, 900])
def test_reference_does_not_depend_on_its_pieces(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for case in CASES:
        inputs = ATTENTION.make_inputs(case, "cpu")
        whole = ATTENTION.reference(case, inputs)
        with monkeypatch.context() as patch:
            patch.setattr(attention_reference, "TILE_CPU", tile)
            pieces = ATTENTION.reference(case, inputs)
        for name in whole:
            torch.testing.assert_close(pieces[name], whole[name], rtol=1e-11, atol=1e-11)


def test_gradients_follow_the_cotangents_that_are_there() -> None:
    case = dense(seqlen_q=9, seqlen_k=12)
    inputs = ATTENTION.make_inputs(case, "cpu")
    zero = {name: torch.zeros_like(grad) for name, grad in inputs.cotangents.items()}
    for name in ("out", "lse"):
        only = dataclasses.replace(inputs, cotangents={name: inputs.cotangents[name]})
        with_zero = dataclasses.replace(inputs, cotangents={**zero, name: inputs.cotangents[name]})
        got, want = ATTENTION.reference(case, only), ATTENTION.reference(case, with_zero)
        for grad in ("dq", "dk", "dv"):
            torch.testing.assert_close(got[grad], want[grad], rtol=1e-12, atol=1e-12)
    assert list(ATTENTION.reference(case, dataclasses.replace(inputs, cotangents={}))) == ["out", "lse"]


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_yardstick_and_eager_are_as_exact_as_their_dtype(dtype: str) -> None:
    eps = {"fp32": 2.0**-23, "fp16": 2.0**-10, "bf16": 2.0**-7}[dtype]
    for case in CASES:
        case = dataclasses.replace(case, dtype=dtype)
        inputs = ATTENTION.make_inputs(case, "cpu")
        reference, yardstick = ATTENTION.reference(case, inputs), ATTENTION.yardstick(case, inputs)
        eager = ATTENTION.eager(case, inputs)
        for name, want in reference.items():
            assert yardstick[name].dtype == (torch.float32 if name == "lse" else inputs.tensors["q"].dtype)
            close(yardstick[name], want, eps)
        for name in ("out", "lse"):
            close(eager[name].detach(), reference[name], eps)


def close(got: torch.Tensor, want: torch.Tensor, eps: float) -> None:
    largest = float(want[want.isfinite()].abs().max()) if want.isfinite().any() else 1.0
    torch.testing.assert_close(got.double(), want, rtol=8 * eps, atol=8 * eps * max(1.0, largest))


def test_rows_beyond_the_last_sequence_are_zero_and_poison_there_reaches_nobody() -> None:
    from attnbench.ops.attention_inputs import make_inputs

    case = packed((3, 4), (5, 2))
    clean, padded = make_inputs(case, "cpu"), make_inputs(case, "cpu", extra_rows=3)
    with torch.no_grad():
        for name, tensor in padded.tensors.items():
            rows = clean.tensors[name].shape[0]
            tensor[:rows] = clean.tensors[name]
            tensor[rows:] = torch.nan
        padded.cotangents["out"][:7] = clean.cotangents["out"]
        padded.cotangents["lse"][:, :7] = clean.cotangents["lse"]
    want, got = ATTENTION.reference(case, clean), ATTENTION.reference(case, padded)
    for name in ("out", "dq", "dk", "dv"):
        torch.testing.assert_close(got[name][: want[name].shape[0]], want[name])
        assert not got[name][want[name].shape[0] :].any()
    assert got["lse"][:, 7:].isneginf().all()


def test_inputs_are_seeded() -> None:
    case = dense(seqlen_q=5, seqlen_k=6)
    one, two = ATTENTION.make_inputs(case, "cpu"), ATTENTION.make_inputs(case, "cpu")
    other = ATTENTION.make_inputs(dataclasses.replace(case, seed=1), "cpu")
    for name in ("q", "k", "v"):
        assert torch.equal(one.tensors[name], two.tensors[name])
        assert not torch.equal(one.tensors[name], other.tensors[name])
        assert one.tensors[name].is_leaf and one.tensors[name].requires_grad  # noqa: PT018
    lengths = ATTENTION.make_inputs(packed((2, 0, 3), (1, 4, 0)), "cpu").extras
    assert lengths["cu_seqlens_q"].tolist() == [0, 2, 2, 5]
    assert lengths["cu_seqlens_k"].dtype == torch.int32
    assert (lengths["max_seqlen_q"], lengths["max_seqlen_k"]) == (3, 4)


@given(
    lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=4),
    causal=st.booleans(),
    ratio=st.integers(1, 3),
    dims=st.tuples(st.integers(1, 32), st.integers(1, 32)),
    dtype=st.sampled_from(["fp32", "bf16"]),
)
@settings(max_examples=60, deadline=None)
def test_work_counts_the_mask(
    lengths: list[tuple[int, int]], causal: bool, ratio: int, dims: tuple[int, int], dtype: str
) -> None:
    d, dv = dims[0] * 8, dims[1] * 8
    case = packed(
        tuple(q for q, _ in lengths),
        tuple(k for _, k in lengths),
        causal=causal,
        heads=2 * ratio,
        kv_heads=2,
        head_dim=d,
        value_head_dim=dv,
        dtype=dtype,
    )
    live = case.heads * sum(int(mask(q, k, causal).sum()) for q, k in lengths)
    forward, backward = ATTENTION.work(case, "forward"), ATTENTION.work(case, "backward")
    both = ATTENTION.work(case, "forward_backward")
    assert forward.pairs == backward.pairs == both.pairs == live
    assert forward.flops == live * (2 * d + 2 * dv)
    assert backward.flops == live * (2 * d + 2 * dv + 2 * d + 2 * d + 2 * dv)  # S, dP, dQ, dK, dV
    tensors = ATTENTION.make_inputs(case, "cpu")
    size = {name: t.numel() * t.element_size() for name, t in {**tensors.tensors, **tensors.cotangents}.items()}
    assert forward.bytes == sum(size.values())
    assert backward.bytes == 2 * (size["q"] + size["k"] + size["v"] + size["out"]) + size["lse"]
    assert both.flops == forward.flops + backward.flops


def test_work_of_the_field_s_usual_shape() -> None:
    case = AttentionCase("bf16", 16, 16, 128, False, batch=4, seqlen_q=4096, seqlen_k=4096)
    forward, backward = ATTENTION.work(case, "forward"), ATTENTION.work(case, "backward")
    assert forward.flops == 4 * 4 * 16 * 4096 * 4096 * 128
    assert backward.flops == 2.5 * forward.flops
    with pytest.raises(ValueError, match="forward_backward"):
        ATTENTION.work(case, "sideways")


def test_memory_is_between_the_tensors_and_something_sane() -> None:
    case = AttentionCase("bf16", 16, 16, 128, False, batch=4, seqlen_q=4096, seqlen_k=4096)
    memory = ATTENTION.memory(case)
    tensors = 8 * 4 * 4096 * 16 * 128 * 2
    scores = 4 * 16 * 4096 * 4096
    assert tensors < memory["kernel"] < 4 * tensors
    assert 10 * scores < memory["eager"] < 40 * scores
    assert memory["check"] > memory["kernel"]
    assert attention_work.live_pairs(239, 1, True) == 1


def test_operation_names_its_choices() -> None:
    with pytest.raises(ValueError, match=r"atention.*attention, attnres_phase1"):
        operation("atention")


def test_timed_backward_passes_have_no_loss_on_lse() -> None:
    inputs = ATTENTION.make_inputs(dense(seqlen_q=3, seqlen_k=3), "cpu")
    assert list(timed_inputs(ATTENTION, inputs).cotangents) == ["out"]
    assert list(inputs.cotangents) == ["out", "lse"]


def test_the_traced_score_product_is_a_sound_operator() -> None:
    from attnbench.ops.attention_eager import _product

    q, k = (torch.randn(3, rows, 8, dtype=torch.bfloat16, requires_grad=True) for rows in (5, 7))
    torch.library.opcheck(_product, (q, k))
    for wide in (q, k):
        d_scores = torch.randn(3, 5, 7)
        found = torch.autograd.grad(_product(q, k), wide, d_scores)
        wanted = torch.autograd.grad(q.float() @ k.float().mT, wide, d_scores.bfloat16().float())
        torch.testing.assert_close(found, wanted, rtol=2**-7, atol=2**-7)
