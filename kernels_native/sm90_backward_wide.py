"""Host side of the wgmma backward for head dims beyond 128 (sm90_backward_wide.cu). No autograd here."""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernels_native.jit import Specialisation
from kernels_native.launch import Kernel, current_stream, kernel
from kernels_native.sm90_mma import LOG2_E, positive_scale
from kernels_native.tensor_map import row_map, tma_ready

if TYPE_CHECKING:
    import torch

HEAD_DIMS = ((192, 128), (192, 192), (256, 256))
"""Head dims of queries and of values in shared memory; smaller ones are padded with zeros."""
TILE = 64
"""Queries of a tile, and keys of a thread block."""
CLUSTER = 2
"""Thread blocks that share their queries."""
L2_BYTES = 40 << 20
"""Queries, their gradients and the fp32 sums of one section of heads under causal: what stays in the H200's L2."""
_MAIN = struct.Struct("<512s 8Q 7q 9i 2f 28x")
_ROWS = struct.Struct("<11Q 12q 5i f")


@dataclass(frozen=True)
class Config:
    """One specialisation of sm90_backward_wide.cu; the fields are its macros."""

    head_dim: int
    head_dim_v: int
    causal: bool
    deterministic: bool
    dtype: str

    @property
    def panels(self) -> int:
        """Of 64 columns of dQ."""
        return self.head_dim // 64

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: alignment, K, V and the other block's K, Q twice, dO, two tiles of dS and of P, rows
        and barriers.
        """
        panels, values = self.panels, self.head_dim_v // 64
        keys = panels + values + 2
        tiles = 2 * panels + values * (1 if values == 4 else 2) + 4 + 2
        return 1024 + 8192 * (keys + tiles) + 16 * TILE + 17 * 8

    def _options(self, *macros: tuple[str, int]) -> tuple[str, ...]:
        dims = ("HEAD_DIM", self.head_dim), ("HEAD_DIM_V", self.head_dim_v)
        options = tuple(f"-D{name}={value}" for name, value in (*dims, *macros))
        return (*options, "-DATTN_FP16") if self.dtype == "fp16" else options

    def _specialisation(self, entry: str, threads: int, shared: int, *macros: tuple[str, int]) -> Specialisation:
        options = self._options(*macros)
        return Specialisation("sm90_backward_wide.cu", entry, (), threads, shared, "sm90", options)

    def main(self) -> Specialisation:
        macros = ("CAUSAL", int(self.causal)), ("DETERMINISTIC", int(self.deterministic))
        return self._specialisation("sm90_backward_wide", 384, self.shared_bytes, *macros)

    def rows(self) -> tuple[Specialisation, Specialisation]:
        """The kernels before and after: delta, and the rounding of dQ. They depend on head dims and dtype alone."""
        prepare = self._specialisation("sm90_backward_wide_prepare", 256, 0)
        return prepare, self._specialisation("sm90_backward_wide_finish", 256, 0)


@functools.cache
def choose(head_dim: int, value_head_dim: int, causal: bool, deterministic: bool, dtype: str) -> Config:
    """The narrowest specialisation that covers the head dims.

    Raises:
        ValueError: none does.
    """
    for dim, value_dim in HEAD_DIMS:
        if 0 < head_dim <= dim and 0 < value_head_dim <= value_dim:
            return Config(dim, value_dim, causal, deterministic, dtype)
    raise ValueError(f"head dims {head_dim} and {value_head_dim}: the sm90 backward takes 1 to {HEAD_DIMS[-1][0]}")


@functools.cache
def _kernels(config: Config, device: int) -> tuple[Kernel, Kernel, Kernel]:
    prepare, finish = config.rows()
    return kernel(prepare, device), kernel(config.main(), device), kernel(finish, device)


def specialisations() -> Iterator[Specialisation]:
    """Everything that a call can need, each once."""
    configs = [
        choose(*dims, causal, deterministic, dtype)
        for dtype in ("bf16", "fp16")
        for dims in HEAD_DIMS
        for causal in (False, True)
        for deterministic in (False, True)
    ]
    yield from (config.main() for config in configs)
    yield from dict.fromkeys(one for config in configs for one in config.rows())


def _strides(x: torch.Tensor) -> tuple[int, int, int]:
    """Elements between rows, heads and batches of `[batch, rows, heads, columns]` or `[rows, heads, columns]`."""
    s = x.stride()
    return (s[1], s[2], s[0]) if len(s) == 4 else (s[0], s[1], 0)


def _tiles(rows: int, block: int, sequences: int, varlen: bool) -> int:
    """Flat tiles of one head (seqlen.cuh); dense: of one sequence."""
    return rows // block + sequences + 1 if varlen else -(-rows // block)


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
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk and dv (contiguous) of validated CUDA tensors in bf16 or fp16, from the forward's out and lse.

    Args:
        config: a specialisation to run instead of `choose`'s (benchmarks, tests).
    """
    import torch

    varlen = cu_seqlens_q is not None
    head_dim, value_dim = q.shape[-1], v.shape[-1]
    heads, kv_heads, rows, keys = q.shape[-2], k.shape[-2], q.shape[-3], k.shape[-3]
    sequences = cu_seqlens_q.shape[0] - 1 if cu_seqlens_q is not None else q.shape[0]
    dtype = "bf16" if q.dtype == torch.bfloat16 else "fp16"
    if config is None:
        config = choose(head_dim, value_dim, causal, deterministic, dtype)
    device, dim = q.device.index, config.head_dim
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if not sequences and not varlen:
        return dq, dk, dv
    q_positive, scale = positive_scale(q, softmax_scale)
    q, k, v, dout, out = (tma_ready(x) for x in (q_positive, k, v, dout, out))
    lse = lse.contiguous()
    dlse = None if dlse is None else dlse.to(torch.float32).contiguous()

    # The row kernels count one head's tiles over all sequences.
    row_tiles = _tiles(rows, TILE, sequences, varlen) * (1 if varlen else sequences)
    padded = row_tiles * TILE
    sums = torch.empty(heads * padded * (dim + 2), dtype=torch.float32, device=q.device)
    lse2 = sums.data_ptr()
    delta, dq_sum = lse2 + 4 * heads * padded, lse2 + 8 * heads * padded
    panels = heads * row_tiles * config.panels
    turns = torch.empty(panels, dtype=torch.int32, device=q.device) if config.deterministic else None
    turns_address = 0 if turns is None else turns.data_ptr()
    cu_q = cu_seqlens_q.data_ptr() if cu_seqlens_q is not None else 0
    cu_k = cu_seqlens_k.data_ptr() if cu_seqlens_k is not None else 0
    prepare, main, finish = _kernels(config, device)
    stream = current_stream(device)

    def row_params(columns: int) -> bytes:
        pointers = out.data_ptr(), dout.data_ptr(), lse.data_ptr(), 0 if dlse is None else dlse.data_ptr()
        buffers = lse2, delta, dq_sum, turns_address, dq.data_ptr(), cu_q, cu_k
        strides = *_strides(out), *_strides(dout), *_strides(dq), rows, heads * rows, padded
        return _ROWS.pack(*pointers, *buffers, *strides, sequences, rows, keys, row_tiles, columns, softmax_scale)

    all_heads = kv_heads * (1 if varlen else sequences)
    key_tiles = _tiles(keys, TILE * CLUSTER, sequences, varlen)
    bytes_per_head = rows * (heads // kv_heads) * (2 * (head_dim + value_dim) + 4 * dim)
    section = max(1, min(all_heads, L2_BYTES // max(1, bytes_per_head)))
    params = _MAIN.pack(
        b"".join(row_map(x, dtype, TILE) for x in (q, k, v, dout)),
        dk.data_ptr(),
        dv.data_ptr(),
        lse2,
        delta,
        dq_sum,
        turns_address,
        cu_q,
        cu_k,
        *_strides(dk),
        *_strides(dv),
        padded,
        sequences,
        rows,
        keys,
        kv_heads,
        heads // kv_heads,
        key_tiles,
        section,
        head_dim,
        value_dim,
        abs(softmax_scale),
        scale * LOG2_E,
    )
    prepare.launch((row_tiles * heads, 1, 1), row_params(value_dim), stream)
    main.launch((key_tiles * all_heads * CLUSTER, 1, 1), params, stream)
    finish.launch((row_tiles * heads, 1, 1), row_params(head_dim), stream)
    return dq, dk, dv
