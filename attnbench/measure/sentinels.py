"""Ten kernels from 5 µs to 10 ms whose times two clocks should agree on: copies and matmuls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

COPIES_KIB = (1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20)
MATMULS = (1024, 2048, 4096, 8192, 16384)
NAMES = (*(f"copy {kib >> 10} MiB" for kib in COPIES_KIB), *(f"matmul {n}" for n in MATMULS))


def sentinels() -> Iterator[tuple[str, Callable[[], Any]]]:
    """(name, call) of each, its memory held only as long as the call is; matmuls are square, in bf16."""
    import torch

    for name, kib in zip(NAMES, COPIES_KIB, strict=False):
        source = torch.randn(kib << 8, device="cuda")
        target = torch.empty_like(source)
        yield name, partial(target.copy_, source)
    for name, n in zip(NAMES[len(COPIES_KIB) :], MATMULS, strict=True):
        a = torch.randn(n, n, device="cuda", dtype=torch.bfloat16)
        out = torch.empty_like(a)
        yield name, partial(torch.mm, a, a, out=out)
