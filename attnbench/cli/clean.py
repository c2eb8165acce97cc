"""`attnbench clean`: empties caches. Stored runs are never touched."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from attnbench.errors import UserError


def clean(*, triton: bool, dry_run: bool) -> int:
    """Delete the compiled native kernels, and on demand Triton's own cache; print what went and how large it was."""
    from kernels_native.cache import cache_dir

    places = [("native kernels", cache_dir())]
    if triton:
        places.append(("Triton's cache", triton_cache_dir()))
    verb = "would free" if dry_run else "freed"
    for what, folder in places:
        print(f"{what}: {verb} {megabytes(empty(folder, dry_run=dry_run))} in {folder}")
    if not triton:
        print("Triton's own cache, which other projects share, is left alone; --triton empties it too.")
    return 0


def triton_cache_dir() -> Path:
    """Where Triton keeps compiled kernels and tuning results: `$TRITON_CACHE_DIR`, else `~/.triton/cache`."""
    named = os.environ.get("TRITON_CACHE_DIR")
    return Path(named) if named else Path(os.environ.get("TRITON_HOME") or Path.home()) / ".triton" / "cache"


def empty(folder: Path, *, dry_run: bool) -> int:
    """Delete all that `folder` holds, but not the folder; returns its size in bytes. Links are not followed.

    Raises:
        UserError: something cannot be deleted.
    """
    freed = 0
    for entry in sorted(folder.iterdir()) if folder.is_dir() else []:
        freed += size(entry)
        if dry_run:
            continue
        try:
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(f"cannot delete {error.filename or entry}: {error.strerror}") from None
    return freed


def size(path: Path) -> int:
    """Bytes of a file, or of all files below a folder."""
    if path.is_symlink() or not path.is_dir():
        return path.lstat().st_size
    return sum(file.lstat().st_size for file in path.rglob("*") if not file.is_dir())


def megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"
