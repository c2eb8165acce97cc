"""Host side of the wgmma backward: which specialisations, which tensor maps, three launches. No autograd here."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kernels_native.backward_call import BackwardCall
from kernels_native.geometry import dtype_name
from kernels_native.jit import Specialisation
from kernels_native.launch import Kernel, current_stream, kernel

if TYPE_CHECKING:
    import torch

HEAD_DIMS = (64, 128)
"""Head dims in shared memory; smaller ones are padded with zeros."""
BLOCK_N = 128
"""Keys of a thread block."""
L2_BYTES = 40 << 20
"""Queries, their gradients and the fp32 sums of one section of heads under causal: what stays in the H200's L2."""


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
    varlen, rows = cu_seqlens_q is not None, q.shape[-3]
    if config is None:
        wide = is_wide(rows, causal, varlen)
        config = choose(q.shape[-1], v.shape[-1], causal, deterministic, dtype_name(q), wide)
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
        dim=config.head_dim,
        block_m=config.block_m,
        turns=2 if config.deterministic else 0,
    )
    if call.empty:
        return call.gradients
    prepare, main, finish = _kernels(config, q.device.index)
    stream = current_stream(q.device.index)
    prepare.launch(call.row_grid, call.row_params(call.value_dim), stream)
    tiles = call.key_tiles(BLOCK_N)
    main.launch((tiles * call.all_heads, 1, 1), call.main_params(BLOCK_N, tiles, rows, L2_BYTES), stream)
    finish.launch(call.row_grid, call.row_params(call.head_dim), stream)
    return call.gradients
