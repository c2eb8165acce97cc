"""What Triton's interpreter can be asked to do: it runs a kernel program by program in numpy, a millisecond each."""

from __future__ import annotations

from typing import Any

from attnbench.scenario.case import AttentionCase, Case

MOST_STEPS = 6000
_TILE = 32
_STEP_S = 2e-3


def steps(case: Case) -> int:
    """About how many tile steps forward and backward take: one per visited pair of 32-row tiles, or per row."""
    if isinstance(case, AttentionCase):
        tiles = sum((-(-sq // _TILE) + 1) * (-(-sk // _TILE) + 1) for sq, sk in case.lengths)
        return 3 * tiles * case.heads
    width = -(-case.hidden // 1024)
    return 2 * case.rows * max(1, case.blocks) * max(1, case.queries) * width


def too_big(case: Case) -> str | None:
    """The reason why a case is not interpreted, None where it may be."""
    count = steps(case)
    if count <= MOST_STEPS:
        return None
    return (
        f"too big for Triton's interpreter: about {count:,} tile steps (at most {MOST_STEPS:,}); "
        "run it on a GPU, or add a smaller case"
    )


def seconds(case: Case) -> float:
    """A generous guess of the time that one check takes."""
    return steps(case) * _STEP_S * 4


_launches = 0


def count_launches() -> None:
    """Count every kernel that the interpreter runs in this process from now on, a user's own included."""
    try:
        from triton.runtime.interpreter import GridExecutor
    except ImportError:
        return
    run = GridExecutor.__call__

    def counted(self: Any, *arguments: Any, **options: Any) -> Any:
        global _launches
        _launches += 1
        return run(self, *arguments, **options)

    GridExecutor.__call__ = counted


def launches() -> int:
    """Kernels interpreted since `count_launches`."""
    return _launches
