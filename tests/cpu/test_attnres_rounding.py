"""Rounding of block attention residuals: statistics in fp32, and one rounding at each output, at production width."""

from __future__ import annotations

import pytest
import torch

import kernels_triton
from attnbench.ops.attnres_eager import phase1 as eager_phase1

HIDDEN = 7168
HALF_UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Largest relative error of rounding once to nearest."""


def within_one_rounding(got: torch.Tensor, exact: torch.Tensor) -> bool:
    unit = HALF_UNIT[got.dtype]
    if got.dtype == torch.bfloat16:
        unit *= 2  # some versions of Triton's interpreter truncate to bf16 where a GPU rounds
    # 2 % and the constant are for the fp32 arithmetic before the rounding; the latter where sources cancel.
    return bool(((got.double() - exact).abs() <= 1.02 * unit * exact.abs() + 1e-6).all())


def tensors(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    values = torch.randn(3, 2, HIDDEN, generator=g).to(dtype)
    queries = (torch.randn(2, HIDDEN, generator=g) / HIDDEN**0.5).to(dtype)
    return values, queries, torch.randn(2, HIDDEN, generator=g).to(dtype)


@pytest.mark.parametrize("dtype", list(HALF_UNIT), ids=str)
def test_phase_1_rounds_once_and_keeps_statistics_in_fp32(dtype: torch.dtype) -> None:
    values, queries, _ = tensors(dtype)
    out, lse, logits, rstd = kernels_triton.attnres_phase1_forward(values, queries)
    exact = values.double()
    scale = torch.rsqrt(exact.square().mean(-1) + torch.finfo(torch.float32).eps)
    scores = torch.einsum("bnh,qh->bnq", exact, queries.double()) * scale[..., None]
    assert lse.dtype == logits.dtype == rstd.dtype == torch.float32
    torch.testing.assert_close(rstd.double(), scale.T, rtol=1e-6, atol=0)
    torch.testing.assert_close(lse.double(), scores.logsumexp(0).T, rtol=1e-5, atol=1e-5)
    weighted = torch.einsum("bnq,bnh->qnh", scores.softmax(0), exact)
    assert out.dtype == dtype
    assert within_one_rounding(out, weighted)


@pytest.mark.parametrize("dtype", list(HALF_UNIT), ids=str)
def test_phase_2_rounds_once_and_keeps_lse_in_fp32(dtype: torch.dtype) -> None:
    values, queries, partial_sum = tensors(dtype)
    inter, inter_lse = eager_phase1(values, queries)
    out, lse = kernels_triton.attnres_phase2(partial_sum, queries[0], inter[0], inter_lse[0])
    x = partial_sum.double()
    logit = (x @ queries[0].double()) * torch.rsqrt(x.square().mean(-1) + torch.finfo(torch.float32).eps)
    both = torch.stack([logit, inter_lse[0].double()])
    weights = both.softmax(0)[..., None]
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), both.logsumexp(0), rtol=1e-5, atol=1e-5)
    assert within_one_rounding(out, weights[0] * x + weights[1] * inter[0].double())
