"""A backend from kernels and how to launch them: allocation, autograd and naming are taken care of here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from attnbench.backends.base import Backend, Prepared
from attnbench.ops import operation
from attnbench.ops.base import Inputs
from attnbench.scenario.case import Case, op_name

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]

Namespace = Any
"""The call that a launch sees: its tensors and extras as attributes.

Inputs (`q`, `k`, `v`), extras (`causal`, `softmax_scale`, `cu_seqlens_q` …), outputs (`out`, `lse`, uninitialised
before the forward), and for the backward the cotangents (`grad_out`, `grad_lse`; None where there is none) and the
gradients to fill (`dq`, `dk`, `dv`).
"""


@dataclass(frozen=True)
class Launch:
    """One launch of a Triton kernel.

    `grid(t)` gives the grid and `arguments(t)` the kernel's arguments by name, constexprs and launch options
    (`num_warps`, `num_stages`) included, from the call `t`. `scratch(t)` gives further tensors, which later launches of
    the same pass see as attributes of `t` too.
    """

    kernel: Any
    grid: Callable[[Namespace], tuple[int, ...]]
    arguments: Callable[[Namespace], Mapping[str, Any]]
    scratch: Callable[[Namespace], Mapping[str, Any]] = field(default=lambda t: {})

    def __call__(self, t: Namespace) -> None:
        for name, tensor in self.scratch(t).items():
            setattr(t, name, tensor)
        self.kernel[self.grid(t)](**self.arguments(t))


Run = Callable[[Namespace], None]


def from_triton(
    forward: Launch | Sequence[Launch],
    backward: Launch | Sequence[Launch] = (),
    *,
    op: str = "attention",
    name: str = "my_triton",
    supports: Callable[[Case, str], str | None] | None = None,
    deterministic: bool = False,
) -> Backend:
    """A backend from Triton kernels: `forward` fills `out` and `lse`, `backward` fills the gradients.

    Both are launched in the order given. Without a backward only the forward pass is checked and timed. Inputs arrive
    as they are, so the kernels take their strides. On the CPU they run under Triton's interpreter, which must be chosen
    (`TRITON_INTERPRET=1`) before the kernels' file is imported.
    """
    return from_launches(
        _sequence(forward), _sequence(backward), op=op, name=name, supports=supports, deterministic=deterministic
    )


def from_launches(
    forward: Sequence[Run],
    backward: Sequence[Run] = (),
    *,
    op: str,
    name: str,
    supports: Callable[[Case, str], str | None] | None = None,
    deterministic: bool = False,
) -> Backend:
    """What every kind of kernel shares: callables that fill the outputs, or the gradients, of a call."""
    return _KernelBackend(tuple(forward), tuple(backward), op, name, supports, deterministic)


class _KernelBackend:
    def __init__(
        self,
        forward: tuple[Run, ...],
        backward: tuple[Run, ...],
        op: str,
        name: str,
        supports: Callable[[Case, str], str | None] | None,
        deterministic: bool,
    ) -> None:
        self.name = name
        self._forward, self._backward, self._op = forward, backward, op
        self._supports, self._deterministic = supports, deterministic

    def supports(self, case: Case, device: str) -> str | None:
        if op_name(case) != self._op:
            return f"computes {self._op} only"
        return self._supports(case, device) if self._supports is not None else None

    def prepare(self, case: Case, inputs: Inputs) -> Prepared:
        function = _autograd_function(self._op, inputs, self._forward, self._backward)
        names = tuple(inputs.tensors)
        output_names = operation(self._op).output_names

        def run(tensors: Sequence[torch.Tensor]) -> Tensors:
            return dict(zip(output_names, function.apply(*tensors), strict=True))

        leaves = [inputs.tensors[name] for name in names]
        detached = [leaf.detach() for leaf in leaves]
        return Prepared(
            forward=lambda: run(leaves if self._backward else detached),
            kernel_forward=lambda: run(detached),
            differentiable=bool(self._backward),
            deterministic=self._deterministic,
        )


def _autograd_function(op: str, inputs: Inputs, forward: Sequence[Run], backward: Sequence[Run]) -> Any:
    import torch

    names, extras = tuple(inputs.tensors), inputs.extras
    output_names, grad_names = operation(op).output_names, operation(op).grad_names

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            given = dict(zip(names, tensors, strict=True))
            t = SimpleNamespace(**given, **extras, **empty_outputs(op, given))
            for run in forward:
                run(t)
            outputs = tuple(getattr(t, name) for name in output_names)
            ctx.save_for_backward(*tensors, *outputs)
            ctx.set_materialize_grads(False)
            return outputs

        @staticmethod
        def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
            saved = ctx.saved_tensors
            given = dict(zip(names, saved[: len(names)], strict=True))
            outputs = dict(zip(output_names, saved[len(names) :], strict=True))
            upstream = {f"grad_{name}": grad for name, grad in zip(output_names, cotangents, strict=True)}
            grads = {
                grad: torch.empty_like(given[name], memory_format=torch.contiguous_format)
                for grad, name in grad_names.items()
            }
            t = SimpleNamespace(**given, **extras, **outputs, **upstream, **grads)
            for run in backward:
                run(t)
            by_input = {name: grads[grad] for grad, name in grad_names.items()}
            return tuple(by_input[name] for name in names)

    return Function


def empty_outputs(op: str, tensors: Tensors) -> Tensors:
    """Uninitialised outputs of an operation, shaped as in `docs/attention.md` and `docs/attnres.md`; lse is fp32."""
    import torch

    if op == "attention":
        q, v = tensors["q"], tensors["v"]
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        lse_shape = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    elif op == "attnres_phase1":
        values, queries = tensors["values"], tensors["queries"]
        out = values.new_empty(queries.shape[0], *values.shape[1:])
        lse_shape = tuple(out.shape[:-1])
    else:
        out = torch.empty_like(tensors["partial_sum"], memory_format=torch.contiguous_format)
        lse_shape = tuple(out.shape[:-1])
    return {"out": out, "lse": out.new_empty(lse_shape, dtype=torch.float32)}


def _sequence(launches: Launch | Sequence[Launch]) -> Sequence[Launch]:
    return (launches,) if isinstance(launches, Launch) else tuple(launches)
