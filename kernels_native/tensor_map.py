"""Tensor maps: what TMA knows about a tensor in global memory. Encoding costs about 15 µs, so they are cached."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from kernels_native.launch import LaunchFailed

if TYPE_CHECKING:
    import torch

ITEMSIZE = 2
_MOST = 4096
_maps: dict[tuple[Any, ...], bytes] = {}


def tensor_map(
    dtype: str, address: int, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], swizzle: int = 128
) -> bytes:
    """The 128 bytes of a tiled tensor map over 16-bit elements; elements outside the tensor read as zero.

    Args:
        dtype: "bf16" or "fp16".
        address: device address, a multiple of 16.
        shape: elements per dimension, innermost first; 1 to 2^32.
        strides: bytes between neighbours of each dimension but the innermost (whose elements are contiguous); multiples
            of 16 below 2^40.
        box: elements per dimension of one copy, innermost first; at most 256 each.
        swizzle: 128, 64 or 32 bytes, or 0 for none; the box's innermost extent must not exceed it.

    Raises:
        LaunchFailed: the driver refused; the message has every value.
    """
    key = (dtype, address, shape, strides, box, swizzle)
    found = _maps.get(key)
    if found is None:
        if len(_maps) >= _MOST:
            # Training loops see the same few addresses again; a sweep over shapes would otherwise grow without end.
            _maps.clear()
        found = _maps[key] = _encode(*key)
    return found


def _encode(
    dtype: str, address: int, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], swizzle: int
) -> bytes:
    from cuda.bindings import driver

    kinds = driver.CUtensorMapDataType
    kind = {
        "bf16": kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        "fp16": kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
    }[dtype]
    swizzles = driver.CUtensorMapSwizzle
    size = driver.cuuint64_t
    count = driver.cuuint32_t
    error, encoded = driver.cuTensorMapEncodeTiled(
        kind,
        len(shape),
        address,
        [size(n) for n in shape],
        [size(n) for n in strides],
        [count(n) for n in box],
        [count(1)] * len(shape),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        {
            0: swizzles.CU_TENSOR_MAP_SWIZZLE_NONE,
            32: swizzles.CU_TENSOR_MAP_SWIZZLE_32B,
            64: swizzles.CU_TENSOR_MAP_SWIZZLE_64B,
            128: swizzles.CU_TENSOR_MAP_SWIZZLE_128B,
        }[swizzle],
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if error != driver.CUresult.CUDA_SUCCESS:
        raise LaunchFailed(
            f"tensor map refused with {error.name}: {dtype} at address {address:#x} (want a multiple of 16), shape "
            f"{shape} (want 1 to 2^32), strides {strides} bytes (want multiples of 16 below 2^40), box {box} (want at "
            f"most 256, the innermost at most {swizzle or 256} bytes), swizzle {swizzle}"
        )
    return ctypes.string_at(encoded.getPtr(), 128)


def tma_ready(x: torch.Tensor) -> torch.Tensor:
    """`x` where TMA can address it (contiguous innermost dimension, 16-byte address and strides), else a copy."""
    strides = x.stride()
    if strides[-1] == 1 and x.data_ptr() % 16 == 0:
        for size, stride in zip(x.shape[:-1], strides, strict=False):
            if size > 1 and (stride <= 0 or stride % 8 or stride >= 2**39):
                break
        else:
            return x
    import torch

    return x.clone(memory_format=torch.contiguous_format)


def row_map(x: torch.Tensor, dtype: str, box_rows: int) -> bytes:
    """Map with coordinates (column, row, head, batch) of `[batch, rows, heads, columns]` or packed
    `[rows, heads, columns]`; boxes are 64 columns of `box_rows` rows of one head. An empty tensor has no map: zeros,
    for a kernel that will not load from it.
    """
    shape: tuple[int, ...] = x.shape
    strides = x.stride()
    if len(shape) == 3:
        shape, strides = (1, *shape), (0, *strides)
    batch, rows, heads, columns = shape
    if not batch * rows * heads * columns:
        return bytes(128)
    # Nobody follows the stride of a dimension of one, but the driver wants a legal one.
    steps = (
        2 * strides[1] if rows > 1 else 16,
        2 * strides[2] if heads > 1 else 16,
        2 * strides[0] if batch > 1 else 16,
    )
    return tensor_map(dtype, x.data_ptr(), (columns, rows, heads, batch), steps, (64, box_rows, 1, 1))
