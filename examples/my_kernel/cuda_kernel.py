"""Your own `.cu` as a backend.

attnbench check --backend examples/my_kernel/cuda_kernel.py:backend
attnbench run scenarios/smoke.yaml --backend examples/my_kernel/cuda_kernel.py:backend
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from attnbench.backends.custom_cuda import CudaLaunch, from_cuda

HEAD_DIM = 64
WARPS = 4


class Strides(ctypes.Structure):
    """As in row_attention.cu."""

    _fields_ = [(name, ctypes.c_int64) for name in ("batch", "row", "head")]

    @classmethod
    def of(cls, tensor: Any) -> Strides:
        return cls(*tensor.stride()[:3])


def unsupported(case: Any, device: str) -> str | None:
    """What this kernel does not take: the reason stands in tables and records."""
    if case.layout != "dense":
        return "takes dense input only"
    if case.dtype != "bf16" or case.head_dim != HEAD_DIM or case.dv != HEAD_DIM:
        return f"takes bf16 with head dim {HEAD_DIM} only"
    return None


launch = CudaLaunch(
    source=Path(__file__).with_name("row_attention.cu"),
    entry=f"row_attention<{HEAD_DIM}>",
    threads=32 * WARPS,
    grid=lambda t: (-(-t.q.shape[1] // WARPS), t.q.shape[2], t.q.shape[0]),
    arguments=lambda t: (
        t.q,
        t.k,
        t.v,
        t.out,
        t.lse,
        Strides.of(t.q),
        Strides.of(t.k),
        Strides.of(t.v),
        t.q.shape[1],
        t.k.shape[1],
        t.q.shape[2],
        t.q.shape[2] // t.k.shape[2],
        float(HEAD_DIM**-0.5 if t.softmax_scale is None else t.softmax_scale),
        bool(t.causal),
    ),
)
backend = from_cuda(launch, name="row_attention", supports=unsupported)
