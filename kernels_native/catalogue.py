"""Every specialisation that the attention kernels can ask for, built and described ahead of time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from kernels_native import sm90_backward, sm90_backward_wide, sm90_forward, sm90_mma
from kernels_native.jit import BuildFailed, Specialisation, build
from kernels_native.sass import instruction_counts

BACKENDS = ("sm90", "sm90_mma")


def specialisations(backends: Iterable[str] = BACKENDS) -> Iterator[Specialisation]:
    """Those of the named backends, each once."""
    wanted = set(backends)
    if "sm90" in wanted:
        yield from sm90_forward.specialisations()
        yield from sm90_backward.specialisations()
        yield from sm90_backward_wide.specialisations()
    if "sm90_mma" in wanted:
        yield from sm90_mma.specialisations()


def describe(specialisation: Specialisation, force: bool = False) -> dict[str, Any]:
    """Builds it; `name`, `backend`, `registers`, `spill_bytes`, `shared_bytes`, `sass` (instruction counts), `seconds`
    (of the compilation, also where it was `cached`). A failed build has `name`, `backend` and `error` alone.
    """
    known = {"name": specialisation.name, "backend": specialisation.backend}
    try:
        built = build(specialisation, force=force)
    except BuildFailed as error:
        return {**known, "error": str(error)}
    return {
        **known,
        "registers": built.registers,
        "spill_bytes": built.spill_bytes,
        "shared_bytes": built.shared_bytes,
        "sass": instruction_counts(built),
        "seconds": built.seconds,
        "cached": built.cached,
    }


def describe_all(wanted: Iterable[Specialisation], *, jobs: int = 1, force: bool = False) -> Iterator[dict[str, Any]]:
    """`describe` of each, in order, in `jobs` processes."""
    todo = list(wanted)
    if jobs <= 1 or len(todo) <= 1:
        yield from (describe(one, force) for one in todo)
        return
    # Processes, since NVRTC compiles one program at a time in each; spawned, since CUDA does not survive a fork.
    with ProcessPoolExecutor(min(jobs, len(todo)), mp_context=get_context("spawn")) as pool:
        yield from pool.map(describe, todo, [force] * len(todo))
