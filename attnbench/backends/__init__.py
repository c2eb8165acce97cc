"""Who can compute an operation. `backend(name)` loads one on first use; importing this package costs nothing."""

from __future__ import annotations

import difflib
from functools import cache
from importlib import import_module

from attnbench.backends.base import Backend, BuildFailed, Prepared
from attnbench.backends.names import BUILTIN, is_custom

__all__ = ["Backend", "BuildFailed", "Prepared", "UnknownBackend", "backend"]

_HOME = {
    "eager": "attnbench.backends.eager:EAGER",
    "compile": "attnbench.backends.compiled:COMPILE",
    "triton": "attnbench.backends.triton:TRITON",
    "sm90": "attnbench.backends.native:SM90",
    "sm90_mma": "attnbench.backends.native:SM90_MMA",
    "sdpa_flash": "attnbench.backends.sdpa:FLASH",
    "sdpa_cudnn": "attnbench.backends.sdpa:CUDNN",
    "flex": "attnbench.backends.flex:FLEX",
    "fa4": "attnbench.backends.flash_attention:FA4",
    "fa3": "attnbench.backends.flash_attention:FA3",
    "flash_attn_res": "attnbench.backends.flash_attn_res:FLASH_ATTN_RES",
    "liger": "attnbench.backends.liger:LIGER",
    "fla": "attnbench.backends.fla:FLA",
}


class UnknownBackend(ValueError):
    """No built-in backend has this name and it does not name an object of the user's own."""


@cache
def backend(name: str) -> Backend:
    """The backend called `name`: a built-in one, or `package.module:object` or `path/to/file.py:object`.

    Raises:
        UnknownBackend: no such backend; the message has the nearest name.
        attnbench.backends.custom.LoadError: a user's own backend cannot be loaded or lacks `supports` or `prepare`.
    """
    if is_custom(name):
        from attnbench.backends.custom import load

        return load(name)
    if name not in _HOME:
        near = difflib.get_close_matches(name, _HOME, n=1)
        hint = f"did you mean {near[0]}?" if near else f"want one of {', '.join(_HOME)}."
        raise UnknownBackend(
            f"unknown backend {name!r}: {hint} Your own is written package.module:object or path/to/file.py:object"
        )
    module, attribute = _HOME[name].split(":")
    found: Backend = getattr(import_module(module), attribute)
    return found


def ours(name: str) -> bool:
    """Whether `check` judges this backend: our own kernels, not peers and not PyTorch's."""
    return name in ("triton", "sm90", "sm90_mma")


def judged(name: str) -> bool:
    """Whether this backend's failed check sets an exit code: ours and a user's own do, peers do not."""
    return ours(name) or is_custom(name)


def available() -> list[str]:
    """Names of the built-in backends, in the order of `names.BUILTIN`; a peer's own package may still be missing."""
    return list(BUILTIN)
