"""Host side of the wgmma forward: which specialisation, which tensor maps, one launch."""

from __future__ import annotations

import functools
import math
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kernels_native.geometry import LOG2_E, dtype_name
from kernels_native.launch import Kernel, current_stream, kernel
from kernels_native.sm90_config import HEAD_DIMS, LONG, Config, choose, specialisations, split_config, split_plan
from kernels_native.tensor_map import row_map, tensor_map, tma_ready

if TYPE_CHECKING:
    import torch

__all__ = ["HEAD_DIMS", "Config", "choose", "forward", "specialisations", "split_config", "split_plan"]
HEADROOM = 8.0
"""How far, in log2 units, a maximum may be out of date before outputs are rescaled: P stays below 2^8."""
L2_BYTES = 32 << 20
"""Keys and values of one section of heads under causal: about what stays in the H200's 50 MB L2 beside the rest."""
_ADDRESSES = struct.Struct("8Q")
_NUMBERS = struct.Struct("11i 2f 12x")
_PREPARE = struct.Struct("3Q 2i")
_COMBINE = struct.Struct("4Q q 4i")


@functools.cache
def _multiprocessors(device: int) -> int:
    import torch

    return torch.cuda.get_device_properties(device).multi_processor_count


_counters: dict[tuple[int, int], torch.Tensor] = {}


def _counter(device: int, stream: int) -> torch.Tensor:
    """Two zeros that a launch leaves as it found them: launches of one stream share them, since they run in order."""
    import torch

    if torch.cuda.is_current_stream_capturing():
        # Graphs captured from one stream may be replayed at the same time: each gets its own.
        return torch.zeros(2, dtype=torch.int32, device=device)
    found = _counters.get((device, stream))
    if found is None:
        found = _counters[device, stream] = torch.zeros(2, dtype=torch.int32, device=device)
    return found


