"""Tile sizes of the attention kernels: a table measured on an H200, candidates for tuning, and the choices made."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch

from kernels_triton.arguments import AttentionArgs
from kernels_triton.attention_tiles import INTERPRETED

PASSES = ("forward", "dq", "dkv")


@dataclass(frozen=True)
class TileConfig:
    """How one kernel is cut: query rows and key rows a tile, warps, and stages of its load pipeline.

    `gluon` picks the warp-specialised Hopper kernels, of `num_warps` 4 (a warpgroup's): they own 128 rows of what they
    write, queries in `forward` and `dq`, keys in `dkv`.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    gluon: bool = False


@dataclass(frozen=True)
class ConfigKey:
    """What a choice of tile depends on; head dims are padded, `length` is a power of two from 512 to 4096."""

    kernel: str
    dtype: torch.dtype
    head_dim: int
    value_head_dim: int
    causal: bool
    varlen: bool
    grouped: bool
    length: int

    @property
    def label(self) -> str:
        kind = f"{'varlen' if self.varlen else 'dense'} {'causal' if self.causal else 'full'}"
        group = " grouped" if self.grouped else ""
        dims = (
            f"d{self.head_dim}" if self.head_dim == self.value_head_dim else f"d{self.head_dim}/{self.value_head_dim}"
        )
        return f"{self.kernel} {str(self.dtype).removeprefix('torch.')} {dims} {kind}{group} {self.length}"


def padded(head_dim: int) -> int:
    """The head dim that a tile holds: a power of two of at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


def config_key(kernel: str, args: AttentionArgs) -> ConfigKey:
    longest = max(args.max_seqlen_q or 0, args.max_seqlen_k or 0)
    length = 512
    while length < min(longest, 4096):
        length *= 2
    return ConfigKey(
        kernel=kernel,
        dtype=args.q.dtype,
        head_dim=padded(args.head_dim),
        value_head_dim=padded(args.value_head_dim),
        causal=args.causal,
        varlen=args.varlen,
        grouped=args.heads != args.kv_heads,
        length=length,
    )


_FULL_PRECISION = {
    "forward": (TileConfig(64, 32, 8, 2),),
    "dq": (TileConfig(32, 32, 8, 1),),
    "dkv": (TileConfig(32, 32, 8, 1),),
}
_HALF_PRECISION = {
    ("forward", 64): (TileConfig(64, 128, 4, 3), TileConfig(128, 128, 4, 2, gluon=True)),
    ("forward", 128): (TileConfig(128, 128, 4, 2, gluon=True), TileConfig(64, 64, 4, 3)),
    ("forward", 256): (TileConfig(128, 64, 4, 2, gluon=True), TileConfig(128, 64, 8, 2)),
    ("dq", 64): (TileConfig(128, 64, 4, 3), TileConfig(64, 64, 4, 3)),
    ("dq", 128): (TileConfig(128, 64, 4, 3, gluon=True), TileConfig(128, 64, 8, 3)),
    ("dq", 256): (TileConfig(128, 32, 4, 2, gluon=True), TileConfig(128, 32, 8, 2)),
    ("dkv", 64): (TileConfig(128, 64, 4, 2), TileConfig(64, 64, 4, 3)),
    ("dkv", 128): (TileConfig(64, 128, 4, 2, gluon=True), TileConfig(64, 64, 4, 2)),
    ("dkv", 256): (TileConfig(64, 64, 8, 2),),
}
_chosen: dict[ConfigKey, TileConfig] = {}
_changes = 0


@cache
def _on_hopper() -> bool:
    """Gluon's kernels multiply with wgmma, which only compute capability 9 has."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def candidates(key: ConfigKey) -> tuple[TileConfig, ...]:
    """What `tune` tries, the default first."""
    if INTERPRETED:
        return (TileConfig(32, 32, 4, 1),)
    if key.dtype == torch.float32:
        return _FULL_PRECISION[key.kernel]
    table = _HALF_PRECISION[key.kernel, max(64, key.head_dim, key.value_head_dim)]
    if min(key.head_dim, key.value_head_dim) < 64 or not _on_hopper():
        return tuple(config for config in table if not config.gluon)
    return table


def config_for(key: ConfigKey) -> TileConfig:
    """The tuned choice where there is one, else the table's."""
    return _chosen.get(key) or candidates(key)[0]


def choose(key: ConfigKey, config: TileConfig) -> None:
    """Fixes the tile of every later call with this key in this process."""
    if INTERPRETED:
        raise RuntimeError("tile sizes are fixed under Triton's interpreter")
    global _changes
    _changes += 1
    _chosen[key] = config


def tuned(key: ConfigKey) -> bool:
    """Whether `choose` has fixed this key's tile."""
    return key in _chosen


def record(key: ConfigKey) -> dict[str, Any]:
    """The choice as JSON-ready values."""
    return {**asdict(config_for(key)), "tuned": tuned(key)}


def forget() -> None:
    """Drops every tuned choice."""
    global _changes
    _changes += 1
    _chosen.clear()


def changes() -> int:
    """How often a choice was made or dropped: what was prepared for one count does not hold for another."""
    return _changes
