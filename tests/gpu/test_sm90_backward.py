"""The wgmma backward on the GPU: gradients through the public function, isolation, determinism, layouts, options."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import kernels_native
from attnbench.ops.attention_inputs import make_inputs
from attnbench.ops.attention_reference import reference, yardstick
from attnbench.scenario.case import AttentionCase
from kernels_native import sm90_backward

pytestmark = pytest.mark.sm90
GRADIENTS = ("dq", "dk", "dv")


def case(**changes: Any) -> AttentionCase:
    fields: dict[str, Any] = {"dtype": "bf16", "heads": 4, "kv_heads": 2, "head_dim": 128, "causal": True}
    if "seqlens_q" in changes:
        fields["layout"] = "varlen"
        changes.setdefault("seqlens_k", changes["seqlens_q"])
    else:
        fields |= {"batch": 2, "seqlen_q": 300, "seqlen_k": 300}
    return AttentionCase(**{**fields, **changes})


def ours(inputs: Any, **options: Any) -> dict[str, torch.Tensor]:
    t = inputs.tensors
    out, lse = kernels_native.attention(t["q"], t["k"], t["v"], return_lse=True, **inputs.extras, **options)
    live = torch.isfinite(lse)
    cotangents = inputs.cotangents["out"], inputs.cotangents["lse"].masked_fill(~live, 0)
    grads = torch.autograd.grad((out, lse), (t["q"], t["k"], t["v"]), cotangents)
    return dict(zip(("out", "lse", *GRADIENTS), (out, lse, *grads), strict=True))


CASES = [
    case(),
    case(causal=False),
    case(dtype="fp16"),
    case(seqlen_q=1000, seqlen_k=777, kv_heads=4),
    case(head_dim=64, kv_heads=4, seqlen_k=513),
    case(head_dim=64, seqlen_q=239, seqlen_k=1),
    case(head_dim=64, causal=False, seqlen_q=1),
    case(head_dim=96, kv_heads=1),
    case(head_dim=64, value_head_dim=128),
    case(seqlens_q=(0, 150, 0, 65, 63), seqlens_k=(7, 150, 3, 0, 200)),
    case(seqlens_q=(1,) * 200, head_dim=64),
    case(softmax_scale=-0.1),
]


@pytest.mark.parametrize("one", CASES, ids=lambda one: f"{one.label} {one.softmax_scale or ''}".strip())
def test_against_fp64(one: AttentionCase) -> None:
    inputs = make_inputs(one, "cuda")
    truth, unit, got = reference(inputs), yardstick(inputs), ours(inputs)
    for name, value in got.items():
        exact = truth[name]
        assert torch.equal(torch.isfinite(value), torch.isfinite(exact)), name
        finite = torch.isfinite(exact)
        error = (value.double() - exact)[finite].abs().max() if finite.any() else 0
        budget = (unit[name].double() - exact)[finite].abs().max() if finite.any() else 0
        assert error <= 2 * budget + 1e-2, name


@pytest.mark.parametrize(
    "one",
    [
        case(head_dim=64, seqlen_q=1024, seqlen_k=1024, heads=8),
        case(seqlen_q=2048, seqlen_k=2048, heads=16, causal=False),
        case(seqlens_q=(500, 77, 900)),
    ],
)
def test_deterministic_bit_for_bit(one: AttentionCase) -> None:
    inputs = make_inputs(one, "cuda")
    first = ours(inputs, deterministic=True)
    for _ in range(100):
        again = ours(inputs, deterministic=True)
        assert all(torch.equal(first[name], again[name]) for name in first)


def test_key_gradients_never_depend_on_the_order() -> None:
    inputs = make_inputs(case(seqlen_q=1024, seqlen_k=1024, heads=8, kv_heads=2), "cuda")
    first = ours(inputs)
    for _ in range(20):
        again = ours(inputs)
        assert torch.equal(first["dk"], again["dk"])
        assert torch.equal(first["dv"], again["dv"])


@pytest.mark.parametrize("head_dim", sm90_backward.HEAD_DIMS)
@pytest.mark.parametrize("causal", [False, True])
def test_nan_beyond_and_beside_stays_there(head_dim: int, causal: bool) -> None:
    inputs = make_inputs(case(seqlens_q=(65, 63, 200), head_dim=head_dim, causal=causal), "cuda", extra_rows=70)
    clean = ours(inputs)
    with torch.no_grad():
        for tensor in (*inputs.tensors.values(), inputs.cotangents["out"]):
            tensor[65:128] = torch.nan
            tensor[328:] = torch.nan
        inputs.cotangents["lse"][:, 65:128] = torch.nan
        inputs.cotangents["lse"][:, 328:] = torch.nan
    dirty = ours(inputs)
    for name in GRADIENTS:
        assert not dirty[name][328:].any(), name
        for rows in (slice(0, 65), slice(128, 328)):
            torch.testing.assert_close(dirty[name][rows], clean[name][rows], atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("layout", ["transposed", "sliced", "expanded", "misaligned"])
def test_strides_of_inputs_and_gradient(layout: str) -> None:
    def laid_out(x: torch.Tensor) -> torch.Tensor:
        if layout == "transposed":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if layout == "sliced":
            return torch.cat((x, x), -1)[..., x.shape[-1] :]
        if layout == "misaligned":
            return torch.nn.functional.pad(x, (1, 0))[..., 1:]
        return x[:, :1].expand_as(x)

    inputs = make_inputs(case(), "cuda")
    q, k, v, dout = (x.detach() for x in (*inputs.tensors.values(), inputs.cotangents["out"]))
    results = []
    for change in (laid_out, lambda x: laid_out(x).contiguous()):
        leaves = [change(x).requires_grad_() for x in (q, k, v)]
        out = kernels_native.attention(*leaves, causal=True, deterministic=True)
        results.append(torch.autograd.grad(out, leaves, change(dout)))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_partial_gradients_and_lse_alone() -> None:
    inputs = make_inputs(case(), "cuda")
    q, k, v = inputs.tensors.values()
    out = kernels_native.attention(q, k.detach(), v, causal=True)
    dq, dv = torch.autograd.grad(out, (q, v), inputs.cotangents["out"])
    full = kernels_native.attention(q, k, v, causal=True)
    want = torch.autograd.grad(full, (q, k, v), inputs.cotangents["out"])
    torch.testing.assert_close(dq, want[0], atol=1e-2, rtol=1e-2)
    assert torch.equal(dv, want[2])
    _, lse = kernels_native.attention(q, k, v, causal=True, return_lse=True)
    grads = torch.autograd.grad(lse, (q, k, v), torch.ones_like(lse))
    assert grads[0].any()
    assert not grads[2].any()


def test_options_agree() -> None:
    one = case(seqlen_q=700, seqlen_k=700, causal=False)
    inputs = make_inputs(one, "cuda")
    q, k, v = (x.detach() for x in inputs.tensors.values())
    dout, scale = inputs.cotangents["out"], 128**-0.5
    out, lse = kernels_native.attention_forward(q, k, v, softmax_scale=scale)
    base = sm90_backward.choose(128, 128, False, False, "bf16")
    results = [
        sm90_backward.backward(dout, None, q, k, v, out, lse, None, None, False, scale, False, config=config)
        for config in (base, replace(base, block_m=80, dq_swap=True))
    ]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=1e-2, rtol=1e-2)
