"""What a run was: commit, uncommitted changes, kernel sources, versions and command line. Imports no torch."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

KERNEL_PACKAGES = ("kernels_native", "kernels_triton")
PACKAGES = (
    "torch",
    "triton",
    "cuda-core",
    "cuda-bindings",
    "numpy",
    "nvidia-ml-py",
    "nvidia-cudnn-cu13",
    "nvidia-cudnn-cu12",
    "flash-attn-4",
    "nvidia-cutlass-dsl",
    "flash-attn-3",
    "flash-attn",
    "flash-attn-res",
    "liger-kernel",
    "fla-core",
)
_SOURCES = {".py", ".cu", ".cuh", ".h", ".cubin"}


def project_root() -> Path:
    """The folder that holds the `attnbench` package."""
    return Path(__file__).resolve().parents[2]


def git_state(root: Path | None = None) -> dict[str, Any]:
    """`commit`, `branch`, `commit_time`, `dirty` and `diff_hash` of the repository at `root`; all None without git.

    `diff_hash` covers `git diff HEAD` and the contents of untracked files that git does not ignore, so an edited and a
    newly added kernel both change it; it is None for a clean tree.
    """
    root = root or project_root()
    empty = {"commit": None, "branch": None, "commit_time": None, "dirty": None, "diff_hash": None}
    commit = _git(root, "rev-parse", "HEAD")
    # A package installed into some other repository's tree (its .venv, say) is not that repository's code.
    if commit is None or _git(root, "ls-files", "--error-unmatch", "attnbench/__init__.py") is None:
        return empty
    diff = _git_bytes(root, "diff", "HEAD", "--no-ext-diff", "--binary") or b""
    untracked = (_git_bytes(root, "ls-files", "--others", "--exclude-standard", "-z") or b"").split(b"\0")
    digest = hashlib.sha256(diff)
    names = sorted(name for name in untracked if name)
    for name in names:
        digest.update(b"\0" + name + b"\0")
        path = root / os.fsdecode(name)
        if path.is_file():
            digest.update(path.read_bytes())
    dirty = bool(diff or names)
    return {
        "commit": commit,
        "branch": _git(root, "symbolic-ref", "--short", "-q", "HEAD"),
        "commit_time": _git(root, "show", "-s", "--format=%cI", "HEAD"),
        "dirty": dirty,
        "diff_hash": digest.hexdigest()[:16] if dirty else None,
    }


def kernel_hash(extra: Iterable[Path] = ()) -> str:
    """16 hex digits over every source file of the kernel packages and of `extra` (a user's own kernels)."""
    files: list[Path] = [Path(p) for p in extra]
    for package in KERNEL_PACKAGES:
        spec = importlib.util.find_spec(package)
        for place in (spec.submodule_search_locations or []) if spec else []:
            files += [p for p in Path(place).rglob("*") if p.suffix in _SOURCES and "__pycache__" not in p.parts]
    digest = hashlib.sha256()
    for path in sorted(set(files), key=lambda p: (p.parent.name, p.name, str(p))):
        digest.update(f"{path.parent.name}/{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def versions() -> dict[str, str]:
    """Versions of what decides the numbers, as far as installed, and of this project."""
    from attnbench._version import __version__

    found = {"attnbench": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def provenance(extra_sources: Iterable[Path] = ()) -> dict[str, Any]:
    """The part of `run.json` that holds for the whole process."""
    return {
        **git_state(),
        "kernel_hash": kernel_hash(extra_sources),
        "packages": versions(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "platform": {"system": platform.system(), "machine": platform.machine(), "cpus": os.cpu_count()},
    }


def _git_bytes(root: Path, *arguments: str) -> bytes | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _git(root: Path, *arguments: str) -> str | None:
    out = _git_bytes(root, *arguments)
    text = out.decode(errors="replace").strip() if out else ""
    return text or None
