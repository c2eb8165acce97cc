"""flash-linear-attention's attention residuals, where it is installed: one pseudo-query a call, no lse."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnbench.backends.attention_call import first_reason
from attnbench.backends.attnres_call import common, each_query, eps_of, phase1_only
from attnbench.backends.base import Prepared
from attnbench.backends.peer import load, missing
from attnbench.ops.attnres_work import ITEMSIZE
from attnbench.ops.base import Inputs
from attnbench.scenario.case import AttnresCase, Case

if TYPE_CHECKING:
    import torch

ALIGNMENT = 16


class Fla:
    """`fused_attnres`: S pseudo-queries are S calls. It takes a list of blocks, so autograd stacks their gradients."""

    name = "fla"

    def supports(self, case: Case, device: str) -> str | None:
        if not isinstance(case, AttnresCase) or case.phase != 1:
            return phase1_only(case)
        return first_reason(missing("fla", "fla-core"), common(case, device), _alignment(case))

    def prepare(self, case: Case, inputs: Inputs) -> Prepared:
        assert isinstance(case, AttnresCase)
        import torch

        function = load("fla.ops.attnres", "fused_attnres", "fla-core")
        values, queries = inputs.tensors["values"], inputs.tensors["queries"]
        ones, eps = torch.ones(case.hidden, device=values.device), eps_of(case)  # the definition has no key weight

        def run(values: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
            blocks = values.unbind(0)
            return each_query(lambda query: function(query, blocks, ones, rms_eps=eps), queries)

        return Prepared(
            forward=lambda: {"out": run(values, queries)},
            kernel_forward=lambda: run(values.detach(), queries.detach()),
            lse_grad=False,
        )


def _alignment(case: AttnresCase) -> str | None:
    block = case.rows * case.hidden * ITEMSIZE[case.dtype]
    return f"a block of {block} bytes: wants each block on a boundary of {ALIGNMENT}" if block % ALIGNMENT else None


FLA = Fla()
