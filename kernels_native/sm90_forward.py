"""Host side of the wgmma forward: which specialisation, which tensor maps, one launch."""

from __future__ import annotations

import functools
import math
import struct
from typing import TYPE_CHECKING

from kernels_native.launch import Kernel, current_stream, kernel
from kernels_native.sm90_config import HEAD_DIMS, Config, choose, specialisations, split_config, split_plan
from kernels_native.tensor_map import row_map, tensor_map, tma_ready

if TYPE_CHECKING:
    import torch

__all__ = ["HEAD_DIMS", "Config", "choose", "forward", "specialisations", "split_config", "split_plan"]
LOG2_E = math.log2(math.e)
HEADROOM = 8.0
"""How far, in log2 units, a maximum may be out of date before outputs are rescaled: P stays below 2^8."""
L2_BYTES = 32 << 20
"""Keys and values of one section of heads under causal: about what stays in the H200's 50 MB L2 beside the rest."""
_PARAMS = struct.Struct("512s 8Q 12i 2f 8x")
_PREPARE = struct.Struct("2Q 2i")
_COMBINE = struct.Struct("4Q q 4i")


@functools.cache
def _multiprocessors(device: int) -> int:
    import torch

    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _kernels(config: Config, device: int) -> tuple[Kernel, Kernel, Kernel]:
    """The forward, the schedule of packed sequences, the merging of splits."""
    return tuple(kernel(s, device) for s in (config.specialisation(), config.prepare(), config.combine()))  # type: ignore[return-value]


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

    varlen = cu_seqlens_q is not None
    head_dim, head_dim_v = q.shape[-1], v.shape[-1]
    dtype = "bf16" if q.dtype == torch.bfloat16 else "fp16"
    device = q.device.index
    heads, kv_heads = q.shape[-2], k.shape[-2]
    rows, keys = q.shape[-3], k.shape[-3]
    batch = cu_seqlens_q.numel() - 1 if cu_seqlens_q is not None else q.shape[0]
    tile_rows = splits = blocks_per_split = 0
    if config is None or config.split:
        given, config = config, config or choose(head_dim, head_dim_v, causal, varlen, dtype)
        if not varlen:
            packed = given or split_config(config)
            tile_rows, splits, blocks_per_split = split_plan(
                rows, keys, heads, kv_heads, batch, _multiprocessors(device), packed.block_m, packed.block_n
            )
            if splits or given:
                config = packed
            if not splits and given:  # asked for by name
                tile_rows, splits, blocks_per_split = (
                    config.block_m // (heads // kv_heads),
                    1,
                    -(-keys // config.block_n),
                )
    out = torch.empty((*q.shape[:-1], head_dim_v), dtype=q.dtype, device=q.device)
    lse = torch.empty((heads, rows) if varlen else (batch, heads, rows), dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out, lse
    q, k, v = tma_ready(q), tma_ready(k), tma_ready(v)
    group = heads // kv_heads
    q_map = _group_map(q, dtype, group, tile_rows) if splits else row_map(q, dtype, config.block_m)
    # Without keys nothing is loaded through their maps, but the kernel prefetches them.
    k_map = row_map(k, dtype, config.block_n // config.cluster) if k.numel() else q_map
    v_map = row_map(v, dtype, config.block_n // config.cluster) if v.numel() else q_map
    main, prepare, combine = _kernels(config, device)
    stream = current_stream(device)
    row_tiles = -(-rows // (tile_rows if splits else config.block_m))
    offsets_address = cu_q_address = cu_k_address = 0
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        offsets = torch.empty(batch + 2, dtype=torch.int32, device=q.device)
        offsets_address = offsets.data_ptr()
        cu_q_address, cu_k_address = cu_seqlens_q.data_ptr(), cu_seqlens_k.data_ptr()
        prepare.launch((1, 1, 1), _PREPARE.pack(cu_q_address, offsets_address, batch, rows), stream)
        most_tiles = (row_tiles + batch + 1) * heads
    else:
        most_tiles = row_tiles * (kv_heads * splits if splits else heads) * batch
    # A pair of blocks shares keys: as two heads of a group, else as two row tiles.
    pair_heads = config.cluster > 1 and group % config.cluster == 0
    if config.cluster > 1 and not pair_heads:
        most_tiles = -(-row_tiles // config.cluster) * config.cluster * heads * batch
    partial_out = partial_lse = out
    if splits:
        partial_out = torch.empty((splits, *lse.shape, head_dim_v), dtype=torch.float32, device=q.device)
        partial_lse = torch.empty((splits, *lse.shape), dtype=torch.float32, device=q.device)
    counter = _counter(device, stream)
    section = min(max(1, L2_BYTES // max(1, 2 * keys * (head_dim + head_dim_v))) * group, heads * batch)
    if pair_heads:
        section = max(1, section // config.cluster)
    params = _PARAMS.pack(
        q_map + k_map + v_map + row_map(out, dtype, 64),
        out.data_ptr(),
        lse.data_ptr(),
        cu_q_address,
        cu_k_address,
        offsets_address,
        partial_out.data_ptr(),
        partial_lse.data_ptr(),
        counter.data_ptr(),
        batch,
        heads,
        group,
        rows,
        keys,
        row_tiles,
        section,
        head_dim_v,
        int(pair_heads),
        tile_rows,
        splits,
        blocks_per_split,
        softmax_scale * LOG2_E,
        HEADROOM / (softmax_scale * LOG2_E),
    )
    grid = min(_multiprocessors(device) // config.cluster * config.cluster, most_tiles)
    main.launch((grid, 1, 1), params, stream)
    if splits:
        total = lse.numel()
        merged = _COMBINE.pack(
            partial_out.data_ptr(),
            partial_lse.data_ptr(),
            out.data_ptr(),
            lse.data_ptr(),
            total,
            heads,
            rows,
            head_dim_v,
            splits,
        )
        combine.launch((-(-total // 8), 1, 1), merged, stream)
    return out, lse
