"""Names of the built-in backends and the operations that each computes; imports nothing, so `validate` stays quick."""

from __future__ import annotations

import re

OPS = ("attention", "attnres_phase1", "attnres_phase2")

BUILTIN: dict[str, tuple[str, ...]] = {
    "eager": OPS,
    "compile": OPS,
    "triton": OPS,
    "sm90_mma": ("attention",),
    "sm90": ("attention",),
    "sdpa_flash": ("attention",),
    "sdpa_cudnn": ("attention",),
    "flex": ("attention",),
    "fa4": ("attention",),
    "fa3": ("attention",),
    "flash_attn_res": ("attnres_phase1", "attnres_phase2"),
    "liger": ("attnres_phase1",),
    "fla": ("attnres_phase1",),
}
"""Backend name → operations it can compute. Whether it takes one particular case is `Backend.supports`' to say."""

_OBJECT = r"[^\W\d]\w*(\.[^\W\d]\w*)*"
_MODULE = re.compile(rf"{_OBJECT}:{_OBJECT}")
_FILE = re.compile(rf"(?P<file>.+\.py):{_OBJECT}")


def custom_file(name: str) -> str | None:
    """The file of a `path/to/file.py:object` backend, None for any other name."""
    match = _FILE.fullmatch(name)
    return match["file"] if match else None


def is_custom(name: str) -> bool:
    """Whether a name has the form of a user's own backend: `package.module:object` or `path/to/file.py:object`."""
    return bool(_MODULE.fullmatch(name) or _FILE.fullmatch(name))


def computes(name: str, op: str) -> bool:
    """Whether a backend can compute an operation at all; a user's own backend is asked when it is loaded."""
    return op in BUILTIN.get(name, OPS)
