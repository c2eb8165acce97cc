"""PyTorch's FlexAttention, compiled, with a block mask for what is hidden."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from attnbench.backends.attention_call import (
    AttentionCall,
    attention_call,
    empty,
    first_reason,
    needs_gpu,
    not_attention,
)
from attnbench.backends.base import Prepared
from attnbench.ops.base import Inputs
from attnbench.scenario.case import AttentionCase, Case

if TYPE_CHECKING:
    import torch

    MaskMod = Callable[[Any, Any, Any, Any], Any]

MAX_MASK = 1 << 33
"""Query-key pairs of a packed batch beyond which its mask would not fit beside the tensors while it is built."""


class Flex:
    """Causal and packed cases through `mask_mod`: bottom-right aligned, one document a sequence."""

    name = "flex"

    def supports(self, case: Case, device: str) -> str | None:
        if not isinstance(case, AttentionCase):
            return not_attention(case)
        return first_reason(
            None if device.startswith("cuda") else "FlexAttention has no backward on the CPU",
            needs_gpu(device),
            empty(case),
            "head dim below 16" if min(case.head_dim, case.dv) < 16 else None,
            _too_large(case),
        )

    def prepare(self, case: Case, inputs: Inputs) -> Prepared:
        assert isinstance(case, AttentionCase)
        call = attention_call(inputs)
        mask = _block_mask(case, call)
        function = _function()
        packed, scale, gqa = case.layout == "varlen", case.scale, case.heads != case.kv_heads
        lse_arguments = _lse_arguments()

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            if packed:
                q, k, v = q[None], k[None], v[None]
            out, aux = function(
                q.transpose(1, 2),
                k.transpose(1, 2),
                v.transpose(1, 2),
                block_mask=mask,
                scale=scale,
                enable_gqa=gqa,
                **lse_arguments,
            )
            lse = getattr(aux, "lse", aux)
            out = out.transpose(1, 2)
            return (out[0], lse[0]) if packed else (out, lse)

        def forward() -> dict[str, torch.Tensor]:
            out, lse = run(call.q, call.k, call.v)
            return {"out": out, "lse": lse}

        return Prepared(forward=forward, kernel_forward=lambda: run(*call.detached))


def _too_large(case: AttentionCase) -> str | None:
    if case.layout == "dense":
        return None
    pairs = sum(case.seqlens_q) * sum(case.seqlens_k)
    return f"packed batch with a mask of {pairs} pairs: at most {MAX_MASK}" if pairs > MAX_MASK else None


@cache
def _function() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    from attnbench.backends.compiler import compiled

    return compiled(flex_attention)


def _lse_arguments() -> dict[str, Any]:
    """How this PyTorch is asked for lse: by `return_aux`, or by the older `return_lse`."""
    from torch.nn.attention import flex_attention as module

    request = getattr(module, "AuxRequest", None)
    return {"return_lse": True} if request is None else {"return_aux": request(lse=True)}


def _block_mask(case: AttentionCase, call: AttentionCall) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    if case.layout == "varlen":
        mask_mod = _packed_mask(case, call)
    elif case.causal:
        mask_mod = _causal_mask(case.seqlen_k - case.seqlen_q)
    else:
        return None
    rows_q, rows_k = call.q.shape[-3], call.k.shape[-3]
    return create_block_mask(mask_mod, None, None, rows_q, rows_k, device=call.q.device, _compile=True)


def _causal_mask(shift: int) -> MaskMod:
    def visible(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return key <= query + shift

    return visible


def _packed_mask(case: AttentionCase, call: AttentionCall) -> MaskMod:
    """A query sees the keys of its own sequence; causal compares places counted from the sequence's last key."""
    import torch

    device = call.q.device

    def of_rows(values: list[int], lengths: tuple[int, ...], rows: int, rest: int) -> torch.Tensor:
        filled = torch.repeat_interleave(torch.tensor(values), torch.tensor(lengths))
        return torch.cat([filled, filled.new_full((rows - filled.numel(),), rest)]).to(device, torch.int32)

    count = len(case.seqlens_q)
    starts_q, starts_k = call.extras["cu_seqlens_q"].tolist(), call.extras["cu_seqlens_k"].tolist()
    shifts = [starts_k[i] - starts_q[i] + case.seqlens_k[i] - case.seqlens_q[i] for i in range(count)]
    rows_q, rows_k = call.q.shape[0], call.k.shape[0]
    sequence_q = of_rows(list(range(count)), case.seqlens_q, rows_q, -1)
    sequence_k = of_rows(list(range(count)), case.seqlens_k, rows_k, -2)
    shift = of_rows(shifts, case.seqlens_q, rows_q, 0)
    causal = case.causal

    def visible(batch: Any, head: Any, query: Any, key: Any) -> Any:
        same = sequence_q[query] == sequence_k[key]
        return same & (key <= query + shift[query]) if causal else same

    return visible


FLEX = Flex()
