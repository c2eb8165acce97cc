"""Plain PyTorch attention through autograd: the baseline that every plot is drawn against."""

from __future__ import annotations

from typing import Any

import torch


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse as `attnbench.attention`: operands of products in the inputs' dtype, scores, softmax and lse in fp32.

    Dense: q `[B, Sq, H, D]` to out `[B, Sq, H, Dv]` and lse `[B, H, Sq]`. Packed: q `[Tq, H, D]` to `[Tq, H, Dv]` and
    `[H, Tq]`, one sequence after the other.
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return dense(q, k, v, causal, scale)
    return packed(q, k, v, causal, scale, cu_seqlens_q.tolist(), cu_seqlens_k.tolist())


def packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float,
    bounds_q: list[int],
    bounds_k: list[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed attention from Python offsets; rows beyond the last offset give out 0 and lse -inf."""
    outs, lses = [], []
    for i in range(len(bounds_q) - 1):
        rows_q, rows_k = slice(bounds_q[i], bounds_q[i + 1]), slice(bounds_k[i], bounds_k[i + 1])
        if rows_q.start == rows_q.stop:
            continue
        out, lse = dense(q[None, rows_q], k[None, rows_k], v[None, rows_k], causal, scale)
        outs.append(out[0])
        lses.append(lse[0])
    rest = q[bounds_q[-1] :]
    outs.append(rest.new_zeros(*rest.shape[:-1], v.shape[-1]))
    lses.append(rest.new_full((q.shape[-2], rest.shape[0]), -torch.inf, dtype=torch.float32))
    return torch.cat(outs), torch.cat(lses, dim=-1)


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense attention; queries that see no key are cut off first, since softmax over nothing is NaN."""
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    blind = seqlen_q if seqlen_k == 0 else max(0, seqlen_q - seqlen_k) if causal else 0
    if blind:
        none = q[:, :blind]
        out = none.new_zeros(*none.shape[:-1], v.shape[-1])
        lse = none.new_full((q.shape[0], q.shape[2], blind), -torch.inf, dtype=torch.float32)
        if blind == seqlen_q:
            return out, lse
        rest, rest_lse = dense(q[:, blind:], k, v, causal, scale)
        return torch.cat([out, rest], dim=1), torch.cat([lse, rest_lse], dim=-1)
    ratio = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, H, S, D]
    if ratio > 1:
        k, v = k.repeat_interleave(ratio, dim=1), v.repeat_interleave(ratio, dim=1)
    hidden = None
    if causal:
        hidden = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=q.device).triu(seqlen_k - seqlen_q + 1)
    if torch.compiler.is_compiling():
        # Traced by torch 2.11, `_Scores` lost the gradients of q and k; scaling and masking are fused into the softmax.
        scores = _product(q.flatten(0, 1), k.flatten(0, 1)).unflatten(0, q.shape[:2]) * scale
        scores = scores if hidden is None else scores.masked_fill(hidden, -torch.inf)
    else:
        scores = _Scores.apply(q, k, scale, hidden)
    p = scores.softmax(-1)
    # The likeliest key has p = exp(score - lse): one reduction, where logsumexp would pass over the scores five times.
    # No amax here: its gradient looks for elements equal to the maximum, and a fused recomputation may find none.
    likeliest = p.argmax(-1, keepdim=True)
    lse = (scores.gather(-1, likeliest) - p.gather(-1, likeliest).log()).squeeze(-1)
    return (p.to(q.dtype) @ v).transpose(1, 2), lse


@torch.library.custom_op("attnbench::attention_scores", mutates_args=())
def _product(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """q kᵀ in fp32 of `[batch, rows, D]`: `q @ k.mT` would round the scores, and with them lse, to 16 bits.

    An operator of its own, since PyTorch has no derivative for a product whose result is wider than its operands.
    """
    if q.is_cuda and q.dtype != torch.float32:
        return torch.bmm(q, k.mT, out_dtype=torch.float32)
    return q.float() @ k.float().mT


@_product.register_fake
def _(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return q.new_empty(q.shape[0], q.shape[1], k.shape[1], dtype=torch.float32)


def _save_operands(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _product_backward(ctx: Any, d_scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    q, k = ctx.saved_tensors
    d_scores = d_scores.to(q.dtype)
    return d_scores @ k, d_scores.mT @ q


_product.register_autograd(_product_backward, setup_context=_save_operands)


class _Scores(torch.autograd.Function):
    """scale q kᵀ in fp32 from 16-bit operands, `hidden` ones -inf: scaled and masked in place, which saves passes."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,  # [B, H, Sq, D]
        k: torch.Tensor,  # [B, H, Sk, D]
        scale: float,
        hidden: torch.Tensor | None,  # [Sq, Sk]
    ) -> torch.Tensor:
        ctx.save_for_backward(q, k)
        ctx.scale = scale
        if q.is_cuda and q.dtype != torch.float32:
            scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT, out_dtype=torch.float32)
            scores = scores.unflatten(0, q.shape[:2])
        else:
            scores = q.float() @ k.float().mT
        scores.mul_(scale)
        return scores if hidden is None else scores.masked_fill_(hidden, -torch.inf)

    @staticmethod
    def backward(ctx: Any, d_scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        q, k = ctx.saved_tensors
        d_scores = d_scores.to(q.dtype)  # hidden scores have p = 0, and so no gradient
        return d_scores @ k * ctx.scale, d_scores.mT @ q * ctx.scale, None, None
