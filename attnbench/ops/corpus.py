"""The built-in check corpus: cases that broke attention kernels, ours or others', and the plain ones around them.

Importing this needs no torch. On a GPU the sizes are those that matter; on the CPU the same kinds are cut down, since
there Triton runs under its interpreter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from attnbench.scenario.case import Case

if TYPE_CHECKING:
    from attnbench.ops.base import Inputs

_PARTS = ("attnbench.ops.attention_corpus", "attnbench.ops.attnres_corpus")


@dataclass(frozen=True)
class CorpusEntry:
    """One case to check, with the variant of its inputs (`layouts.apply_layout`).

    `repeats` executions must agree bit for bit where a backend promises that. With `alone` the batch's longest sequence
    is also computed by itself, and its bits compared.
    """

    name: str
    case: Case
    layout: str = ""
    repeats: int = 2
    alone: bool = False
    gpu_only: bool = False


def corpus(device: str) -> list[CorpusEntry]:
    """Every entry for `device`: "cuda" the whole corpus, "cpu" the cut one."""
    return list(_entries("cpu" if device == "cpu" else "gpu"))


def _entries(size: str) -> Iterator[CorpusEntry]:
    for part in _PARTS:
        for entry in import_module(part).entries(size):
            if size == "gpu" or not entry.gpu_only:
                yield entry


def apply_layout(inputs: Inputs, layout: str) -> Inputs:
    """The inputs of an entry in its variant; see `layouts.apply_layout`."""
    from attnbench.ops.layouts import apply_layout as apply

    return apply(inputs, layout)
