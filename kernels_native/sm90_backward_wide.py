"""Host side of the wgmma backward for head dims beyond 128 (sm90_backward_wide.cu). No autograd here."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernels_native.backward_call import BackwardCall
from kernels_native.geometry import dtype_name
from kernels_native.jit import Specialisation
from kernels_native.launch import Kernel, current_stream, kernel

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
    if config is None:
        config = choose(q.shape[-1], v.shape[-1], causal, deterministic, dtype_name(q))
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
        block_m=TILE,
        turns=config.panels if config.deterministic else 0,
    )
    if call.empty:
        return call.gradients
    prepare, main, finish = _kernels(config, q.device.index)
    stream = current_stream(q.device.index)
    prepare.launch(call.row_grid, call.row_params(call.value_dim), stream)
    tiles = call.key_tiles(CLUSTER * TILE)
    grid = tiles * call.all_heads * CLUSTER, 1, 1
    main.launch(grid, call.main_params(TILE, tiles, call.rows, L2_BYTES), stream)
    finish.launch(call.row_grid, call.row_params(call.head_dim), stream)
    return call.gradients
