"""FlashAttention-3 and -4, where they are installed: bottom-right causal and packed input as ours."""

from __future__ import annotations

import inspect
from collections.abc import Callable
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
from attnbench.backends.peer import load, missing
from attnbench.ops.base import Inputs
from attnbench.scenario.case import AttentionCase, Case

if TYPE_CHECKING:
    import torch


class FlashAttention:
    """One generation: the module with `flash_attn_func` and `flash_attn_varlen_func`, and how it is asked for lse."""

    def __init__(
        self,
        name: str,
        module: str,
        package: str,
        ask_for_lse: str,
        *,
        lse_grad: bool,
        shape: Callable[[AttentionCase], str | None],
    ) -> None:
        self.name = name
        self._module = module
        self._package = package
        self._ask_for_lse = ask_for_lse
        self._lse_grad = lse_grad
        self._shape = shape

    def supports(self, case: Case, device: str) -> str | None:
        if not isinstance(case, AttentionCase):
            return not_attention(case)
        return first_reason(
            missing(self._module, self._package),
            needs_gpu(device),
            half_only(case),
            empty(case),
            self._shape(case),
        )

    def prepare(self, case: Case, inputs: Inputs) -> Prepared:
        assert isinstance(case, AttentionCase)
        call = attention_call(inputs)
        packed = case.layout == "varlen"
        function = load(self._module, "flash_attn_varlen_func" if packed else "flash_attn_func", self._package)
        arguments: dict[str, Any] = {"softmax_scale": case.scale, "causal": case.causal, self._ask_for_lse: True}
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
            lse = lse if self._lse_grad else lse.detach()
            return {"out": out, "lse": lse.masked_fill(lse.isposinf(), float("-inf")) if blind else lse}

        return Prepared(
            forward=forward,
            kernel_forward=lambda: run(*call.detached),
            lse_grad=self._lse_grad and self._ask_for_lse in arguments,
        )


def _known(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments that this version of the package has."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in names}


def _fa3_shape(case: AttentionCase) -> str | None:
    """FlashAttention-3's kernels with two head dims: 192/128 and what is padded to it, and 64 with wide values."""
    dim, value_dim = case.head_dim, case.dv
    if dim == value_dim or (128 < dim <= 192 and 96 < value_dim <= 128) or dim <= 64:
        return None
    return f"value head dim {value_dim} with head dim {dim}: wants them equal, 192/128, or at most 64 for the head dim"


FA3 = FlashAttention(
    "fa3",
    "flash_attn_interface",
    "flash-attn-3 (built from FlashAttention's folder hopper/)",
    "return_attn_probs",
    lse_grad=False,
    shape=_fa3_shape,
)
FA4 = FlashAttention(
    "fa4", "flash_attn.cute", "--pre flash-attn-4", "return_lse", lse_grad=True, shape=lambda case: None
)
