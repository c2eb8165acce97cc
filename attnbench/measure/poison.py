"""Uninitialised memory that shows: whatever a kernel reads without writing it first is NaN.

On the CPU PyTorch's own fill mode does it. On a GPU that mode also switches other code to its deterministic variants,
so there the caching allocator's free blocks are filled instead: every later `torch.empty` is cut from them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

_SMALL = 1 << 20
"""Requests below this size come from the allocator's small pool, in segments of 2 MiB."""


def fill_free_blocks(large_bytes: int, small_segments: int = 16) -> None:
    """Leave NaN bytes in `large_bytes` of the allocator's free memory, and in its small pool.

    0xFF in each byte is a NaN in every float dtype and -1 in every integer. Blocks that were free before are given back
    to the driver first, or their old contents would be handed out; what is free beside live tensors cannot be given
    back, and is overwritten where it lies. Less is filled where less is free.
    """
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    kept = [torch.full((_SMALL // 2,), 0xFF, dtype=torch.uint8, device="cuda") for _ in range(4 * small_segments)]
    budget = min(large_bytes, free // 2)
    # Several blocks rather than one: the allocator splits a block only for one request at a time, and best fit would
    # leave the one big block to the first large request.
    size = max(budget // 8, 2 * _SMALL)
    while budget >= size:
        kept.append(torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda"))
        budget -= size
    del kept
    torch.cuda.synchronize()
    _fill_beside_live_tensors()


def _fill_beside_live_tensors() -> None:
    """Write 0xFF over the free blocks of segments that some tensor still holds a part of; nobody owns them."""
    device = torch.cuda.current_device()
    for segment in torch.cuda.memory_snapshot():
        if segment["device"] != device or segment.get("is_expandable") or not segment["allocated_size"]:
            continue
        if tuple(segment["segment_pool_id"]) != (0, 0):  # a captured graph's own memory
            continue
        for block in segment["blocks"]:
            if block["state"] == "inactive":
                torch.as_tensor(_Bytes(block["address"], block["size"]), device="cuda").fill_(0xFF)
    torch.cuda.synchronize()


class _Bytes:
    """Device memory that is no tensor's, for `torch.as_tensor`."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}


@contextlib.contextmanager
def nan_filled(device: str, large_bytes: int = 1 << 28) -> Iterator[None]:
    """Within the block, memory from `torch.empty` starts as NaN, on `device` "cpu" or "cuda"."""
    if device == "cuda":
        fill_free_blocks(large_bytes)
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
