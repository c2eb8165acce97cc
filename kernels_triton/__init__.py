"""Triton kernels: FlashAttention and the two phases of block attention residuals.

Names are loaded on first use, so importing the package needs neither torch, triton nor a GPU.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "AttentionArgs": "arguments",
    "attention_arguments": "arguments",
    "attention": "attention_op",
    "attention_backward": "attention_op",
    "attention_forward": "attention_op",
    "attention_unsupported": "attention_op",
    "attnres_phase1": "attnres_attend_op",
    "attnres_phase1_backward": "attnres_attend_op",
    "attnres_phase1_forward": "attnres_attend_op",
    "attnres_phase2": "attnres_merge_op",
    "attnres_phase2_backward": "attnres_merge_op",
    "attnres_phase2_forward": "attnres_merge_op",
    "tune": "attention_op",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
