"""Scaled dot-product attention, dense and packed: the operation that `docs/attention.md` defines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnbench.ops import attention_work
from attnbench.ops.base import Inputs, Work
from attnbench.scenario.case import AttentionCase

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]


class AttentionOperation:
    """q, k, v to out and lse; causal is bottom-right aligned, a fully masked row gives out 0 and lse -inf.

    Torch is imported by the methods that make or take tensors, so that planning a sweep needs none.
    """

    name = "attention"
    output_names: tuple[str, ...] = ("out", "lse")
    timed_cotangents: tuple[str, ...] = ("out",)  # training has no loss on lse, and most peers no gradient through it
    grad_names: dict[str, str]

    def __init__(self) -> None:
        self.grad_names = {"dq": "q", "dk": "k", "dv": "v"}

    def make_inputs(self, case: AttentionCase, device: str) -> Inputs:
        """Standard normal q, k, v and cotangents of out and lse; see `attention_inputs.make_inputs`."""
        from attnbench.ops.attention_inputs import make_inputs

        return make_inputs(case, device)

    def reference(self, case: AttentionCase, inputs: Inputs) -> Tensors:
        """out, lse, dq, dk, dv in fp64 from explicit formulas, chunked."""
        from attnbench.ops.attention_reference import reference

        return reference(inputs)

    def yardstick(self, case: AttentionCase, inputs: Inputs) -> Tensors:
        """The same formulas with the operands of each product rounded to the inputs' dtype; lse in fp32."""
        from attnbench.ops.attention_reference import yardstick

        return yardstick(inputs)

    def eager(self, case: AttentionCase, inputs: Inputs) -> Tensors:
        """out and lse of the plain PyTorch baseline, with its autograd graph."""
        from attnbench.ops.attention_eager import attention

        q, k, v = (inputs.tensors[name] for name in ("q", "k", "v"))
        out, lse = attention(q, k, v, **inputs.extras)
        return {"out": out, "lse": lse}

    def work(self, case: AttentionCase, which: str) -> Work:
        """Live pairs, FLOPs and least bytes of one pass; see `attention_work`."""
        return attention_work.work(case, which)

    def memory(self, case: AttentionCase) -> dict[str, int]:
        """Predicted peak bytes by phase; see `attention_work.memory`."""
        return attention_work.memory(case)


ATTENTION = AttentionOperation()
