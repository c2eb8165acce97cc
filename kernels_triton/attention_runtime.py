"""What stands between tensors and a kernel: alignment, TMA descriptors, and a quick launch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels_triton.attention_config import TileConfig, padded
from kernels_triton.attention_tiles import INTERPRETED


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself where TMA can read it (16-byte strides and base, dense last dimension), else a copy."""
    unit = 16 // tensor.element_size()
    strides = [s for s, n in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if n > 1]
    usable = all(s > 0 and s % unit == 0 and s * tensor.element_size() < 2**40 for s in strides)
    if usable and tensor.stride(-1) == 1 and tensor.data_ptr() % 16 == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def descriptor(tensor: torch.Tensor, rows: int, config: TileConfig) -> Any:
    """`[batch or 1, heads, rows, head_dim]` view of a natural-layout tensor, read in blocks of `rows` whole rows."""
    if tensor.dim() == 3:
        tensor = tensor.unsqueeze(0)
    shape = [tensor.shape[0], tensor.shape[2], tensor.shape[1], tensor.shape[3]]
    strides = [tensor.stride(0), tensor.stride(2), tensor.stride(1)]
    # The stride of a dimension of one means nothing, yet must be legal.
    strides = [tensor.shape[3] if n == 1 else s for s, n in zip(strides, shape[:3], strict=True)] + [1]
    block = [1, 1, rows, padded(shape[3])]
    if config.gluon:
        return gluon_kernels().descriptor(tensor, shape, strides, block)
    return TensorDescriptor(tensor, shape, strides, block)


class Launch:
    """A compiled kernel with a grid and every argument but its tensors, for calls that differ in those alone.

    Triton's own way to a compiled kernel takes longer than a short kernel runs: it looks at each argument, and its
    descriptors check themselves. Calls of one kind have nothing new to look at.
    """

    def __init__(self, compiled: Any, grid: tuple[int, int, int], tensors: Sequence[Any], rest: Sequence[Any]) -> None:
        """`tensors` are the kernel's first arguments, descriptors or tensors or None; `rest` all others."""
        self._run = compiled[grid]
        self._rest = tuple(rest)
        self._descriptors = tuple(_without_base(argument) for argument in tensors)

    def __call__(self, *tensors: torch.Tensor | None) -> None:
        """Launches on the current stream; tensors as at construction, each descriptor's base in its place."""
        arguments = [
            tensor if made is None else _with_base(made, tensor)
            for made, tensor in zip(self._descriptors, tensors, strict=True)
        ]
        self._run(*arguments, *self._rest)


def _without_base(argument: Any) -> tuple[type, dict[str, Any]] | None:
    """A descriptor's class and fields, without the tensor, which would be kept alive; None for other arguments."""
    if argument is None or isinstance(argument, torch.Tensor):
        return None
    return type(argument), {name: value for name, value in vars(argument).items() if name != "base"}


def _with_base(made: tuple[type, dict[str, Any]], tensor: torch.Tensor | None) -> Any:
    kind, fields = made
    found: Any = object.__new__(kind)  # past the checks, which this shape and these strides have passed
    vars(found).update(fields, base=tensor)
    return found


def launch(
    kernel: Any, programs: int, tensors: Sequence[Any], numbers: Sequence[Any], constants: dict[str, Any]
) -> Launch | None:
    """Launches on the current stream, and returns the launch for later calls; None under the interpreter.

    `tensors` and then `numbers` are the kernel's first parameters, `constants` the rest and options.
    """
    grid = (programs, 1, 1)
    compiled = kernel[grid](*tensors, *numbers, **constants)
    if INTERPRETED:
        return None
    given = len(tensors) + len(numbers)
    return Launch(compiled, grid, tensors, (*numbers, *(constants[name] for name in kernel.arg_names[given:])))


@cache
def gluon_kernels() -> Any:
    """The Gluon kernels, imported on first use: the interpreter knows no Gluon."""
    return import_module("kernels_triton.attention_hopper")
