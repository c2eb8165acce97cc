"""Reading older formats: one step a version, applied in order until a record has today's format.

Format 1 is the first, so there is no step yet. A change that renames, removes or reinterprets a field raises
`FORMAT_VERSION` and adds a step here; a new field with a default does neither (readers ignore fields they do not know).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from attnbench.errors import UserError
from attnbench.results.record import FORMAT_VERSION

Step = Callable[[dict[str, Any]], dict[str, Any]]

RECORD_STEPS: dict[int, Step] = {}
"""From version v to v + 1, for a line of `cases.jsonl`."""

RUN_STEPS: dict[int, Step] = {}
"""From version v to v + 1, for `run.json`."""


def migrate(
    data: dict[str, Any], steps: Mapping[int, Step], *, place: str, current: int = FORMAT_VERSION
) -> dict[str, Any]:
    """`data` brought to format `current`; `place` (file and line) goes into messages.

    Raises:
        UserError: the data has no version, comes from a newer attnbench, or from one too old to read.
    """
    version = data.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 0:
        raise UserError(f"{place}: `version` is {version!r}, wanted a whole number. Is this a file of attnbench's?")
    if version > current:
        raise UserError(
            f"{place}: format {version} is newer than this attnbench reads (up to {current}). Update attnbench."
        )
    while version < current:
        if version not in steps:
            raise UserError(f"{place}: format {version} is too old to read; this attnbench reads up to {current}.")
        data = steps[version](dict(data))
        version += 1
        data["version"] = version
    return data
