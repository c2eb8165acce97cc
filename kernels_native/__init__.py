"""CUDA C++ attention for Hopper, and the JIT that builds and loads it.

Names are loaded on first use, so importing the package needs neither torch, CUDA nor a GPU.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "BuildFailed": "jit",
    "Built": "jit",
    "Kernel": "launch",
    "LaunchFailed": "launch",
    "Specialisation": "jit",
    "attention": "attention_op",
    "attention_backward": "attention_op",
    "attention_forward": "attention_op",
    "attention_unsupported": "attention_checks",
    "build": "jit",
    "cached_files": "cache",
    "clear_cache": "cache",
    "current_stream": "launch",
    "describe_all": "catalogue",
    "kernel": "launch",
    "specialisations": "catalogue",
    "tensor_map": "tensor_map",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
