"""What the attention backends share: the call's tensors, and reasons why a case does not fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from attnbench.ops.base import Inputs
from attnbench.scenario.case import AttentionCase, Case

if TYPE_CHECKING:
    import torch


class AttentionCall(NamedTuple):
    """q, k, v as leaves, the cotangents (None where there is none) and the keyword arguments of the call."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    d_out: torch.Tensor | None
    d_lse: torch.Tensor | None
    extras: dict[str, Any]

    @property
    def detached(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.q.detach(), self.k.detach(), self.v.detach()


def attention_call(inputs: Inputs) -> AttentionCall:
    tensors, cotangents = inputs.tensors, inputs.cotangents
    return AttentionCall(
        tensors["q"], tensors["k"], tensors["v"], cotangents.get("out"), cotangents.get("lse"), inputs.extras
    )


def not_attention(case: Case) -> str | None:
    return None if isinstance(case, AttentionCase) else "computes attention only"


def needs_gpu(device: str) -> str | None:
    return None if device.startswith("cuda") else "needs a CUDA GPU"


def half_only(case: AttentionCase) -> str | None:
    return "fp32: takes fp16 and bf16 only" if case.dtype == "fp32" else None


def empty(case: AttentionCase) -> str | None:
    """A reason where there is no query or no key at all, which PyTorch's kernels refuse."""
    rows_q = sum(q for q, _ in case.lengths)
    rows_k = sum(k for _, k in case.lengths)
    return "takes at least one query and one key" if not rows_q or not rows_k else None


def blind_rows(case: AttentionCase) -> bool:
    """Whether some query sees no key."""
    return any(q and (not k or (case.causal and q > k)) for q, k in case.lengths)


def first_reason(*reasons: str | None) -> str | None:
    """The first reason that is one, None where nothing stands against a case."""
    return next((reason for reason in reasons if reason), None)
