"""What both phases of block attention residuals share: row views, program counts, the second-stage reduction."""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

INTERPRET = bool(triton.knobs.runtime.interpret)
_INTERPRETED = tl.constexpr(INTERPRET)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
DEFAULT_EPS = torch.finfo(torch.float32).eps


@lru_cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a device; 2 for the interpreter on the CPU, so that loops still take turns."""
    if device.type != "cuda":
        return 2
    return _multiprocessors(torch.cuda.current_device() if device.index is None else device.index)


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with a dense last dimension; a copy only where it has none."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def rows_of(tensor: torch.Tensor, trailing: int = 1) -> torch.Tensor:
    """`[..., D]` as `[R, D]` whose last dimension is dense, or `[...]` as `[R]` with `trailing` 0.

    The result is a view wherever one row stride can describe the tensor (slices, expanded gradients), else a copy.
    """
    if trailing == 0:
        return tensor.reshape(-1)
    hidden = tensor.shape[-1]
    if tensor.stride(-1) != 1 and hidden > 1:
        tensor = tensor.contiguous()
    rows = tensor.numel() // hidden if hidden else 0
    return tensor.reshape(rows, hidden)


def blocks_of(tensor: torch.Tensor) -> torch.Tensor:
    """`[N, ..., D]` as `[N, R, D]` whose last dimension is dense; a view wherever strides allow it, else a copy."""
    hidden = tensor.shape[-1]
    if tensor.stride(-1) != 1 and hidden > 1:
        tensor = tensor.contiguous()
    rows = tensor[0].numel() // hidden if tensor.shape[0] and hidden else 0
    return tensor.reshape(tensor.shape[0], rows, hidden)


@triton.jit
def rounded(value, like):
    """fp32 `value` rounded once, to nearest even, to the element type of the pointer `like`."""
    if _INTERPRETED and like.dtype.element_ty == tl.bfloat16:  # the interpreter's own cast truncates
        bits = value.to(tl.int32, bitcast=True)
        nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
        value = tl.where(value == value, nearest, value)
    return value.to(like.dtype.element_ty)


@triton.jit
def _column_sum(
    partial,
    out,
    parts,
    columns,
    ACCUMULATE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    live = column < columns
    total = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    for first in range(0, parts, BLOCK_P):
        part = first + tl.arange(0, BLOCK_P)
        where = part.to(tl.int64)[:, None] * columns + column[None, :]
        total += tl.load(partial + where, mask=(part < parts)[:, None] & live[None, :], other=0.0)
    result = tl.sum(total, axis=0)
    if ACCUMULATE:
        result += tl.load(out + column, mask=live, other=0.0).to(tl.float32)
    tl.store(out + column, rounded(result, out), mask=live)


def column_sum(partial: torch.Tensor, out: torch.Tensor, accumulate: bool = False) -> None:
    """Sums fp32 `partial` `[parts, C]` over its first dimension into `out` `[C]`, in a fixed order.

    With `accumulate` the sum is added to what `out` holds, in fp32, and rounded once.
    """
    parts, columns = partial.shape
    if columns == 0:
        return
    block_c = 32 if columns <= 65536 else 128
    _column_sum[(triton.cdiv(columns, block_c),)](
        partial, out, parts, columns, ACCUMULATE=accumulate, BLOCK_P=64, BLOCK_C=block_c, num_warps=4
    )
