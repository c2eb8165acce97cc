"""Plain PyTorch: the baseline."""

from __future__ import annotations

from attnbench.backends.base import Prepared
from attnbench.ops import operation
from attnbench.ops.base import Inputs
from attnbench.scenario.case import Case, op_name


class Eager:
    """Any operation's own eager function, through autograd."""

    name = "eager"

    def supports(self, case: Case, device: str) -> str | None:
        return None

    def prepare(self, case: Case, inputs: Inputs) -> Prepared:
        op = operation(op_name(case))
        return Prepared(forward=lambda: op.eager(case, inputs))


EAGER = Eager()
