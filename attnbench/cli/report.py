"""`attnbench report RUN`."""

from __future__ import annotations

import os
from pathlib import Path

from attnbench.errors import UserError
from attnbench.results.runs import find_run


def report(*, run: str, out: Path | None, format: str, results: Path) -> int:
    """Write a stored run as a page (by default into its folder), or print it as Markdown for a pull request."""
    stored = find_run(run, results)
    if format == "md":
        from attnbench.results.report_md import as_markdown

        text = as_markdown(stored)
        if out is None:
            print(text, end="")
            return 0
    else:
        from attnbench.results.report_html import as_html

        text = as_html(stored)
        out = out or stored.folder / "report.html"
    _write(out, text)
    print(out)
    return 0


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {error.strerror}. Name another file with --out.") from None
