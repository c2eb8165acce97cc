"""Benchmark and validate attention kernels: right or wrong, how fast, how close to the limit, better or worse.

The public functions load torch on first use; importing the package needs neither torch nor a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnbench._version import __version__

if TYPE_CHECKING:
    from attnbench.api import attention, attnres_phase1, attnres_phase2

__all__ = ["__version__", "attention", "attnres_phase1", "attnres_phase2"]

_LAZY = ("attention", "attnres_phase1", "attnres_phase2")


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from attnbench import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
