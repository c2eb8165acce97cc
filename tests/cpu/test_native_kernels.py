"""Every specialisation of the mma.sync kernels compiles for sm_90a; what the host packs is what they take."""

from __future__ import annotations

import os
import re
import subprocess
from typing import Any

import pytest

from kernels_native import backward_call, catalogue, sm90_mma
from kernels_native.geometry import flat_tiles
from kernels_native.jit import SHARED_LIMIT, build
from kernels_native.sass import listing, nvdisasm

ALL = list(sm90_mma.specialisations())
CONSTANT_BASE = 0x210
"""Where a kernel's parameters start in its constant bank on sm_90."""


@pytest.fixture(scope="module")
def described() -> dict[str, dict[str, Any]]:
    jobs = len(os.sched_getaffinity(0))
    return {row["name"]: row for row in catalogue.describe_all(ALL, jobs=jobs)}


def test_names_are_unique() -> None:
    assert len({one.name for one in ALL}) == len(ALL) == 32


@pytest.mark.parametrize("one", ALL, ids=lambda one: one.name.split(": ")[1].replace(" ", ""))
def test_compiles_without_spills(one: Any, described: dict[str, dict[str, Any]]) -> None:
    row = described[one.name]
    assert "error" not in row, row.get("error")
    assert row["spill_bytes"] == 0
    assert row["shared_bytes"] <= SHARED_LIMIT
    sass = row["sass"]
    if one.entry in ("attention_forward", "attention_backward"):
        assert sass["HMMA"] > 0
        assert sass["UTMALDG"] > 0
        assert sass["LDSM"] > 0
    if one.entry == "attention_backward":
        assert sass["RED"] > 0
        assert re.search(r"RED\S*\.F32", listing(build(one))), "dQ must be summed in fp32"
    built = build(one)
    assert built.cached


def test_two_forward_blocks_fit_a_multiprocessor(described: dict[str, dict[str, Any]]) -> None:
    for one in ALL:
        if one.entry == "attention_forward":
            row = described[one.name]
            assert 2 * row["registers"] * one.threads <= 65536
            assert 2 * (row["shared_bytes"] + 1024) <= 228 * 1024


@pytest.mark.parametrize(
    ("entry", "packed"),
    [
        ("attention_forward", 384 + sm90_mma._POINTERS.size + sm90_mma._TAIL.size),
        ("attention_backward", backward_call._MAIN.size),
        ("preprocess", backward_call._ROWS.size),
        ("postprocess", backward_call._ROWS.size),
    ],
)
def test_packed_parameters_have_the_kernels_size(entry: str, packed: int) -> None:
    built = build(next(one for one in ALL if one.entry == entry))
    usage = subprocess.run(
        [nvdisasm().with_name("cuobjdump"), "--dump-resource-usage", built.path],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    found = re.search(r"CONSTANT\[0\]:(\d+)", usage)
    assert found is not None
    alignment = 64 if entry.startswith("attention") else 8  # of the tensor maps, of pointers
    start = -(-CONSTANT_BASE // alignment) * alignment
    assert int(found[1]) - start == packed


def test_a_tile_index_always_reaches_every_row() -> None:
    """The packed schedule of seqlen.cuh: sequence i starts at tile cu[i] / TILE + i."""
    import random

    rng = random.Random(0)
    for _ in range(200):
        tile = rng.choice([64, 128])
        lengths = [rng.choice([0, 0, 1, 63, 64, 65, rng.randrange(600)]) for _ in range(rng.randrange(1, 40))]
        tail = rng.choice([0, 1, 200])
        cu = [0]
        for length in lengths:
            cu.append(cu[-1] + length)
        total = cu[-1] + tail
        first = [value // tile + i for i, value in enumerate(cu)]
        tiles = flat_tiles(total, tile, len(lengths), True)
        reached = set()
        for t in range(tiles):
            i = max(j for j in range(len(first)) if first[j] <= t)
            end = cu[i + 1] if i < len(lengths) else total
            start = cu[i] + (t - first[i]) * tile
            reached |= set(range(start, min(start + tile, end)))
        assert reached == set(range(total))
