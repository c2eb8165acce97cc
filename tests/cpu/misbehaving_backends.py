"""Backends that end a process, hang or are wrong, each in its own way; named `misbehaving_backends.py:NAME`."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from attnbench.backends.base import BuildFailed, Prepared
from attnbench.ops import operation
from attnbench.ops.base import Inputs
from attnbench.scenario.case import Case, op_name

Tensors = dict[str, torch.Tensor]


@dataclass
class Misbehaving:
    name: str
    act: Callable[[Tensors], Tensors]
    in_prepare: bool = False
    deterministic: bool = False

    def supports(self, case: Case, device: str) -> str | None:
        return None

    def prepare(self, case: Case, inputs: Inputs) -> Prepared:
        if self.in_prepare:
            self.act({})
        op = operation(op_name(case))
        forward = op.eager
        return Prepared(
            forward=lambda: self.act({**inputs.tensors, **forward(case, inputs)}), deterministic=self.deterministic
        )


def _segfault(_: Tensors) -> Tensors:
    print("about to touch address 0", flush=True)
    ctypes.string_at(0)
    raise AssertionError("unreachable")


def _kill(_: Tensors) -> Tensors:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def _exit(_: Tensors) -> Tensors:
    os._exit(7)


def _hang(_: Tensors) -> Tensors:
    time.sleep(600)
    raise AssertionError("unreachable")


def _memory(_: Tensors) -> Tensors:
    raise MemoryError("no room")


def _error(_: Tensors) -> Tensors:
    raise RuntimeError("the kernel did not like that")


def _build(_: Tensors) -> Tensors:
    raise BuildFailed("line 3: expected a semicolon")


def _outputs(tensors: Tensors) -> Tensors:
    return {"out": tensors["out"], "lse": tensors["lse"]}


def _nan(tensors: Tensors) -> Tensors:
    out = tensors["out"].clone()
    out.view(-1)[-1] = torch.nan
    return _outputs({**tensors, "out": out})


def _zeros(tensors: Tensors) -> Tensors:
    return _outputs({**tensors, "out": tensors["out"] * 0})


def _unwritten(tensors: Tensors) -> Tensors:
    """Returns memory that it never wrote in the last row, as a kernel without a tail does."""
    out = tensors["out"]
    fresh = torch.empty_like(out)
    fresh[:, :-1] = out.detach()[:, :-1]
    return _outputs({**tensors, "out": out + (fresh - out.detach())})


def _edits_inputs(tensors: Tensors) -> Tensors:
    found = {name: tensor.clone() for name, tensor in _outputs(tensors).items()}
    tensors["q"].detach().numpy().reshape(-1)[0] += 1  # behind autograd's back, as a kernel would
    return found


def _doubled_gradient(tensors: Tensors) -> Tensors:
    out = tensors["out"]
    return _outputs({**tensors, "out": 2 * out - out.detach()})


def _random_bits(tensors: Tensors) -> Tensors:
    jitter = 1 + 3e-7 * torch.rand_like(tensors["lse"])
    return _outputs({**tensors, "lse": tensors["lse"] * jitter})


def _slow(tensors: Tensors) -> Tensors:
    time.sleep(0.3)
    return tensors


SEGFAULT = Misbehaving("segfault", _segfault)
KILL = Misbehaving("kill", _kill)
EXIT = Misbehaving("exit", _exit)
HANG = Misbehaving("hang", _hang)
MEMORY = Misbehaving("memory", _memory)
ERROR = Misbehaving("error", _error)
BUILD = Misbehaving("build", _build, in_prepare=True)
NAN = Misbehaving("nan", _nan)
ZEROS = Misbehaving("zeros", _zeros)
UNWRITTEN = Misbehaving("unwritten", _unwritten)
EDITS = Misbehaving("edits", _edits_inputs)
DOUBLED = Misbehaving("doubled", _doubled_gradient)
RANDOM = Misbehaving("random", _random_bits, deterministic=True)
GOOD = Misbehaving("good", _outputs, deterministic=True)


class SlowStart(Misbehaving):
    def prepare(self, case: Case, inputs: Inputs) -> Prepared:
        time.sleep(0.5)
        return super().prepare(case, inputs)


SLOW = SlowStart("slow", _outputs)
