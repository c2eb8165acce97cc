"""What the peers of block attention residuals share: reasons why a case does not fit, and calls a query at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from attnbench.backends.attention_call import first_reason, needs_gpu
from attnbench.scenario.case import AttnresCase, Case

if TYPE_CHECKING:
    import torch

FP32_EPS = 2.0**-23
INT32_ELEMENTS = 1 << 31


def eps_of(case: AttnresCase) -> float:
    return FP32_EPS if case.eps is None else case.eps


def phase1_only(case: Case) -> str | None:
    if isinstance(case, AttnresCase) and case.phase == 1:
        return None
    return "computes the first phase of attention residuals only: attention over whole blocks, without a merge"


def common(case: AttnresCase, device: str) -> str | None:
    return first_reason(needs_gpu(device), None if case.rows else "takes at least one row")


def int32_offsets(elements: int) -> str | None:
    return f"{elements:,} elements: its offsets are 32 bits wide" if elements >= INT32_ELEMENTS else None


def each_query(function: Callable[[torch.Tensor], torch.Tensor], queries: torch.Tensor) -> torch.Tensor:
    """`function` of each pseudo-query `[D]` of `[S, D]`, stacked to `[S, R, D]`; of a single one, without a copy."""
    import torch

    if len(queries) == 1:
        return function(queries[0])[None]
    return torch.stack([function(query) for query in queries.unbind(0)])
