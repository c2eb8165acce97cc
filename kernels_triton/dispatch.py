"""When a call may go past PyTorch's dispatcher, which costs more than the rest of a short call's work on the host."""

from __future__ import annotations

import torch

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def differentiated(*tensors: torch.Tensor) -> bool:
    """Whether autograd follows a call on these tensors."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def watched(*tensors: torch.Tensor) -> bool:
    """Whether a compiler traces, a mode or a transform intercepts, or a subclass would handle operators of the call."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.maybe_current_level() is not None  # vmap and grad transforms
        or any(type(tensor) not in _PLAIN for tensor in tensors)
    )
