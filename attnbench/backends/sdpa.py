"""PyTorch's own fused attention: FlashAttention-2 and cuDNN, called at the operators beneath `sdpa`, which return lse.

Gradients do not flow through that lse. Dense `is_causal` is top-left aligned, so only square cases (and a single query,
which sees every key) fit; packed input goes to FlashAttention-2's own packed kernel, which is bottom-right aligned.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from attnbench.backends.attention_call import (
    AttentionCall,
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

    Tensors = dict[str, torch.Tensor]
    # forward(q, k, v) -> (out, lse, saved); backward(d_out, q, k, v, out, lse, saved) -> (dq, dk, dv)
    Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor, Any]]
    Backward = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


class Sdpa:
    """One of the two kernels; `packed` where it has a varlen form."""

    def __init__(self, name: str, operators: Callable[[AttentionCase, AttentionCall], Any], *, packed: bool) -> None:
        self.name = name
        self._operators = operators
        self._packed = packed

    def supports(self, case: Case, device: str) -> str | None:
        if not isinstance(case, AttentionCase):
            return not_attention(case)
        return first_reason(needs_gpu(device), half_only(case), empty(case), self._shape(case))

    def _shape(self, case: AttentionCase) -> str | None:
        if case.layout == "varlen":
            if not self._packed:
                return "packed input: has no public packed form in PyTorch"
        elif case.causal and case.seqlen_q not in (1, case.seqlen_k):
            return f"causal with {case.seqlen_q} queries and {case.seqlen_k} keys: is_causal is top-left aligned"
        if case.dv != case.head_dim:
            return f"value head dim {case.dv} other than head dim {case.head_dim}"
        return None

    def prepare(self, case: Case, inputs: Inputs) -> Prepared:
        assert isinstance(case, AttentionCase)
        call = attention_call(inputs)
        forward, backward = self._operators(case, call)
        blind = blind_rows(case)

        def outputs() -> Tensors:
            out, lse, _ = forward(call.q, call.k, call.v)
            return {"out": out, "lse": _lse(lse, blind)}

        def kernel_forward() -> Any:
            return forward(*call.detached)

        @cache
        def state() -> tuple[Any, ...]:
            return forward(*call.detached)

        def kernel_backward() -> Any:
            return backward(call.d_out, *call.detached, *state())

        return Prepared(
            forward=outputs,
            kernel_forward=kernel_forward,
            kernel_backward=None if call.d_out is None else kernel_backward,
            lse_grad=False,
        )


def _lse(lse: torch.Tensor, blind: bool) -> torch.Tensor:
    """lse as `[B, H, Sq]` or `[H, Tq]`; FlashAttention-2 writes +inf for a row that sees nothing."""
    lse = lse.detach()
    if lse.dim() == 4:
        lse = lse.squeeze(-1)
    return lse.masked_fill(lse.isposinf(), float("-inf")) if blind else lse


def _is_causal(case: AttentionCase) -> bool:
    return case.causal and case.seqlen_q != 1


def _flash(case: AttentionCase, call: AttentionCall) -> tuple[Forward, Backward]:
    import torch

    aten = torch.ops.aten
    if case.layout == "varlen":
        return _flash_packed(case, call)
    causal, scale = _is_causal(case), case.scale

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
        out, lse, *rest = aten._scaled_dot_product_flash_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), 0.0, causal, False, scale=scale
        )
        return out.transpose(1, 2), lse, rest

    def backward(
        d_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        saved: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        cu_q, cu_k, max_q, max_k, rng_state, unused, _ = saved
        heads_first = (x.transpose(1, 2) for x in (d_out, q, k, v, out))
        grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = aten._scaled_dot_product_flash_attention_backward(
            *heads_first, lse, cu_q, cu_k, max_q, max_k, 0.0, causal, rng_state, unused, scale=scale
        )
        return grads

    return forward, backward


def _flash_packed(case: AttentionCase, call: AttentionCall) -> tuple[Forward, Backward]:
    import torch

    aten = torch.ops.aten
    extras, causal, scale = call.extras, case.causal, case.scale
    where = (extras["cu_seqlens_q"], extras["cu_seqlens_k"], extras["max_seqlen_q"], extras["max_seqlen_k"])

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
        out, lse, *rest = aten._flash_attention_forward(q, k, v, *where, 0.0, causal, False, scale=scale)
        return out, lse, rest

    def backward(
        d_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        saved: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rng_state, unused, _ = saved
        grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = aten._flash_attention_backward(
            d_out, q, k, v, out, lse, *where, 0.0, causal, rng_state, unused, scale=scale
        )
        return grads

    return forward, backward


def _cudnn(case: AttentionCase, call: AttentionCall) -> tuple[Forward, Backward]:
    import torch

    aten = torch.ops.aten
    causal, scale = _is_causal(case), case.scale

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
        out, lse, *rest = aten._scaled_dot_product_cudnn_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None, True, 0.0, causal, False, scale=scale
        )
        return out.transpose(1, 2), lse, rest

    def backward(
        d_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        saved: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        cu_q, cu_k, max_q, max_k, seed, offset, _ = saved
        heads_first = (x.transpose(1, 2) for x in (d_out, q, k, v, out))
        grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = aten._scaled_dot_product_cudnn_attention_backward(
            *heads_first, lse, seed, offset, None, cu_q, cu_k, max_q, max_k, 0.0, causal, scale=scale
        )
        return grads

    return forward, backward


FLASH = Sdpa("sdpa_flash", _flash, packed=True)
CUDNN = Sdpa("sdpa_cudnn", _cudnn, packed=False)
