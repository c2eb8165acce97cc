"""What the host tells every attention kernel of a call: strides, tiles, sections of heads, the scale."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

LOG2_E = math.log2(math.e)


def dtype_name(x: torch.Tensor) -> str:
    """ "bf16" or "fp16"."""
    import torch

    return "bf16" if x.dtype == torch.bfloat16 else "fp16"


def row_strides(x: torch.Tensor) -> tuple[int, int, int]:
    """Elements between rows, heads and batches of `[batch, rows, heads, columns]` or `[rows, heads, columns]`."""
    s = x.stride()
    return (s[1], s[2], s[0]) if len(s) == 4 else (s[0], s[1], 0)


def flat_tiles(rows: int, block: int, sequences: int, varlen: bool) -> int:
    """Tiles of one head over all packed sequences (seqlen.cuh); dense: of one sequence."""
    return rows // block + sequences + 1 if varlen else -(-rows // block)


def section(heads: int, bytes_per_head: int, l2_bytes: int) -> int:
    """How many of `heads` heads `l2_bytes` of L2 hold."""
    return max(1, min(heads, l2_bytes // max(1, bytes_per_head)))


def positive_scale(q: torch.Tensor, softmax_scale: float) -> tuple[torch.Tensor, float]:
    """q and the scale such that the scale is positive and q * scale the same."""
    # The kernels take the maximum of unscaled scores, so the scale's sign moves into the queries. A scale of 0 would
    # make NaN of a masked score (-inf * 0).
    return (q, max(softmax_scale, 1e-30)) if softmax_scale >= 0 else (-q, -softmax_scale)
