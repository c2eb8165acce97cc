"""Exact work and predicted memory of attention, from shapes alone.

A live pair is a (query, key) that the mask lets through. Forward multiplies each live pair by its D-wide key and its
Dv-wide value, 2 FLOPs an element; backward recomputes the score and takes four more products (dV, dP, dQ, dK). Nothing
is estimated from half of a square: the count is exact for any lengths, more queries than keys included.
"""

from __future__ import annotations

from attnbench.ops.base import Work
from attnbench.scenario.case import AttentionCase

ITEMSIZE = {"fp32": 4, "fp16": 2, "bf16": 2}
CHUNK_BYTES = 8 << 30  # what the chunked fp64 reference keeps beside its results, on a GPU


def live_pairs(seqlen_q: int, seqlen_k: int, causal: bool) -> int:
    """Pairs (i, j) of one sequence and head with `j <= i + seqlen_k - seqlen_q` (causal), or all of them."""
    if not causal:
        return seqlen_q * seqlen_k
    if seqlen_q > seqlen_k:  # the first seqlen_q - seqlen_k queries see nothing
        return seqlen_k * (seqlen_k + 1) // 2
    return seqlen_q * (seqlen_k - seqlen_q) + seqlen_q * (seqlen_q + 1) // 2


def tokens(case: AttentionCase) -> tuple[int, int]:
    """(query rows, key rows) of the whole case."""
    lengths = case.lengths
    return sum(q for q, _ in lengths), sum(k for _, k in lengths)


def work(case: AttentionCase, which: str) -> Work:
    """Exact work of `which` pass: "forward", "backward" or "forward_backward".

    Forward `2 (D + Dv)` FLOPs per live pair and head, backward `2 (3 D + 2 Dv)`. Bytes are the least possible: forward
    reads q, k, v and writes out, lse; backward reads q, k, v, out, dO, lse and writes dq, dk, dv. The few bytes of
    cu_seqlens are left out.

    Raises:
        ValueError: no such pass.
    """
    if which == "forward_backward":
        forward, backward = work(case, "forward"), work(case, "backward")
        return Work(forward.flops + backward.flops, forward.bytes + backward.bytes, forward.pairs)
    pairs = case.heads * sum(live_pairs(q, k, case.causal) for q, k in case.lengths)
    q, kv, out, lse = _tensor_bytes(case)
    if which == "forward":
        return Work(2 * (case.head_dim + case.dv) * pairs, q + kv + out + lse, pairs)
    if which == "backward":
        return Work(2 * (3 * case.head_dim + 2 * case.dv) * pairs, 2 * q + 2 * kv + 2 * out + lse, pairs)
    raise ValueError(f"unknown pass {which!r}: want forward, backward or forward_backward")


def memory(case: AttentionCase) -> dict[str, int]:
    """Predicted peak bytes: "kernel" (a fused forward and backward), "eager", and "check" (fp64 beside the kernel).

    The kernel's share counts inputs, cotangents, outputs, gradients, an fp32 accumulator for each gradient and a copy
    of each input (non-contiguous layouts). Eager keeps scores, probabilities and their gradients of every sequence.
    """
    q, kv, out, lse = _tensor_bytes(case)
    item = ITEMSIZE[case.dtype]
    held = 2 * q + 2 * kv + 2 * out + 2 * lse
    kernel = held + q + kv + out + (q + kv) // item * 4 + 2 * lse
    scores = case.heads * sum(q * k for q, k in case.lengths)
    eager = held + scores * (4 * 4 + 3 * item) + kv * case.heads // case.kv_heads
    results = (2 * q + kv + out) // item
    check = held + results * (8 + item) + lse * 3 + q + kv + out + min(CHUNK_BYTES, scores * 8 * 8 + (1 << 20))
    return {"kernel": kernel, "eager": eager, "check": check}


def _tensor_bytes(case: AttentionCase) -> tuple[int, int, int, int]:
    """Bytes of q, of k and v together, of out, of lse."""
    item = ITEMSIZE[case.dtype]
    rows_q, rows_k = tokens(case)
    q = rows_q * case.heads * case.head_dim * item
    kv = rows_k * case.kv_heads * (case.head_dim + case.dv) * item
    out = rows_q * case.heads * case.dv * item
    return q, kv, out, rows_q * case.heads * 4
