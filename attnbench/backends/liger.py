"""Liger-Kernel's attention residuals, where it is installed: one pseudo-query a call, no lse."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnbench.backends.attention_call import first_reason
from attnbench.backends.attnres_call import common, each_query, eps_of, int32_offsets, phase1_only
from attnbench.backends.base import Prepared
from attnbench.backends.peer import load, missing
from attnbench.ops.base import Inputs
from attnbench.scenario.case import AttnresCase, Case

if TYPE_CHECKING:
    import torch


class Liger:
    """`LigerAttnResFunction`: S pseudo-queries are S calls, each of which reads all blocks."""

    name = "liger"

    def supports(self, case: Case, device: str) -> str | None:
        if not isinstance(case, AttnresCase) or case.phase != 1:
            return phase1_only(case)
        return first_reason(
            missing("liger_kernel", "liger-kernel"),
            common(case, device),
            int32_offsets(case.blocks * case.rows * case.hidden),
        )

    def prepare(self, case: Case, inputs: Inputs) -> Prepared:
        assert isinstance(case, AttnresCase)
        import torch

        function = load("liger_kernel.ops", "LigerAttnResFunction", "liger-kernel")
        values, queries = inputs.tensors["values"], inputs.tensors["queries"]
        # The definition has no key weight. Ones in fp32: keys are rounded to the weight's dtype.
        ones, eps = torch.ones(case.hidden, device=values.device), eps_of(case)

        def run(values: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
            return each_query(lambda query: function.apply(values, query, ones, eps), queries)

        return Prepared(
            forward=lambda: {"out": run(values, queries)},
            kernel_forward=lambda: run(values.detach(), queries.detach()),
            lse_grad=False,
        )


LIGER = Liger()
