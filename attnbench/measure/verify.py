"""Is it right: one backend's outputs and gradients of one case, against fp64, on memory that starts as NaN."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from attnbench.backends.base import Prepared
from attnbench.measure.check import check_fixed, check_tensors
from attnbench.measure.poison import nan_filled
from attnbench.ops.base import Inputs, Operation, timed_inputs
from attnbench.results.record import TensorCheck

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Tolerance:
    """Fixed tolerances in place of the error budget: `|x - ref| <= atol + rtol |ref|` everywhere."""

    rtol: float
    atol: float


@dataclass
class Truth:
    """Inputs of one case with what its outputs and gradients should be, made once and shared by every backend.

    `pristine` keeps the values of every tensor that a backend is given, to see whether it changes one.
    """

    operation: Operation
    case: Any
    device: str
    inputs: Inputs
    pristine: Tensors = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not self.pristine:
            self.pristine = {name: tensor.detach().clone() for name, tensor in self._given().items()}

    def _given(self) -> Tensors:
        cotangents = {f"cotangent of {name}": tensor for name, tensor in self.inputs.cotangents.items()}
        return {**self.inputs.tensors, **cotangents, **_tensors(self.inputs.extras)}

    def restore(self) -> list[str]:
        """Names of tensors that no longer hold their first values; they hold them again afterwards."""
        changed = []
        for name, tensor in self._given().items():
            if not same_bits(self.pristine[name], tensor.detach()):
                changed.append(name)
                tensor.data.copy_(self.pristine[name])  # not through autograd: kept graphs stay valid
        return changed

    @contextlib.contextmanager
    def rolled(self) -> Iterator[bool]:
        """Within the block every input holds its values rolled by one along its last axis, at the same addresses.

        Yields whether that must change the first output: it need not where that is constant along the axis, or where an
        input is expanded and keeps its values.
        """
        first = self.reference[self.operation.output_names[0]]
        whole = all(0 not in tensor.stride() for tensor in self.inputs.tensors.values())
        try:
            for name, tensor in self.inputs.tensors.items():
                if whole:
                    tensor.data.copy_(torch.roll(self.pristine[name], 1, -1))
            yield whole and not torch.equal(first.nan_to_num(), torch.roll(first, 1, -1).nan_to_num())
        finally:
            self.restore()

    @cached_property
    def reference(self) -> Tensors:
        return _detached(self.operation.reference(self.case, self.inputs))

    @cached_property
    def yardstick(self) -> Tensors:
        return _detached(self.operation.yardstick(self.case, self.inputs))

    @cached_property
    def without_lse_grad(self) -> Truth:
        """The same inputs with no gradient through lse, for backends that have none."""
        rest = {name: grad for name, grad in self.inputs.cotangents.items() if name != "lse"}
        return self._with(replace(self.inputs, cotangents=rest))

    @cached_property
    def timed(self) -> Truth:
        """The same inputs with the cotangents of timed backward passes: what those must have computed."""
        inputs = timed_inputs(self.operation, self.inputs)
        if inputs.cotangents.keys() == self.inputs.cotangents.keys() - {"lse"}:
            return self.without_lse_grad
        return self._with(inputs)

    def _with(self, inputs: Inputs) -> Truth:
        if inputs.cotangents.keys() == self.inputs.cotangents.keys():
            return self
        return Truth(self.operation, self.case, self.device, inputs, self.pristine)


@dataclass
class Verdict:
    """Outcome of one check. `flags` hold what is noteworthy without being a failure; `problems` what is one."""

    tensors: dict[str, TensorCheck]
    problems: list[str] = field(default_factory=list)
    flags: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.problems and all(t.passed for t in self.tensors.values())

    @property
    def reason(self) -> str | None:
        """Why it failed, in one line."""
        failed = [
            f"{name}: {t.message or f'{t.budget_ratio:.3g} times its error budget'}"
            for name, t in self.tensors.items()
            if not t.passed
        ]
        return "; ".join(self.problems + failed) or None


def gradients(operation: Operation, inputs: Inputs, prepared: Prepared, outputs: Tensors) -> Tensors:
    """Gradients by name: the backend's own backward, else `torch.autograd.grad` over a graph that is kept.

    An input that the outputs do not depend on has a gradient of zeros.
    """
    if prepared.backward is not None:
        return prepared.backward(outputs)
    call = autograd_call(operation, inputs, outputs)
    return call()


def autograd_call(operation: Operation, inputs: Inputs, outputs: Tensors) -> Callable[[], Tensors]:
    """A callable that runs the backward of `outputs` any number of times; nothing is accumulated into `.grad`."""
    names = [name for name in outputs if name in inputs.cotangents and outputs[name].requires_grad]
    heads = [outputs[name] for name in names]
    cotangents = [inputs.cotangents[name] for name in names]
    leaves = [inputs.tensors[name] for name in operation.grad_names.values()]

    def backward() -> Tensors:
        grads = torch.autograd.grad(heads, leaves, cotangents, retain_graph=True, allow_unused=True)
        return {
            name: torch.zeros_like(leaf) if grad is None else grad
            for name, grad, leaf in zip(operation.grad_names, grads, leaves, strict=True)
        }

    return backward


def compute(operation: Operation, inputs: Inputs, prepared: Prepared) -> Tensors:
    """Outputs and, where there is a backward, gradients of one execution."""
    outputs = prepared.forward()
    got = dict(outputs)
    if prepared.differentiable:
        got |= gradients(operation, inputs, prepared, outputs)
    return _detached(got)


def judge(truth: Truth, got: Tensors, tolerance: Tolerance | None = None) -> dict[str, TensorCheck]:
    """Compare what a backend gave with fp64; names that the backend does not give are not judged.

    `lse_grad` of a backend decides which `truth` belongs here.
    """
    reference = {name: tensor for name, tensor in truth.reference.items() if name in got}
    if tolerance is not None:
        return check_fixed(reference, got, rtol=tolerance.rtol, atol=tolerance.atol)
    yardstick = {name: truth.yardstick[name] for name in reference}
    return check_tensors(reference, yardstick, {name: got[name] for name in reference})


def verify(
    truth: Truth,
    prepared: Prepared,
    *,
    repeats: int = 2,
    deterministic: bool = False,
    workspace: int = 1 << 28,
    tolerance: Tolerance | None = None,
) -> Verdict:
    """Run a prepared backend on NaN-filled memory and judge everything that it gives.

    Beyond the tensors: inputs must come back unchanged bit for bit, and `repeats` executions must agree bit for bit – a
    failure for a backend that claims to be `deterministic`, otherwise the flag `nondeterministic`.
    """
    operation, inputs = truth.operation, truth.inputs
    with nan_filled(truth.device, workspace):
        got = compute(operation, inputs, prepared)
    verdict = Verdict(judge(truth, got, tolerance))
    wanted = [*operation.output_names, *(operation.grad_names if prepared.differentiable else ())]
    missing = [name for name in wanted if name not in got]
    if missing:
        verdict.flags.append("without " + ", ".join(missing))
    differing: set[str] = set()
    for _ in range(repeats - 1):
        with nan_filled(truth.device, workspace):
            again = compute(operation, inputs, prepared)
        differing |= {name for name in got if not same_bits(got[name], again[name])}
        del again
    if differing:
        names = ", ".join(name for name in got if name in differing)
        if deterministic:
            verdict.problems.append(f"not bitwise reproducible: {names} differ between equal calls")
        else:
            verdict.flags.append("nondeterministic")
    if changed := truth.restore():
        verdict.problems.append(f"changed its inputs: {', '.join(changed)}")
    if verdict.passed and deaf(truth, prepared.forward, got):
        verdict.problems.append("gave its earlier result for other inputs at the same addresses")
    return verdict


def deaf(truth: Truth, forward: Callable[[], Tensors], before: Tensors) -> bool:
    """Whether `forward` gives `before` once more although its inputs hold other values: a cache by address, say."""
    name = truth.operation.output_names[0]
    kept = before[name].detach().clone()
    with truth.rolled() as must_differ, torch.no_grad():
        return must_differ and same_bits(kept, forward()[name].detach())


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bitwise equality; NaN equals the same NaN, and 0.0 differs from -0.0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    kind = kinds[a.element_size()]
    return bool(torch.equal(a.contiguous().view(kind), b.contiguous().view(kind)))


def _tensors(extras: dict[str, Any]) -> Tensors:
    return {name: value for name, value in extras.items() if isinstance(value, torch.Tensor)}


def _detached(tensors: Tensors) -> Tensors:
    return {name: tensor.detach() for name, tensor in tensors.items()}
