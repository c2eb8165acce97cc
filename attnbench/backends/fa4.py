"""FlashAttention-4 (the package flash-attn-4), where it is installed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from attnbench.backends.attention_call import (
    attention_call,
    blind_rows,
    empty,
    first_reason,
    half_only,
    needs_gpu,
    not_attention,
)
from attnbench.backends.base import Prepared
from attnbench.ops.base import Inputs
from attnbench.scenario.case import AttentionCase, Case

if TYPE_CHECKING:
    import torch


class FlashAttention4:
    """`flash_attn.cute`: bottom-right causal and packed input as ours."""

    name = "fa4"

    def supports(self, case: Case, device: str) -> str | None:
        if not isinstance(case, AttentionCase):
            return not_attention(case)
        return first_reason(
            None if _installed() else "not installed: pip install --pre flash-attn-4",
            needs_gpu(device),
            half_only(case),
            empty(case),
        )

    def prepare(self, case: Case, inputs: Inputs) -> Prepared:
        from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

        assert isinstance(case, AttentionCase)
        call = attention_call(inputs)
        packed = case.layout == "varlen"
        function = flash_attn_varlen_func if packed else flash_attn_func
        arguments: dict[str, Any] = {"softmax_scale": case.scale, "causal": case.causal, "return_lse": True}
        if packed:
            arguments |= {k: call.extras[k] for k in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")}
        arguments = _known(function, arguments)
        blind = blind_rows(case)

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
            result = function(q, k, v, **arguments)
            return (result[0], result[1]) if isinstance(result, tuple) else (result, None)

        def forward() -> dict[str, torch.Tensor]:
            out, lse = run(call.q, call.k, call.v)
            if lse is None:
                return {"out": out}
            return {"out": out, "lse": lse.masked_fill(lse.isposinf(), float("-inf")) if blind else lse}

        return Prepared(forward=forward, kernel_forward=lambda: run(*call.detached), lse_grad="return_lse" in arguments)


def _installed() -> bool:
    try:
        return find_spec("flash_attn.cute") is not None
    except ModuleNotFoundError:
        return False


def _known(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments that this version of the package has."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in names}


FA4 = FlashAttention4()
