"""Plain PyTorch attention residuals through autograd: the baseline that every plot is drawn against."""

from __future__ import annotations

import torch

DEFAULT_EPS = torch.finfo(torch.float32).eps


def phase1(values: torch.Tensor, queries: torch.Tensor, eps: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """values `[N, ..., D]`, queries `[S, D]` to out `[S, ..., D]` and lse `[S, ...]`; everything in fp32, out rounded.

    Logits are <query, value · rsqrt(mean(value²) + eps)>, the softmax runs over the N blocks.
    """
    wide = values.float()
    rstd = torch.rsqrt(wide.square().mean(-1) + (DEFAULT_EPS if eps is None else eps))
    logits = torch.einsum("sd,n...d->sn...", queries.float(), wide) * rstd
    lse = torch.logsumexp(logits, dim=1)
    out = torch.einsum("sn...,n...d->s...d", logits.softmax(1), wide)
    return out.to(values.dtype), lse


def phase2(
    partial_sum: torch.Tensor,
    query: torch.Tensor,
    inter_out: torch.Tensor,
    inter_lse: torch.Tensor,
    eps: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """partial_sum, inter_out `[..., D]`, query `[D]`, inter_lse `[...]` to out `[..., D]` and lse `[...]`; in fp32."""
    x = partial_sum.float()
    rstd = torch.rsqrt(x.square().mean(-1) + (DEFAULT_EPS if eps is None else eps))
    logit = (x * query.float()).sum(-1) * rstd
    lse = torch.logaddexp(inter_lse.float(), logit)
    inter = torch.sigmoid(inter_lse.float() - logit)[..., None]
    out = inter * inter_out.float() + torch.sigmoid(logit - inter_lse.float())[..., None] * x
    return out.to(partial_sum.dtype), lse
