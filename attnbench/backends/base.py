"""Who can compute an operation: the protocol that built-in backends, peers and a user's own kernel share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from attnbench.ops.base import Inputs
from attnbench.scenario.case import Case

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]


class BuildFailed(RuntimeError):
    """A kernel did not build or load; the message holds the compiler's or driver's words."""


@dataclass
class Prepared:
    """A backend made ready for one case.

    `forward()` returns the outputs by name with the autograd graph attached (inputs are leaves that require grad).
    `backward(outputs)` returns the gradients by name; None means the default, `torch.autograd.grad` over a retained
    graph with the case's cotangents. `kernel_forward` and `kernel_backward` are the kernels' own entry points without
    autograd, timed as `kernel_ms` (None where there is no such entry). A backend that has no backward for its operation
    sets `differentiable` to False.
    """

    forward: Callable[[], Tensors]
    backward: Callable[[Tensors], Tensors] | None = None
    kernel_forward: Callable[[], Any] | None = None
    kernel_backward: Callable[[], Any] | None = None
    differentiable: bool = True
    lse_grad: bool = True
    """False where the backend gives no lse, or one that gradients cannot flow through: it is checked without them."""
    deterministic: bool = False
    """True where equal calls promise equal bits, gradients included; a difference then fails the check."""
    tune: Callable[[], dict[str, Any]] | None = None
    """Builds and autotunes outside the timed phase; returns the choices for the record."""
    ran_by: str | None = None
    """Another backend's name where this one handed the call on, with `reason`."""
    reason: str | None = None

    notes: dict[str, Any] = field(default_factory=dict)


@runtime_checkable
class Backend(Protocol):
    """`supports` answers None or the reason why not; `prepare` hands back the callables."""

    name: str

    def supports(self, case: Case, device: str) -> str | None: ...

    def prepare(self, case: Case, inputs: Inputs) -> Prepared: ...
