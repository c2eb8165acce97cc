"""torch.compile of the eager baseline."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from attnbench.backends.base import Prepared
from attnbench.backends.compiler import compiled
from attnbench.ops import operation
from attnbench.ops.base import Inputs
from attnbench.scenario.case import AttentionCase, Case, op_name

if TYPE_CHECKING:
    import torch

    Function = Callable[..., dict[str, torch.Tensor]]

MAX_SEQUENCES = 16


class Compile:
    """`torch.compile(eager, dynamic=False)`; packed sequences are unrolled, so only a few are taken."""

    name = "compile"

    def supports(self, case: Case, device: str) -> str | None:
        if isinstance(case, AttentionCase) and case.layout == "varlen" and len(case.seqlens_q) > MAX_SEQUENCES:
            return f"{len(case.seqlens_q)} packed sequences would be unrolled: at most {MAX_SEQUENCES}"
        return None

    def prepare(self, case: Case, inputs: Inputs) -> Prepared:
        tensors = tuple(inputs.tensors.values())
        function = compiled(_attention(case, inputs) if isinstance(case, AttentionCase) else _any(case, inputs))

        def forward() -> dict[str, torch.Tensor]:
            outputs: dict[str, torch.Tensor] = function(*tensors)
            return outputs

        return Prepared(forward=forward)


def _any(case: Case, inputs: Inputs) -> Function:
    """The operation's eager as a function of its tensors alone, so that dynamo guards on nothing else."""
    op, names, extras = operation(op_name(case)), tuple(inputs.tensors), inputs.extras

    def call(*tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        return op.eager(case, Inputs(dict(zip(names, tensors, strict=True)), {}, extras))

    return call


def _attention(case: AttentionCase, inputs: Inputs) -> Function:
    """Offsets become Python numbers: reading them from a tensor would break the graph."""
    from attnbench.ops.attention_eager import dense, packed

    causal, scale = case.causal, case.scale
    if case.layout == "dense":

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, torch.Tensor]:
            out, lse = dense(q, k, v, causal, scale)
            return {"out": out, "lse": lse}

        return call

    bounds_q, bounds_k = inputs.extras["cu_seqlens_q"].tolist(), inputs.extras["cu_seqlens_k"].tolist()

    def call_packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, torch.Tensor]:
        out, lse = packed(q, k, v, causal, scale, bounds_q, bounds_k)
        return {"out": out, "lse": lse}

    return call_packed


COMPILE = Compile()