def _group_map(q: torch.Tensor, dtype: str, group: int, tile_rows: int) -> bytes:
    """Map of q with coordinates (column, head in group, query, key head, batch)."""
    batch, rows, heads, columns = q.shape
    b, t, h, _ = q.stride()
    sizes = (group, rows, heads // group, batch)
    # Nobody follows the stride of a dimension of one, but the driver wants a legal one.
    strides = tuple(2 * step if size > 1 else 16 for size, step in zip(sizes, (h, t, h * group, b), strict=True))
    return tensor_map(dtype, q.data_ptr(), (columns, *sizes), strides, (64, group, tile_rows, 1, 1))


@dataclass(eq=False)
class _Plan:
    """What calls of one geometry share. `maps` keeps tensor maps by addresses and strides."""

    config: Config
    main: Kernel
    prepare: Kernel
    combine: Kernel
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    rows: int
    sequences: int
    tile_rows: int
    splits: int
    numbers: bytes  # the kernel's parameters after the addresses
    grid: tuple[int, int, int]
    merged: tuple[int, ...]  # the merging kernel's parameters after the addresses
    merge_grid: tuple[int, int, int]
    maps: dict[tuple[object, ...], bytes] = field(default_factory=dict)


@functools.lru_cache(maxsize=4096)
def _plan(
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    v_shape: tuple[int, ...],
    dtype: str,
    device: int,
    causal: bool,
    softmax_scale: float,
    sequences: int | None,
    same_lengths: bool,
    config: Config | None,
) -> _Plan:
    """`sequences` counts packed ones, None for a dense batch; `same_lengths`: each has as many keys as queries."""
    varlen = sequences is not None
    rows, heads, head_dim = q_shape[-3:]
    keys, kv_heads, head_dim_v = k_shape[-3], k_shape[-2], v_shape[-1]
    batch = q_shape[0] if sequences is None else sequences
    group = heads // kv_heads
    blocks = _multiprocessors(device)
    tile_rows = splits = each = 0
    aligned = same_lengths if varlen else (keys - rows) % 128 == 0
    kind = head_dim, head_dim_v, causal, varlen, dtype, aligned
    chosen = config or choose(*kind, min(rows, keys) >= LONG)
    if not varlen and (config is None or config.split):
        packed = config or split_config(choose(*kind))
        tile_rows, splits, each = split_plan(rows, keys, heads, kv_heads, batch, blocks, packed.block_m, packed.block_n)
        if config and not splits:  # asked for by name
            tile_rows, splits, each = packed.block_m // group, 1, -(-keys // packed.block_n)
        if splits:
            chosen = packed
    row_tiles = -(-rows // (tile_rows or chosen.block_m))
    if varlen:
        most_tiles = (row_tiles + batch + 1) * heads
    else:
        most_tiles = row_tiles * (kv_heads * splits if splits else heads) * batch
    section = L2_BYTES // (2 * (head_dim + head_dim_v))  # keys of one head
    if not varlen:
        section = min(max(1, section // max(1, keys)) * group, heads * max(batch, 1))
    scale_log2 = softmax_scale * LOG2_E
    numbers = _NUMBERS.pack(
        batch,
        heads,
        group,
        rows,
        keys,
        row_tiles,
        section,
        head_dim_v,
        tile_rows,
        splits,
        each,
        scale_log2,
        HEADROOM / scale_log2,
    )
    lse_shape = (heads, rows) if varlen else (batch, heads, rows)
    total = math.prod(lse_shape)
    return _Plan(
        chosen,
        kernel(chosen.specialisation(), device),
        kernel(chosen.prepare(), device),
        kernel(chosen.combine(), device),
        (*q_shape[:-1], head_dim_v),
        lse_shape,
        rows,
        batch,
        tile_rows,
        splits,
        numbers,
        (min(blocks, most_tiles), 1, 1),
        (total, heads, rows, head_dim_v, splits),
        (-(-total // 8), 1, 1),
    )


def _maps(plan: _Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> bytes:
    """The four tensor maps."""
    config, dtype = plan.config, plan.config.dtype
    if plan.splits:
        q_map = _group_map(q, dtype, q.shape[2] // k.shape[2], plan.tile_rows)
    else:
        q_map = row_map(q, dtype, config.block_m)
    # Without keys nothing is loaded through their maps, but the kernel prefetches them.
    k_map = row_map(k, dtype, config.block_n) if k.numel() else q_map
    v_map = row_map(v, dtype, config.block_n) if v.numel() else q_map
    return q_map + k_map + v_map + row_map(out, dtype, 64)


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    softmax_scale: float,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of validated CUDA tensors in bf16 or fp16; shapes as in `kernels_native.attention`.

    Args:
        q, k, v: head dims are multiples of 8 up to 256.
        softmax_scale: positive.
        config: a specialisation to run instead of `choose`'s (benchmarks, tests).

    Returns:
        out in q's dtype, contiguous; lse in fp32, natural logarithm, `[batch, heads, rows]` or `[heads, tokens]`.
    """
    import torch

    device = q.device.index
    sequences = None if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    # One tensor for both, as self-attention has it: the lengths are equal whatever they are.
    same_lengths = (
        cu_seqlens_q is not None and cu_seqlens_k is not None and cu_seqlens_q.data_ptr() == cu_seqlens_k.data_ptr()
    )
    dtype = dtype_name(q)
    plan = _plan(q.shape, k.shape, v.shape, dtype, device, causal, softmax_scale, sequences, same_lengths, config)
    out = torch.empty(plan.out_shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(plan.lse_shape, dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out, lse
    key = (q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), q.stride(), k.stride(), v.stride())
    maps = plan.maps.get(key)
    if maps is None:
        ready = tma_ready(q), tma_ready(k), tma_ready(v)
        maps = _maps(plan, *ready, out)
        if ready[0] is q and ready[1] is k and ready[2] is v:  # a copy's address tells nothing of the next call's
            if len(plan.maps) >= 256:
                plan.maps.clear()  # the same few addresses come back; what does not must not pile up
            plan.maps[key] = maps
    stream = current_stream(device)
    counter = _counter(device, stream)
    cu_q = cu_k = offsets = partial_out = partial_lse = 0
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        tile_offsets = torch.empty(2 * plan.sequences + 3, dtype=torch.int32, device=q.device)
        cu_q, cu_k, offsets = cu_seqlens_q.data_ptr(), cu_seqlens_k.data_ptr(), tile_offsets.data_ptr()
        plan.prepare.launch((1, 1, 1), _PREPARE.pack(cu_q, cu_k, offsets, plan.sequences, plan.rows), stream)
    if plan.splits:
        parts = torch.empty((plan.splits, *plan.lse_shape, plan.out_shape[-1]), dtype=torch.float32, device=q.device)
        parts_lse = torch.empty((plan.splits, *plan.lse_shape), dtype=torch.float32, device=q.device)
        partial_out, partial_lse = parts.data_ptr(), parts_lse.data_ptr()
    addresses = _ADDRESSES.pack(
        out.data_ptr(), lse.data_ptr(), cu_q, cu_k, offsets, partial_out, partial_lse, counter.data_ptr()
    )
    plan.main.launch(plan.grid, maps + addresses + plan.numbers, stream)
    if plan.splits:
        merged = _COMBINE.pack(partial_out, partial_lse, out.data_ptr(), lse.data_ptr(), *plan.merged)
        plan.combine.launch(plan.merge_grid, merged, stream)
    return out, lse
