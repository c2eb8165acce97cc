"""What stands between tensors and a kernel: alignment, TMA descriptors, and a quick launch."""

from __future__ import annotations

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


_compiled: dict[Any, Any] = {}


def launch(kernel: Any, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    """Launches on the current stream. `arguments` are the kernel's first parameters, `constants` the rest and options.

    Triton's own lookup of a compiled kernel takes longer than a short kernel runs, so what it found is kept, by all
    that it depends on: constants, dtypes, alignment, and whether an integer fits 32 bits.
    """
    grid = (programs, 1, 1)
    if INTERPRETED:
        kernel[grid](*arguments, **constants)
        return
    key = (id(kernel), torch.cuda.current_device(), *constants.values(), *map(_kind, arguments))
    compiled = _compiled.get(key)
    if compiled is None:
        _compiled[key] = kernel[grid](*arguments, **constants)
        return
    compiled[grid](*arguments, *(constants[name] for name in kernel.arg_names[len(arguments) :]))


def _kind(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return argument < 2**31
    if argument is None or isinstance(argument, float):
        return argument is None
    return argument.base.dtype, *argument.block_shape


@cache
def gluon_kernels() -> Any:
    """The Gluon kernels, imported on first use: the interpreter knows no Gluon."""
    return import_module("kernels_triton.attention_hopper")
