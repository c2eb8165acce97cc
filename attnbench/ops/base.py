"""What an operation is: inputs, fp64 reference, eager baseline and exact work.

One module per operation implements `Operation`; `attnbench.ops.operation(name)` finds it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Work:
    """Exact work of one pass of one case.

    `flops` counts live query-key pairs only; `bytes` is the least traffic possible (each input read once, each output
    written once). `pairs` is the number of live (query, key) pairs summed over heads and sequences, 0 where the
    operation has none.
    """

    flops: int
    bytes: int
    pairs: int = 0


@dataclass
class Inputs:
    """Inputs of one case on one device.

    `tensors` are the differentiable inputs by name (leaves with `requires_grad`); `extras` everything else a call
    takes (`cu_seqlens_q`, `max_seqlen_q`, `eps` …); `cotangents` random upstream gradients by output name. A cotangent
    that is absent (no gradient through lse, say) arrives as a missing key.
    """

    tensors: Tensors
    cotangents: Tensors
    extras: dict[str, Any] = field(default_factory=dict)


def timed_inputs(operation: Operation, inputs: Inputs) -> Inputs:
    """The inputs with the cotangents that timed backward passes use: all, unless the operation names fewer."""
    names = getattr(operation, "timed_cotangents", None)
    if names is None:
        return inputs
    return replace(inputs, cotangents={name: grad for name, grad in inputs.cotangents.items() if name in names})


class Operation(Protocol):
    """One operation. Output and gradient dictionaries use the names below, in this order."""

    name: str
    output_names: tuple[str, ...]  # ("out", "lse")
    grad_names: dict[str, str]  # gradient name -> input name: {"dq": "q", …}

    def make_inputs(self, case: Any, device: str) -> Inputs:
        """Seeded random inputs and cotangents in the case's dtype; equal for equal cases on any device."""

    def reference(self, case: Any, inputs: Inputs) -> Tensors:
        """Outputs and gradients in fp64 from the same rounded inputs and cotangents, chunked to bounded memory."""

    def yardstick(self, case: Any, inputs: Inputs) -> Tensors:
        """Outputs and gradients of eager PyTorch in the case's dtype, chunked: the error budget's unit."""

    def eager(self, case: Any, inputs: Inputs) -> Tensors:
        """Outputs of the plain PyTorch baseline, through autograd: what the `eager` backend times."""

    def work(self, case: Any, which: str) -> Work:
        """Exact work of `which` pass: "forward", "backward" or "forward_backward"."""

    def memory(self, case: Any) -> dict[str, int]:
        """Predicted peak bytes by phase: {"kernel": …, "eager": …, "check": …}."""
