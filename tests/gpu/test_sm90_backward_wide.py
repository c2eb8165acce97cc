"""The wgmma backward of wide heads on the GPU: gradients through the public function, isolation, determinism."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from attention_fp64 import Problem, assert_close, compute, dense_problem, packed_problem, reference

import kernels_native

pytestmark = pytest.mark.sm90
BF16, FP16 = torch.bfloat16, torch.float16
# Problems to be made where there is a GPU.
dense = partial(partial, dense_problem, device="cuda", dtype=BF16, heads=4, kv_heads=2)
packed = partial(partial, packed_problem, device="cuda", dtype=BF16, heads=4, kv_heads=2)

CASES = {
    "136 causal": dense(2, 130, 130, head_dim=136, causal=True),
    "192 full": dense(2, 300, 300, head_dim=192),
    "192 causal, fp16": dense(2, 513, 513, head_dim=192, causal=True, dtype=FP16),
    "192/128 full": dense(2, 300, 700, head_dim=192, value_head_dim=128),
    "192/128 causal": dense(1, 1024, 1000, head_dim=192, value_head_dim=128, causal=True),
    "248/8 causal": dense(1, 130, 130, head_dim=248, value_head_dim=8, causal=True),
    "64/200 causal": dense(1, 130, 130, head_dim=64, value_head_dim=200, causal=True),
    "256 full": dense(2, 300, 300, head_dim=256),
    "256 causal": dense(1, 1023, 1024, heads=8, kv_heads=1, head_dim=256, causal=True),
    "256 causal, fp16": dense(2, 200, 333, head_dim=256, causal=True, dtype=FP16),
    "one query": dense(1, 1, 900, head_dim=256, causal=True),
    "rows without keys": dense(1, 239, 3, head_dim=256, causal=True),
    "negative scale": dense(1, 200, 200, head_dim=192, causal=True, scale=-0.1),
    "packed 192": packed([0, 150, 0, 65, 63], [7, 150, 3, 0, 200], head_dim=192, causal=True, padding=70),
    "packed 256": packed([0, 0, 1023, 1], [0, 1, 2045, 0], head_dim=256, causal=True, padding=1),
    "packed 256 full": packed([1] * 100, [3] * 100, head_dim=256),
}


@pytest.mark.parametrize("name", CASES)
def test_against_fp64(name: str) -> None:
    problem = CASES[name]()
    assert_close(compute(kernels_native.attention, problem), reference(problem), problem.q.dtype)


@pytest.mark.parametrize("without", ["dout", "dlse"])
def test_one_cotangent(without: str) -> None:
    problem = replace(CASES["256 full"](), **{without: None})
    assert_close(compute(kernels_native.attention, problem), reference(problem), BF16)


@pytest.mark.parametrize(
    "made",
    [
        dense(1, 1024, 1024, heads=8, head_dim=256, causal=True),
        dense(1, 2048, 2048, heads=8, head_dim=192, value_head_dim=128),
        packed([500, 77, 900], [500, 77, 900], head_dim=192, causal=True),
    ],
)
def test_deterministic_bit_for_bit(made: Callable[[], Problem]) -> None:
    problem = made()
    first = compute(kernels_native.attention, problem, deterministic=True)
    for _ in range(50):
        again = compute(kernels_native.attention, problem, deterministic=True)
        assert all(torch.equal(first[name], again[name]) for name in first)


def test_key_gradients_never_depend_on_the_order() -> None:
    problem = dense(1, 1024, 1024, heads=8, head_dim=256, causal=True)()
    first = compute(kernels_native.attention, problem)
    for _ in range(20):
        again = compute(kernels_native.attention, problem)
        assert torch.equal(first["dk"], again["dk"])
        assert torch.equal(first["dv"], again["dv"])


@pytest.mark.parametrize("head_dim", [192, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_nan_of_a_neighbour_stays_there(head_dim: int, causal: bool) -> None:
    problem = packed([65, 63, 200], [65, 63, 200], head_dim=head_dim, causal=causal, padding=70)()
    clean = compute(kernels_native.attention, problem)
    for tensor in (problem.q, problem.k, problem.v, problem.dout):
        tensor[65:128] = torch.nan
    problem.dlse[:, 65:128] = torch.nan
    dirty = compute(kernels_native.attention, problem)
    for name in ("dq", "dk", "dv"):
        assert not dirty[name][328:].any(), name
        for rows in (slice(0, 65), slice(128, 328)):
            torch.testing.assert_close(dirty[name][rows], clean[name][rows], atol=1e-2, rtol=1e-2)


def test_transposed_inputs_and_gradient() -> None:
    problem = dense(2, 300, 300, head_dim=256, causal=True)()
    results = []
    for change in (lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), torch.Tensor.contiguous):
        leaves = [change(x).requires_grad_() for x in (problem.q, problem.k, problem.v)]
        out = kernels_native.attention(*leaves, causal=True, deterministic=True)
        results.append(torch.autograd.grad(out, leaves, change(problem.dout)))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
