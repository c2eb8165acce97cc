"""Host side of the mma.sync kernels: which specialisation, which tensor maps, which launches. No autograd here."""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kernels_native.backward_call import BackwardCall
from kernels_native.geometry import LOG2_E, dtype_name, flat_tiles, positive_scale, section
from kernels_native.jit import Specialisation
from kernels_native.launch import Kernel, current_stream, kernel
from kernels_native.tensor_map import row_map, tma_ready

if TYPE_CHECKING:
    import torch

HEAD_DIMS = (64, 128)
"""Head dims in shared memory; smaller ones are padded with zeros."""
L2_BYTES = 32 << 20
"""What one section of heads reads again and again under causal should stay in the H200's 50 MB L2."""
BLOCK_M = 64
"""Query tile of the backward kernels (kBlockM there)."""
BLOCK_N = 128
"""Key tile of the backward kernel."""
_POINTERS = struct.Struct("<4Q")
_TAIL = struct.Struct("<5q 8i f 20x")


@dataclass(frozen=True)
class ForwardTile:
    """Template arguments of the forward kernel beside head dim and mask: see sm90_mma_forward.cu."""

    block_m: int = 128
    block_n: int = 64
    warps: int = 4
    blocks: int = 2
    q_registers: bool = False
    lazy: int = 1


TILES = {64: ForwardTile(block_n=96), 128: ForwardTile(block_n=48)}
"""The measured best tile by padded head dim."""


def padded_head_dim(head_dim: int, value_head_dim: int) -> int:
    """The head dim that a call takes in shared memory; larger than any of HEAD_DIMS where it does not fit."""
    widest = max(head_dim, value_head_dim)
    return next((d for d in HEAD_DIMS if d >= widest), widest)


def _options(dtype: str) -> tuple[str, ...]:
    return ("-DATTN_FP16",) if dtype == "fp16" else ()


def _flag(value: bool) -> str:
    return "true" if value else "false"


def forward_specialisation(dim: int, causal: bool, dtype: str, tile: ForwardTile | None = None) -> Specialisation:
    """The forward kernel for a padded head dim, `dtype` "bf16" or "fp16"."""
    t = tile or TILES[dim]
    return Specialisation(
        "sm90_mma_forward.cu",
        "attention_forward",
        (
            str(dim),
            str(t.block_m),
            str(t.block_n),
            str(t.warps),
            str(t.blocks),
            _flag(causal),
            _flag(t.q_registers),
            str(t.lazy),
        ),
        threads=32 * t.warps,
        shared_bytes=2 * dim * (t.block_m + 4 * t.block_n),
        backend="sm90_mma",
        options=_options(dtype),
    )


def backward_specialisations(dim: int, causal: bool, deterministic: bool, dtype: str) -> tuple[Specialisation, ...]:
    """Preprocess, main and postprocess kernels for a padded head dim."""
    options = _options(dtype)
    shared_bytes = 2 * (2 * BLOCK_N * dim + 4 * BLOCK_M * dim + 3 * BLOCK_N * BLOCK_M)
    source, backend = "sm90_mma_backward.cu", "sm90_mma"
    arguments = (str(dim), str(BLOCK_N), _flag(causal), _flag(deterministic))
    return (
        Specialisation(source, "preprocess", (str(dim),), 256, 0, backend, options),
        Specialisation(source, "attention_backward", arguments, 2 * BLOCK_N, shared_bytes, backend, options),
        Specialisation(source, "postprocess", (str(dim), str(BLOCK_N)), 2 * BLOCK_N, 0, backend, options),
    )


def specialisations() -> Iterator[Specialisation]:
    """Everything that a call can need, each once."""
    seen = set()
    for dtype in ("bf16", "fp16"):
        for dim in HEAD_DIMS:
            for causal in (False, True):
                every = [forward_specialisation(dim, causal, dtype)]
                for deterministic in (False, True):
                    every += backward_specialisations(dim, causal, deterministic, dtype)
                for one in every:
                    if one not in seen:
                        seen.add(one)
                        yield one


@functools.cache
def _backward_kernels(dim: int, causal: bool, deterministic: bool, dtype: str, device: int) -> tuple[Kernel, ...]:
    return tuple(kernel(one, device) for one in backward_specialisations(dim, causal, deterministic, dtype))


@dataclass(frozen=True)
class _Plan:
    """What forward calls of one shape share."""

    kernel: Kernel | None
    """None: there is nothing to compute."""
    grid: tuple[int, int, int]
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    tile: ForwardTile
    dtype: str
    tail: bytes
    """The parameters from the strides on."""
    maps: dict[tuple[Any, ...], bytes] = field(default_factory=dict)


