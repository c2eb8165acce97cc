"""`attnbench schema`: the JSON Schema of scenario files, for editors."""

from __future__ import annotations

import json
from pathlib import Path

from attnbench.errors import UserError


def schema(out: Path | None = None) -> int:
    """Print the schema, or write it to `out`."""
    text = text_of_schema()
    if out is None:
        print(text, end="")
        return 0
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror}; wanted a file in a folder that exists") from None
    return 0


def text_of_schema() -> str:
    from attnbench.scenario.model import json_schema

    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"
