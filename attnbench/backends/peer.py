"""What the peers share: whether their package is here, and loading it."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from attnbench.backends.base import BuildFailed


def missing(module: str, package: str) -> str | None:
    """None where `module` can be found, which imports at most its parents; else how to install `package`."""
    try:
        found = find_spec(module) is not None
    except ModuleNotFoundError:
        found = False
    return None if found else f"not installed: pip install {package}"


def load(module: str, name: str, package: str) -> Any:
    """`name` of a peer's `module`.

    Raises:
        BuildFailed: the package is here but does not import beside this Python, torch or triton, or is another version.
    """
    try:
        return getattr(import_module(module), name)
    except Exception as error:
        raise BuildFailed(
            f"{package} is installed, but {module}.{name} does not load: {type(error).__name__}: {error}"
        ) from error
