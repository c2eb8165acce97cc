"""Second derivatives, which no kernel here has: asked for, they are an error that says so."""

from __future__ import annotations

from typing import Any, NoReturn

import torch


def refuse_second_order(backward: torch.library.CustomOpDef, instead: str) -> None:
    """Make a gradient of the custom op `backward` raise NotImplementedError, naming what to use `instead`."""

    def refuse(ctx: Any, *grads: torch.Tensor) -> NoReturn:
        raise NotImplementedError(
            f"second derivatives (create_graph=True) are not supported by {backward._qualname}: it has a first "
            f"derivative only. Use {instead}, which plain PyTorch differentiates any number of times."
        )

    backward.register_autograd(refuse)
