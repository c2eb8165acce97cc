"""How `torch.compile` is used: one graph a shape, and never a silent fall-back to eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MANY = 4096  # a sweep compiles one function for every shape of it


def compiled(function: Callable[..., Any]) -> Any:
    """`torch.compile(function, dynamic=False)`; running out of recompilations is an error rather than eager code.

    A compiled backward may reuse its saved buffers, which a graph that is kept for a second backward does not survive:
    that is switched off.
    """
    import torch
    import torch._dynamo.config as config
    import torch._functorch.config as functorch

    if hasattr(functorch, "donated_buffer"):
        functorch.donated_buffer = False
    for name, value in (
        ("recompile_limit", MANY),
        ("accumulated_recompile_limit", MANY),
        ("fail_on_recompile_limit_hit", True),
    ):
        if hasattr(config, name):
            setattr(config, name, value)
    return torch.compile(function, dynamic=False)
