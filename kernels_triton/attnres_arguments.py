"""The arguments of the two phases of block attention residuals: checked in plain torch before any kernel sees them."""

from __future__ import annotations

import math

import torch

from kernels_triton.attnres_common import DEFAULT_EPS, DTYPES, INTERPRET

MAX_BLOCKS = 64
INT32_MAX = 2**31 - 1


def check_eps(eps: float | None) -> float:
    """eps as a float; None stands for `torch.finfo(torch.float32).eps`.

    Raises:
        TypeError: eps is not a number. ValueError: it is negative or not finite.
    """
    if eps is None:
        return DEFAULT_EPS
    if isinstance(eps, bool) or not isinstance(eps, int | float):
        raise TypeError(f"eps is a {type(eps).__name__}: want a float, or None for torch.finfo(torch.float32).eps")
    if not math.isfinite(eps) or eps < 0:
        raise ValueError(f"eps is {eps}: want a finite number that is not negative")
    return float(eps)


def check_phase1(values: torch.Tensor, queries: torch.Tensor) -> None:
    """Raises TypeError or ValueError where values `[N, ..., D]` and queries `[S, D]` do not make a phase-1 call."""
    _check_tensor("values", values)
    _check_tensor("queries", queries)
    if values.dim() < 2:
        raise ValueError(f"values has shape {list(values.shape)}: want [blocks, ..., hidden]")
    if queries.dim() != 2:
        raise ValueError(f"queries has shape {list(queries.shape)}: want [queries, hidden]")
    if queries.shape[1] != values.shape[-1]:
        raise ValueError(f"queries are {queries.shape[1]} wide and values {values.shape[-1]}: want one hidden size")
    if not 1 <= values.shape[0] <= MAX_BLOCKS:
        raise ValueError(f"values holds {values.shape[0]} blocks: want 1 to {MAX_BLOCKS}")
    _check_rows("values", values[0].shape)
    _check_places(values=values, queries=queries)


def check_phase2(
    partial_sum: torch.Tensor, query: torch.Tensor, inter_out: torch.Tensor, inter_lse: torch.Tensor
) -> None:
    """Raises TypeError or ValueError where the four tensors of `attnres_phase2` do not belong together."""
    for name, tensor in (("partial_sum", partial_sum), ("query", query), ("inter_out", inter_out)):
        _check_tensor(name, tensor)
    if not isinstance(inter_lse, torch.Tensor):
        raise TypeError(f"inter_lse is a {type(inter_lse).__name__}: want a torch.Tensor")
    if not inter_lse.is_floating_point():
        raise TypeError(f"inter_lse is {inter_lse.dtype}: want a floating-point dtype")
    if partial_sum.dim() < 1:
        raise ValueError("partial_sum is a scalar: want [..., hidden]")
    hidden = partial_sum.shape[-1]
    if query.shape != (hidden,):
        raise ValueError(f"query has shape {list(query.shape)} and partial_sum is {hidden} wide: want [{hidden}]")
    if inter_out.shape != partial_sum.shape:
        raise ValueError(
            f"inter_out has shape {list(inter_out.shape)} and partial_sum {list(partial_sum.shape)}: want them equal"
        )
    if inter_lse.shape != partial_sum.shape[:-1]:
        raise ValueError(f"inter_lse has shape {list(inter_lse.shape)}: want {list(partial_sum.shape[:-1])}")
    _check_rows("partial_sum", partial_sum.shape)
    _check_places(partial_sum=partial_sum, query=query, inter_out=inter_out, inter_lse=inter_lse)


def check_gradient(name: str, gradient: torch.Tensor | None, shape: torch.Size) -> None:
    """Raises ValueError where an upstream gradient has another shape than its output."""
    if gradient is not None and gradient.shape != shape:
        raise ValueError(f"{name} has shape {list(gradient.shape)}: want {list(shape)}")


def check_buffer(name: str, buffer: torch.Tensor, like: torch.Tensor) -> None:
    """Raises ValueError where a gradient buffer cannot be written in place of `like`'s gradient."""
    if buffer.shape != like.shape or buffer.device != like.device:
        raise ValueError(f"{name} is {list(buffer.shape)} on {buffer.device}: want {list(like.shape)} on {like.device}")
    if not buffer.is_floating_point():
        raise ValueError(f"{name} is {buffer.dtype}: want a floating-point dtype")
    if not buffer.is_contiguous():
        raise ValueError(f"{name} is not contiguous: want a contiguous buffer to write into")


def gradient_buffer(name: str, given: torch.Tensor | None, like: torch.Tensor, accumulate: bool) -> torch.Tensor:
    """The given buffer, checked, or a new one."""
    if given is not None:
        check_buffer(name, given, like)
        return given
    if accumulate:
        raise ValueError(f"accumulate is True and {name} is missing: pass the buffer to add to")
    return like.new_empty(like.shape)


def _check_tensor(name: str, tensor: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}: want a torch.Tensor")
    if tensor.dtype not in DTYPES:
        raise TypeError(f"{name} is {tensor.dtype}: want float32, float16 or bfloat16")


def _check_rows(name: str, shape: torch.Size) -> None:
    if shape[-1] < 1:
        raise ValueError(f"{name} has hidden size {shape[-1]}: want at least 1")
    rows = math.prod(shape[:-1])
    if rows > INT32_MAX - 65536:
        raise ValueError(f"{name} has {rows} rows: want at most {INT32_MAX - 65536}")


def _check_places(**tensors: torch.Tensor) -> None:
    (first, tensor), *others = tensors.items()
    for name, other in others:
        if other.device != tensor.device:
            raise ValueError(f"{name} is on {other.device} and {first} on {tensor.device}: want one device")
    if not tensor.is_cuda and not INTERPRET and not torch.compiler.is_compiling():
        raise ValueError(
            f"{first} is on {tensor.device}: want CUDA tensors "
            "(on a CPU, set TRITON_INTERPRET=1 before triton is imported)"
        )
