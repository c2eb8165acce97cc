"""The disk cache of compiled kernels: one folder, one cubin and one description per specialisation."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any


def cache_dir() -> Path:
    """Folder of compiled native kernels: `$ATTNBENCH_CACHE/native`, else `attnbench/native` in the XDG cache home."""
    root = os.environ.get("ATTNBENCH_CACHE")
    if root:
        return Path(root) / "native"
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "attnbench" / "native"


def cached_files() -> list[Path]:
    """Every file that the cache holds, temporary files and locks included."""
    folder = cache_dir()
    return sorted(path for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []


def clear_cache() -> int:
    """Delete what the cache holds; returns the bytes that were freed."""
    freed = 0
    for path in cached_files():
        try:
            size = path.stat().st_size
            path.unlink()
        except FileNotFoundError:
            continue
        freed += size
    return freed


def write_atomically(path: Path, data: bytes) -> None:
    """Write `data` so that a reader finds the whole file or none."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        # Rename is atomic within one folder, and the data is on disk before the name is: another process, or this one
        # after a crash, never loads half a cubin. The temporary file is in the same folder since a rename across file
        # systems would be a copy.
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def read_entry(key: str) -> tuple[bytes, dict[str, Any]] | None:
    """Cubin and description stored under `key`, or None where they are absent or damaged."""
    folder = cache_dir()
    try:
        description = json.loads((folder / f"{key}.json").read_text())
        cubin = (folder / f"{key}.cubin").read_bytes()
    except (FileNotFoundError, ValueError):
        return None
    if not isinstance(description, dict) or len(cubin) != description.get("cubin_bytes"):
        return None
    return cubin, description


def write_entry(key: str, cubin: bytes, description: dict[str, Any]) -> None:
    """Store a cubin and its description; the description goes last, so that it vouches for the cubin."""
    folder = cache_dir()
    write_atomically(folder / f"{key}.cubin", cubin)
    write_atomically(
        folder / f"{key}.json", json.dumps({**description, "cubin_bytes": len(cubin)}, indent=1).encode() + b"\n"
    )
