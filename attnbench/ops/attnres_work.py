"""Work and predicted memory of block attention residuals, from shapes alone.

With R rows, D hidden, N blocks, S queries: phase 1 forward reads N vectors a row and writes S, backward reads N + S and
writes N; phase 2 forward moves three vectors a row, backward five. A log-sum-exp or its gradient is 4 bytes a row and
query; pseudo-queries and their gradients cross the bus once. What a kernel saves for its backward is not counted.
"""

from __future__ import annotations

from attnbench.ops.base import Work
from attnbench.scenario.case import AttnresCase

ITEMSIZE = {"fp32": 4, "fp16": 2, "bf16": 2}
CHUNK_BYTES = 2 << 30  # what the chunked fp64 reference keeps beside its results, on a GPU


def work(case: AttnresCase, which: str) -> Work:
    """FLOPs (a multiply-add is two) and least bytes of `which` pass: "forward", "backward" or "forward_backward".

    Raises:
        ValueError: no such pass.
    """
    if which == "forward_backward":
        forward, backward = work(case, "forward"), work(case, "backward")
        return Work(forward.flops + backward.flops, forward.bytes + backward.bytes)
    if which not in ("forward", "backward"):
        raise ValueError(f"unknown pass {which!r}: want forward, backward or forward_backward")
    return (_phase1 if case.phase == 1 else _phase2)(case, which)


def _phase1(case: AttnresCase, which: str) -> Work:
    blocks, queries, rows, hidden = case.blocks, case.queries, case.rows, case.hidden
    vector, weights = rows * hidden * ITEMSIZE[case.dtype], queries * hidden * ITEMSIZE[case.dtype]
    pair, square = 2 * queries * blocks * rows * hidden, 2 * blocks * rows * hidden
    lse = 4 * queries * rows
    if which == "forward":  # logits, mean square, outputs
        return Work(2 * pair + square, (blocks + queries) * vector + weights + lse)
    moved = (2 * blocks + queries) * vector + 2 * weights + lse * (2 if case.lse_grad else 1)
    return Work(4 * pair + square, moved)  # <dO, V>, p dO, ds W, dW, and the norm's own term


def _phase2(case: AttnresCase, which: str) -> Work:
    rows, hidden = case.rows, case.hidden
    vector, weights = rows * hidden * ITEMSIZE[case.dtype], hidden * ITEMSIZE[case.dtype]
    if which == "forward":  # mean square 2, logit 2, merge 3 an element
        return Work(7 * rows * hidden, 3 * vector + weights + 8 * rows)
    # As forward without the merge 4, <dy, y0 - x> 3, dx 5, dy0 1, dq 2 an element.
    return Work(15 * rows * hidden, 5 * vector + 2 * weights + rows * (12 if case.lse_grad else 8))


def memory(case: AttnresCase) -> dict[str, int]:
    """Predicted peak bytes: "kernel" (forward and backward), "eager" (all in fp32), "check" (fp64 beside it)."""
    item, rows, hidden = ITEMSIZE[case.dtype], case.rows, case.hidden
    vector = rows * hidden
    if case.phase == 1:
        inputs, outputs = case.blocks * vector, case.queries * vector
        scalars = 4 * rows * case.queries * (3 * case.blocks + 3)
    else:
        inputs, outputs, scalars = 2 * vector, vector, 16 * rows
    held = (2 * inputs + 2 * outputs) * item + scalars
    kernel = held + (inputs + outputs) * item + (64 << 20)  # copies of inputs in other layouts, partial gradients
    eager = held + (5 * inputs + 3 * outputs) * 4 + 2 * scalars
    check = kernel + (inputs + outputs) * (8 + item) + CHUNK_BYTES
    return {"kernel": kernel, "eager": eager, "check": check}
