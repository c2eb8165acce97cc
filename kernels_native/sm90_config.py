"""Which specialisation of sm90_forward.cu a call takes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from kernels_native.jit import Specialisation

HEAD_DIMS = (64, 96, 128, 192, 256)
LONG = 8192
"""Keys from which on the third warpgroup pays at head dim 128 without a mask."""


@dataclass(frozen=True)
class Config:
    """One specialisation of sm90_forward.cu; the fields are its macros."""

    head_dim: int
    head_dim_v: int
    causal: bool
    varlen: bool
    dtype: str
    block_n: int = 128
    warpgroups: int = 2
    stages: int = 2
    q_stages: int = 2
    split: bool = False
    ahead: bool = True
    dynamic: bool = True
    pingpong: bool = True
    diagonal_halves: bool = False
    q_registers: bool = False
    rescale_early: bool = False
    exp_first: bool = True
    quick: bool = False

    @property
    def block_m(self) -> int:
        return 64 * self.warpgroups

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: alignment, Q and O, K and V, barriers and tiles."""
        panels, panels_v = -(-self.head_dim // 64), -(-self.head_dim_v // 64)
        q = self.q_stages * max(panels, panels_v) * self.block_m * 128
        kv = self.stages * (panels + panels_v) * self.block_n * 128
        return 1024 + q + kv + 48 + self.q_stages * 48 + self.stages * 32

    def specialisation(self) -> Specialisation:
        macros = {
            "HEAD_DIM": self.head_dim,
            "HEAD_DIM_V": self.head_dim_v,
            "BLOCK_N": self.block_n,
            "WARPGROUPS": self.warpgroups,
            "STAGES": self.stages,
            "Q_STAGES": self.q_stages,
            "CAUSAL": int(self.causal),
            "VARLEN": int(self.varlen),
            "SPLIT": int(self.split),
            "AHEAD": int(self.ahead and self.q_stages > 1),
            "DYNAMIC": int(self.dynamic),
            "PINGPONG": int(self.pingpong),
            "DIAGONAL_HALVES": int(self.causal and self.diagonal_halves),
            "Q_REGISTERS": int(self.q_registers),
            "RESCALE_EARLY": int(self.rescale_early),
            "EXP_FIRST": int(self.exp_first),
            "QUICK": int(self.quick),
        }
        options = [f"-D{name}={value}" for name, value in macros.items()]
        if self.dtype == "fp16":
            options.append("-DATTN_FP16")
        return Specialisation(
            source="sm90_forward.cu",
            entry="sm90_forward",
            threads=128 * (self.warpgroups + 1),
            shared_bytes=self.shared_bytes,
            backend="sm90",
            options=tuple(options),
        )

    def combine(self) -> Specialisation:
        """The kernel that merges splits."""
        return Specialisation(
            source="sm90_forward_combine.cu",
            entry="sm90_forward_combine",
            threads=256,
            backend="sm90",
            options=("-DATTN_FP16",) if self.dtype == "fp16" else (),
        )

    def prepare(self) -> Specialisation:
        """The kernel that orders packed sequences and counts their row tiles."""
        return Specialisation(
            source="sm90_forward_prepare.cu",
            entry="sm90_forward_prepare",
            threads=1024,
            backend="sm90",
            options=(f"-DBLOCK_M={self.block_m}",),
        )


@functools.cache
def choose(
    head_dim: int,
    head_dim_v: int,
    causal: bool,
    varlen: bool,
    dtype: str,
    aligned: bool = False,
    long: bool = False,
) -> Config:
    """The measured best configuration (docs/performance.md) for head dims up to 256.

    Args:
        aligned: keys - queries is a multiple of 128 in every sequence, so that under causal every tile ends with its
            diagonal block.
        long: there are `LONG` queries and keys or more, so that ragged tiles of 192 queries by 80 keys do not matter.

    Raises:
        ValueError: a head dim that no specialisation covers.
    """
    if not 0 < max(head_dim, head_dim_v) <= HEAD_DIMS[-1]:
        raise ValueError(f"head dims {head_dim} and {head_dim_v}: sm90 takes 1 to {HEAD_DIMS[-1]}")
    padded = next(d for d in HEAD_DIMS if d >= head_dim)
    padded_v = padded if head_dim == head_dim_v else next(d for d in HEAD_DIMS if d >= head_dim_v)
    base = Config(padded, padded_v, causal, varlen, dtype)
    widest = max(padded, padded_v)
    if widest == 64:
        return replace(base, warpgroups=2 if varlen else 3, quick=True)
    if (padded, padded_v) == (128, 128):
        base = replace(base, quick=True)
        if long and not causal and not varlen:
            return replace(base, warpgroups=3, block_n=80, pingpong=False)
        return replace(base, q_registers=causal or not varlen, diagonal_halves=causal and aligned)
    if widest <= 128:
        return replace(base, quick=True)
    if widest == 192:
        return replace(base, block_n=112 if padded_v == 192 else 128, q_stages=1, pingpong=False, rescale_early=True)
    return replace(base, block_n=80, q_stages=1, pingpong=False, rescale_early=True)


@functools.cache
def split_config(config: Config) -> Config:
    """The same for few queries: 128 rows a tile."""
    return replace(config, split=True, warpgroups=2, q_registers=False, diagonal_halves=False)


def specialisations() -> Iterator[Specialisation]:
    """Everything that a call can need, each once."""
    dims = [(d, d) for d in HEAD_DIMS] + [(192, 128)]
    kinds = [
        (d, dv, causal, varlen, dtype, aligned)
        for dtype in ("bf16", "fp16")
        for d, dv in dims
        for causal in (False, True)
        for varlen in (False, True)
        for aligned in (False, True)
    ]
    configs = [choose(*kind, long) for kind in kinds for long in (False, True)]
    dense = [split_config(choose(*kind)) for kind in kinds if not kind[3]]
    yield from dict.fromkeys(config.specialisation() for config in configs + dense)
    yield from dict.fromkeys(one for config in configs for one in (config.prepare(), config.combine()))


def split_plan(
    rows: int, keys: int, heads: int, kv_heads: int, batch: int, blocks: int, block_m: int, block_n: int
) -> tuple[int, int, int]:
    """(queries a tile, splits, key blocks a split) for few queries over many keys; splits 0: not worth it.

    With a group's heads as rows of one tile, keys and values are read once a group; splitting the keys occupies all
    `blocks` multiprocessors.
    """
    group = heads // kv_heads
    if group > block_m or not rows * keys * batch:
        return 0, 0, 0
    tile_rows = min(block_m // group, 256)
    plain = -(-rows // block_m) * heads * batch
    packed = -(-rows // tile_rows) * kv_heads * batch
    key_blocks = -(-keys // block_n)
    splits = max(1, min(blocks // packed, key_blocks // 4))
    each = -(-key_blocks // splits)
    splits = -(-key_blocks // each)
    if (rows <= 64 and (2 * packed <= plain or splits > 1)) or (2 * plain <= blocks and splits > 1):
        return tile_rows, splits, each
    return 0, 0, 0
