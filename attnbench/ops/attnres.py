"""The two phases of block attention residuals: the operations that `docs/attnres.md` defines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnbench.ops import attnres_work
from attnbench.ops.base import Inputs, Work
from attnbench.scenario.case import AttnresCase

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]


class AttnresOperation:
    """What both phases share. Torch is imported by the methods that make or take tensors, so planning needs none."""

    name: str
    output_names: tuple[str, ...] = ("out", "lse")
    grad_names: dict[str, str]

    def make_inputs(self, case: AttnresCase, device: str) -> Inputs:
        """Seeded inputs and cotangents; see `attnres_inputs.make_inputs`."""
        from attnbench.ops.attnres_inputs import make_inputs

        return make_inputs(case, device)

    def work(self, case: AttnresCase, which: str) -> Work:
        """FLOPs and least bytes of one pass; see `attnres_work.work`."""
        return attnres_work.work(case, which)

    def memory(self, case: AttnresCase) -> dict[str, int]:
        """Predicted peak bytes by phase; see `attnres_work.memory`."""
        return attnres_work.memory(case)


class Phase1(AttnresOperation):
    """values `[N, R, D]`, queries `[S, D]` to out `[S, R, D]`, lse `[S, R]` fp32."""

    name = "attnres_phase1"

    def __init__(self) -> None:
        self.grad_names = {"dvalues": "values", "dqueries": "queries"}

    def reference(self, case: AttnresCase, inputs: Inputs) -> Tensors:
        """Outputs and gradients in fp64 from explicit formulas, chunked over rows."""
        from attnbench.ops.attnres_reference import phase1, truth

        return truth(phase1, inputs)

    def yardstick(self, case: AttnresCase, inputs: Inputs) -> Tensors:
        """The same formulas in fp32, the weights of each product rounded to the values' dtype; lse in fp32."""
        from attnbench.ops.attnres_reference import phase1, same_dtype

        return same_dtype(phase1, inputs, inputs.tensors["values"].dtype)

    def eager(self, case: AttnresCase, inputs: Inputs) -> Tensors:
        """out and lse of the plain PyTorch baseline, with its autograd graph."""
        from attnbench.ops.attnres_eager import phase1

        out, lse = phase1(inputs.tensors["values"], inputs.tensors["queries"], **inputs.extras)
        return {"out": out, "lse": lse}


class Phase2(AttnresOperation):
    """partial_sum, inter_out `[R, D]`, query `[D]`, inter_lse `[R]` to out `[R, D]`, lse `[R]` fp32."""

    name = "attnres_phase2"

    def __init__(self) -> None:
        self.grad_names = {"dx": "partial_sum", "dq": "query", "dout": "inter_out", "dlse": "inter_lse"}

    def reference(self, case: AttnresCase, inputs: Inputs) -> Tensors:
        """Outputs and gradients in fp64 from explicit formulas, chunked over rows."""
        from attnbench.ops.attnres_reference import phase2, truth

        return truth(phase2, inputs)

    def yardstick(self, case: AttnresCase, inputs: Inputs) -> Tensors:
        """The same formulas in fp32, each result rounded once; lse in fp32."""
        from attnbench.ops.attnres_reference import phase2, same_dtype

        return same_dtype(phase2, inputs, inputs.tensors["partial_sum"].dtype)

    def eager(self, case: AttnresCase, inputs: Inputs) -> Tensors:
        """out and lse of the plain PyTorch baseline, with its autograd graph."""
        from attnbench.ops.attnres_eager import phase2

        names = ("partial_sum", "query", "inter_out", "inter_lse")
        partial_sum, query, inter_out, inter_lse = (inputs.tensors[name] for name in names)
        out, lse = phase2(partial_sum, query, inter_out, inter_lse, **inputs.extras)
        return {"out": out, "lse": lse}


PHASE1 = Phase1()
PHASE2 = Phase2()
