"""What a cubin holds: instruction counts, and the listing itself. The disassembler comes inside the triton wheel."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import subprocess
from collections import Counter
from pathlib import Path

from kernels_native.cache import write_atomically
from kernels_native.jit import Built

INSTRUCTIONS = (
    "HGMMA",
    "HMMA",
    "LDSM",
    "STSM",
    "UTMALDG",
    "UTMASTG",
    "UBLKCP",
    "UBLKRED",
    "RED",
    "MUFU",
    "SHFL",
    "BAR",
)
"""Instructions that are counted: matrix products, shared-memory matrices, TMA, reductions, exp2, exchange, barriers."""


@functools.cache
def nvdisasm() -> Path:
    """The disassembler.

    Raises:
        FileNotFoundError: triton, whose wheel has it, is not installed.
    """
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("nvdisasm comes with triton: `pip install triton`")
    return Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "nvdisasm"


def listing(built: Built) -> str:
    """The SASS of a built kernel."""
    return subprocess.run([nvdisasm(), "-c", built.path], check=True, capture_output=True, text=True).stdout


def instruction_counts(built: Built) -> dict[str, int]:
    """How often each of INSTRUCTIONS stands in the kernel (not how often it runs); kept beside the cubin."""
    kept = built.path.with_suffix(".sass.json")
    try:
        counts = json.loads(kept.read_text())
        if built.cached and set(counts) == set(INSTRUCTIONS):
            return {name: int(counts[name]) for name in INSTRUCTIONS}
    except (FileNotFoundError, ValueError):
        pass
    found = Counter(
        re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*)", listing(built), re.MULTILINE)
    )
    result = {name: found[name] + (found["REDG"] if name == "RED" else 0) for name in INSTRUCTIONS}
    write_atomically(kept, json.dumps(result).encode())
    return result
