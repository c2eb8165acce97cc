"""Questions to git. No git, no repository and no answer are all None: runs may come from anywhere."""

from __future__ import annotations

import subprocess
from pathlib import Path


def git(*words: str, folder: Path | None = None, text: str = "") -> str | None:
    """What `git WORDS` prints in `folder` (default: the working directory), given `text` as input; None if it fails."""
    try:
        done = subprocess.run(
            ["git", *words],
            cwd=folder,
            input=text,
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",  # paths need not be UTF-8
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def full_commit(text: str, folder: Path | None = None) -> str | None:
    """The full hash that git gives `text`, or None (no such commit, no repository, no git)."""
    return git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{text}^{{commit}}", folder=folder) or None
