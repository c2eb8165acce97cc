"""Host side of the wgmma backward: which specialisations, which tensor maps, three launches. No autograd here."""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kernels_native.jit import Specialisation
from kernels_native.launch import Kernel, current_stream, kernel
from kernels_native.sm90_mma import LOG2_E, positive_scale
from kernels_native.tensor_map import row_map, tma_ready

if TYPE_CHECKING:
    import torch

HEAD_DIMS = (64, 128)
"""Head dims in shared memory; smaller ones are padded with zeros."""
BLOCK_N = 128
"""Keys of a thread block."""
L2_BYTES = 40 << 20
"""Queries, their gradients and the fp32 sums of one section of heads under causal: what stays in the H200's L2."""
_MAIN = struct.Struct("<512s 8Q 7q 9i 2f 28x")
_ROWS = struct.Struct("<11Q 12q 5i f")


@dataclass(frozen=True)
class Config:
    """One specialisation of sm90_backward.cu; the fields are its macros."""

    head_dim: int
    causal: bool
    deterministic: bool
    dtype: str
    block_m: int
    dq_swap: bool = False

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: alignment, K and V, two tiles of Q, dO and dS, staged dQ, rows and barriers."""
        keys = 2 * BLOCK_N * self.head_dim * 2
        tiles = 2 * 2 * self.block_m * self.head_dim * 2 + 2 * BLOCK_N * self.block_m * 2
        return 1024 + keys + tiles + self.block_m * self.head_dim * 4 + 16 * self.block_m + 13 * 8

    def _options(self, *macros: tuple[str, int]) -> tuple[str, ...]:
        every = (("HEAD_DIM", self.head_dim), ("BLOCK_M", self.block_m), ("DQ_SWAP", int(self.dq_swap)), *macros)
        options = tuple(f"-D{name}={value}" for name, value in every)
        return (*options, "-DATTN_FP16") if self.dtype == "fp16" else options

    def main(self) -> Specialisation:
        options = self._options(("CAUSAL", int(self.causal)), ("DETERMINISTIC", int(self.deterministic)))
        return Specialisation("sm90_backward.cu", "sm90_backward", (), 384, self.shared_bytes, "sm90", options)

    def rows(self) -> tuple[Specialisation, Specialisation]:
        """The kernels before and after: delta, and the rounding of dQ. They depend on tile and dtype alone."""
        prepare, finish = (
            Specialisation("sm90_backward.cu", entry, (), 256, 0, "sm90", self._options())
            for entry in ("sm90_backward_prepare", "sm90_backward_finish")
        )
        return prepare, finish


@functools.cache
def choose(
    head_dim: int, value_head_dim: int, causal: bool, deterministic: bool, dtype: str, wide: bool = False
) -> Config:
    """The measured best configuration (docs/performance.md) for head dims up to 128.

    Args:
        wide: tiles of 80 queries at head dim 128, worth their ragged ends where sequences are long (`is_wide`).

    Raises:
        ValueError: a head dim that no specialisation covers.
    """
    widest = max(head_dim, value_head_dim)
    if not 0 < widest <= HEAD_DIMS[-1]:
        raise ValueError(f"head dims {head_dim} and {value_head_dim}: the sm90 backward takes 1 to {HEAD_DIMS[-1]}")
    padded = next(d for d in HEAD_DIMS if d >= widest)
    base = Config(padded, causal, deterministic, dtype, block_m=8192 // padded)
    return replace(base, block_m=80, dq_swap=True) if wide and padded == 128 and not deterministic else base


def is_wide(rows: int, causal: bool, varlen: bool) -> bool:
    """Whether sequences of `rows` queries are long enough for the wide tiles of `choose`."""
    return not varlen and rows >= (4096 if causal else 8192)


@functools.cache
def _kernels(config: Config, device: int) -> tuple[Kernel, Kernel, Kernel]:
    prepare, finish = config.rows()
    return kernel(prepare, device), kernel(config.main(), device), kernel(finish, device)


def specialisations() -> Iterator[Specialisation]:
    """Everything that a call can need, each once."""
    configs = [
        choose(dim, dim, causal, deterministic, dtype, wide)
        for dtype in ("bf16", "fp16")
        for dim in HEAD_DIMS
        for causal in (False, True)
        for deterministic in (False, True)
        for wide in (False, True)
    ]
    yield from dict.fromkeys(config.main() for config in configs)
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
        wide = is_wide(rows, causal, varlen)
        config = choose(head_dim, value_dim, causal, deterministic, dtype, wide)
    device, block_m, dim = q.device.index, config.block_m, config.head_dim
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if not sequences and not varlen:
        return dq, dk, dv
    q_positive, scale = positive_scale(q, softmax_scale)
    q, k, v, dout, out = (tma_ready(x) for x in (q_positive, k, v, dout, out))
    lse = lse.contiguous()
    dlse = None if dlse is None else dlse.to(torch.float32).contiguous()

    # The row kernels count one head's tiles over all sequences.
    row_tiles = _tiles(rows, block_m, sequences, varlen) * (1 if varlen else sequences)
    padded = row_tiles * block_m
    sums = torch.empty(heads * padded * (dim + 2), dtype=torch.float32, device=q.device)
    lse2 = sums.data_ptr()
    delta, dq_sum = lse2 + 4 * heads * padded, lse2 + 8 * heads * padded
    turns = torch.empty(heads * row_tiles * 2, dtype=torch.int32, device=q.device) if deterministic else None
    turns_address = 0 if turns is None else turns.data_ptr()
    cu_q = cu_seqlens_q.data_ptr() if cu_seqlens_q is not None else 0
    cu_k = cu_seqlens_k.data_ptr() if cu_seqlens_k is not None else 0
    prepare, main, finish = _kernels(config, device)
    stream = current_stream(device)

    def row_params(columns: int) -> bytes:
        return _ROWS.pack(
            out.data_ptr(),
            dout.data_ptr(),
            lse.data_ptr(),
            0 if dlse is None else dlse.data_ptr(),
            lse2,
            delta,
            dq_sum,
            turns_address,
            dq.data_ptr(),
            cu_q,
            cu_k,
            *_strides(out),
            *_strides(dout),
            *_strides(dq),
            rows,
            heads * rows,
            padded,
            sequences,
            rows,
            keys,
            row_tiles,
            columns,
            softmax_scale,
        )

    group = heads // kv_heads
    all_heads = kv_heads * (1 if varlen else sequences)
    key_tiles = _tiles(keys, BLOCK_N, sequences, varlen)
    bytes_per_head = rows * group * (2 * (head_dim + value_dim) + 4 * dim)
    params = _MAIN.pack(
        row_map(q, dtype, block_m)
        + row_map(k, dtype, BLOCK_N)
        + row_map(v, dtype, BLOCK_N)
        + row_map(dout, dtype, block_m),
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
        group,
        key_tiles,
        max(1, min(all_heads, L2_BYTES // max(1, bytes_per_head))),
        head_dim,
        value_dim,
        abs(softmax_scale),
        scale * LOG2_E,
    )
    prepare.launch((row_tiles * heads, 1, 1), row_params(value_dim), stream)
    main.launch((key_tiles * all_heads, 1, 1), params, stream)
    finish.launch((row_tiles * heads, 1, 1), row_params(head_dim), stream)
    return dq, dk, dv
