"""What the operations are. `operation(name)` loads one on first use; importing this package costs nothing."""

from __future__ import annotations

from functools import cache
from importlib import import_module

from attnbench.ops.base import Inputs, Operation, Work

__all__ = ["NAMES", "Inputs", "Operation", "Work", "operation"]

_HOME = {
    "attention": ("attnbench.ops.attention", "ATTENTION"),
    "attnres_phase1": ("attnbench.ops.attnres", "PHASE1"),
    "attnres_phase2": ("attnbench.ops.attnres", "PHASE2"),
}
NAMES = tuple(_HOME)


@cache
def operation(name: str) -> Operation:
    """The operation called `name`. Its work and memory figures need no torch; its tensors do.

    Raises:
        ValueError: no such operation.
    """
    if name not in _HOME:
        raise ValueError(f"unknown operation {name!r}: want one of {', '.join(NAMES)}")
    module, attribute = _HOME[name]
    found: Operation = getattr(import_module(module), attribute)
    return found