_plans: dict[tuple[Any, ...], _Plan] = {}
_MOST = 4096
"""Entries of a cache before it starts anew; a sweep over shapes would otherwise grow it without end."""


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    causal: bool,
    softmax_scale: float,
    tile: ForwardTile | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out (contiguous) and lse of validated CUDA tensors in bf16 or fp16; shapes as in `kernels_native.attention`."""
    device = q.get_device()
    cu_q = cu_k = packed = 0
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        cu_q, cu_k, packed = cu_seqlens_q.data_ptr(), cu_seqlens_k.data_ptr(), cu_seqlens_q.shape[0]
    key = (q.shape, k.shape, v.shape, q.dtype, device, packed, causal, softmax_scale, tile)
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= _MOST:
            _plans.clear()
        plan = _plans[key] = _plan(q, k, v, packed, causal, softmax_scale, tile)
    out, lse = q.new_empty(plan.out_shape), q.new_empty(plan.lse_shape, dtype=_float32())
    if plan.kernel is None:
        return out, lse
    if softmax_scale < 0:
        q = -q
    place = (q.data_ptr(), k.data_ptr(), v.data_ptr(), q.stride(), k.stride(), v.stride())
    maps = plan.maps.get(place)
    if maps is None:
        ready = tma_ready(q), tma_ready(k), tma_ready(v)
        block_n = plan.tile.block_n
        sizes = plan.tile.block_m, block_n, block_n
        maps = b"".join(row_map(x, plan.dtype, rows) for x, rows in zip(ready, sizes, strict=True))
        if ready[0] is q and ready[1] is k and ready[2] is v:
            if len(plan.maps) >= _MOST:
                plan.maps.clear()
            plan.maps[place] = maps
    params = maps + _POINTERS.pack(out.data_ptr(), lse.data_ptr(), cu_q, cu_k) + plan.tail
    plan.kernel.launch(plan.grid, params, current_stream(device))
    return out, lse


@functools.cache
def _float32() -> torch.dtype:
    import torch

    return torch.float32


def _plan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    packed: int,
    causal: bool,
    softmax_scale: float,
    tile: ForwardTile | None,
) -> _Plan:
    """`packed`: entries of cu_seqlens, 0 for a dense call."""
    heads, kv_heads, rows, keys = q.shape[-2], k.shape[-2], q.shape[-3], k.shape[-3]
    head_dim, value_dim = q.shape[-1], v.shape[-1]
    sequences = packed - 1 if packed else q.shape[0]
    outer = 1 if packed else sequences
    dim = padded_head_dim(head_dim, value_dim)
    t = tile or TILES[dim]
    tiles = flat_tiles(rows, t.block_m, sequences, bool(packed))
    group = heads // kv_heads
    grid = tiles * heads * outer
    dtype = dtype_name(q)
    tail = _TAIL.pack(
        heads * value_dim,
        value_dim,
        rows * heads * value_dim,
        rows,
        heads * rows,
        sequences,
        rows,
        keys,
        heads,
        group,
        tiles,
        section(kv_heads * outer, _typical(keys, sequences, packed) * 2 * (head_dim + value_dim), L2_BYTES) * group,
        value_dim,
        positive_scale(q[:0], softmax_scale)[1] * LOG2_E,
    )
    return _Plan(
        kernel=kernel(forward_specialisation(dim, causal, dtype, tile), q.get_device()) if grid else None,
        grid=(grid, 1, 1),
        out_shape=(*q.shape[:-1], value_dim),
        lse_shape=(heads, rows) if packed else (sequences, heads, rows),
        tile=t,
        dtype=dtype,
        tail=tail,
    )


def _typical(rows: int, sequences: int, packed: int) -> int:
    """Rows that the blocks which run at one time go through: a dense sequence's, or a packed one's on average."""
    return -(-rows // max(1, sequences)) if packed else rows


def backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    causal: bool,
    softmax_scale: float,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk and dv (contiguous) from the forward's out and lse; three launches."""
    call = BackwardCall(
        dout,
        dlse,
        q,
        k,
        v,
        out,
        lse,
        cu_seqlens_q,
        cu_seqlens_k,
        softmax_scale,
        dim=padded_head_dim(q.shape[-1], v.shape[-1]),
        block_m=BLOCK_M,
        turns=1 if deterministic else 0,
        cleared=True,
    )
    if call.empty:
        return call.gradients
    device = q.device.index
    preprocess, main, postprocess = _backward_kernels(call.dim, causal, deterministic, dtype_name(q), device)
    stream = current_stream(device)
    preprocess.launch(call.row_grid, call.row_params(call.value_dim), stream)
    tiles, typical = call.key_tiles(BLOCK_N), _typical(call.rows, call.sequences, int(call.varlen))
    main.launch((tiles * call.all_heads, 1, 1), call.main_params(BLOCK_N, tiles, typical, L2_BYTES), stream)
    postprocess.launch(call.row_grid, call.row_params(call.head_dim), stream)
    return call.gradients
