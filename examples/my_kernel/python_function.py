"""A kernel that is a Python function: PyTorch's own attention under a bottom-right causal mask."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from attnbench.backends.custom import from_function
from attnbench.scenario.case import AttentionCase, Case


def masked_sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, softmax_scale: float | None
) -> torch.Tensor:
    """q `[B, Sq, H, D]`, k and v `[B, Sk, Hkv, D]` to out `[B, Sq, H, D]`; there is no lse to return."""
    mask = None
    if causal:
        rows, keys = q.shape[1], k.shape[1]
        mask = torch.ones(rows, keys, dtype=torch.bool, device=q.device).tril(keys - rows)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        scale=softmax_scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)


def unsupported(case: Case, device: str) -> str | None:
    """Why a case does not fit. Packed cases need no word here: the function takes no cu_seqlens."""
    assert isinstance(case, AttentionCase)
    if case.causal and case.seqlen_q > case.seqlen_k:
        return "a query that sees no key would be NaN"
    return None


backend = from_function(masked_sdpa, name="masked_sdpa", supports=unsupported, lse_grad=False)
