"""GPU backends that are wrong in ways only a GPU has; named `misbehaving_gpu_backends.py:NAME`."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from attnbench.backends.base import Prepared
from attnbench.ops import operation
from attnbench.ops.base import Inputs
from attnbench.scenario.case import Case, op_name

Tensors = dict[str, torch.Tensor]


@triton.jit
def _write_far(out, offset):
    tl.store(out + offset, 1.0)


class _Base:
    def supports(self, case: Case, device: str) -> str | None:
        return None if device == "cuda" else "needs a GPU"


class IllegalAccess(_Base):
    """Writes far beyond any allocation."""

    name = "illegal"

    def prepare(self, case: Case, inputs: Inputs) -> Prepared:
        def forward() -> Tensors:
            out = torch.zeros_like(inputs.tensors["q"], dtype=torch.float32)
            _write_far[(1,)](out, 1 << 45)
            torch.cuda.synchronize()
            return {"out": out}

        return Prepared(forward=forward, differentiable=False)


class LazyWhenTimed(_Base):
    """Right while it is checked; from its tenth call on it hands out what it computed earlier."""

    name = "lazy"

    def prepare(self, case: Case, inputs: Inputs) -> Prepared:
        op = operation(op_name(case))
        state: dict[str, Any] = {"calls": 0}

        def forward() -> Tensors:
            state["calls"] += 1
            if state["calls"] < 6 or "kept" not in state:
                state["kept"] = {name: t.detach() for name, t in op.eager(case, inputs).items()}
            return dict(state["kept"])

        return Prepared(forward=forward, differentiable=False)


class Synchronises(_Base):
    """Right, but waits for the device in every call, so that no graph can be captured and nothing queued ahead."""

    name = "synchronises"

    def prepare(self, case: Case, inputs: Inputs) -> Prepared:
        op = operation(op_name(case))

        def forward() -> Tensors:
            torch.cuda.synchronize()
            return op.eager(case, inputs)

        return Prepared(forward=forward)


ILLEGAL, LAZY, SYNCHRONISES = IllegalAccess(), LazyWhenTimed(), Synchronises()
