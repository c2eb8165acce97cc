"""Does a row fit? Predicted bytes against what is free, before anything is allocated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attnbench.ops.base import Operation

MATERIALISING = ("eager", "compile")
"""Backends that hold whole intermediate tensors, such as the scores; all others need what a fused kernel needs."""


def needed(operation: Operation, case: Any, backend: str, *, checked: bool) -> int:
    """Predicted peak bytes of one row: the larger of the backend's own run and, where still to be made, the check."""
    predicted = operation.memory(case)
    own = predicted["eager" if backend in MATERIALISING else "kernel"]
    return max(own, predicted["check"]) if checked else own


def free_bytes(device: str) -> int:
    """Bytes that an allocation may still take: the driver's free memory plus what this process has cached."""
    if device == "cuda":
        import torch

        free, _ = torch.cuda.mem_get_info()
        return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return host_free_bytes()


def host_free_bytes() -> int:
    """Available host memory by /proc/meminfo; where there is none, no limit."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 1 << 62
