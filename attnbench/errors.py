"""Errors that a user can put right: printed as one message, without a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Usage, configuration or environment is at fault; the message says what is wrong, what is wanted and what to do.

    The command line prints the message to stderr and exits with `exit_code`.
    """

    exit_code = 2


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """`" Did you mean 'triton'?"`, or an empty string where nothing is near."""
    near = difflib.get_close_matches(word, list(words), n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""
