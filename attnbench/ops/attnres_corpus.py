"""Check corpus of block attention residuals: public reports and what the formulas can break on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attnbench.ops.corpus import CorpusEntry
from attnbench.scenario.case import AttnresCase

HARNESS_HIDDEN = (16, 32, 64, 128, 256)


def entries(size: str) -> Iterator[CorpusEntry]:
    """Every entry; `size` "gpu" has production shapes, "cpu" the same kinds small enough for Triton's interpreter."""
    yield from _phase2(size == "gpu")
    yield from _phase1(size == "gpu")


def _merge(rows: int, hidden: int, dtype: str = "bf16", **fields: Any) -> AttnresCase:
    return AttnresCase(phase=2, rows=rows, hidden=hidden, dtype=dtype, **fields)


def _attend(rows: int, hidden: int, blocks: int, queries: int, dtype: str = "bf16", **fields: Any) -> AttnresCase:
    return AttnresCase(phase=1, rows=rows, hidden=hidden, blocks=blocks, queries=queries, dtype=dtype, **fields)


def _phase2(gpu: bool) -> Iterator[CorpusEntry]:
    for hidden in HARNESS_HIDDEN:
        for lse_grad in (True, False):
            case = _merge(6, hidden, "fp32", lse_grad=lse_grad, logit_scale=hidden**0.5)
            yield CorpusEntry("the first kernel's harness", case)
    for hidden in (32, 64, 128):
        yield CorpusEntry(
            "the first kernel's harness, half precision", _merge(20, hidden, "fp16", logit_scale=hidden**0.5)
        )
    for hidden in (96, 1536, 2304, 7168):
        yield CorpusEntry("production dtype, any hidden size", _merge(1000 if gpu else 5, hidden))
    yield CorpusEntry("no gradient through lse", _merge(1000 if gpu else 5, 1000, lse_grad=False))
    yield CorpusEntry("a hidden size that nothing divides", _merge(9, 333))
    yield CorpusEntry("hidden size 1", _merge(5, 1, "fp32"))
    yield CorpusEntry("a hidden size beyond one tile", _merge(3, 40000 if gpu else 9000))
    yield CorpusEntry("one row", _merge(1, 768))
    yield CorpusEntry("no rows", _merge(0, 64))
    yield CorpusEntry("logits of 30 times the usual scale", _merge(257 if gpu else 5, 2048, "fp32", logit_scale=30.0))
    yield CorpusEntry("pseudo-query of zeros, as at initialisation", _merge(33, 256, logit_scale=0.0))
    yield CorpusEntry("a large eps", _merge(9, 128, "fp32", eps=0.5))
    yield CorpusEntry("rows of zeros", _merge(9, 128, "fp32"), layout="values:zero_rows")
    yield CorpusEntry("nothing attended: inter-block lse of -inf", _merge(9, 128), layout="values:nothing_attended")
    yield CorpusEntry("a gradient through lse only", _merge(9, 128, "fp32"), layout="grads:lse")
    yield CorpusEntry("strided inputs", _merge(9, 96), layout="partial_sum,inter_out,query:wide dout:wide")
    yield CorpusEntry("inputs off their alignment", _merge(9, 96), layout="partial_sum,inter_out,dout:offset")
    rows = 20000 if gpu else 7
    yield CorpusEntry("determinism of the pseudo-query gradient", _merge(rows, 1024), repeats=20 if gpu else 2)
    if gpu:
        yield CorpusEntry("offsets beyond 2^31", _merge(300_000, 7168), gpu_only=True)


def _phase1(gpu: bool) -> Iterator[CorpusEntry]:
    for dtype in ("fp32", "fp16", "bf16"):
        yield CorpusEntry("plain", _attend(130 if gpu else 3, 256, 4, 8, dtype))
    for hidden in (96, 1000, 2304, 7168):
        yield CorpusEntry("production dtype, any hidden size", _attend(1000 if gpu else 2, hidden, 5, 3))
    yield CorpusEntry("no gradient through lse", _attend(65 if gpu else 3, 512, 8, 8, lse_grad=False))
    yield CorpusEntry("one block: weight 1, dlogit = dlse", _attend(17 if gpu else 3, 160, 1, 6, "fp32"))
    yield CorpusEntry("one query", _attend(17 if gpu else 3, 160, 9, 1))
    yield CorpusEntry("a stage of 24 sublayers", _attend(67 if gpu else 2, 7168 if gpu else 320, 8, 24))
    yield CorpusEntry("64 blocks", _attend(33 if gpu else 2, 200, 64, 5))
    yield CorpusEntry("more queries than one tile takes", _attend(33 if gpu else 2, 136, 3, 100))
    yield CorpusEntry("hidden size 1", _attend(5, 1, 3, 2, "fp32"))
    yield CorpusEntry("one row", _attend(1, 768, 9, 12))
    yield CorpusEntry("no rows", _attend(0, 64, 5, 3))
    yield CorpusEntry(
        "logits of 30 times the usual scale", _attend(33 if gpu else 2, 2048, 5, 3, "fp32", logit_scale=30.0)
    )
    yield CorpusEntry(
        "pseudo-queries of zeros, as at initialisation", _attend(33 if gpu else 3, 256, 5, 8, logit_scale=0.0)
    )
    yield CorpusEntry("rows of zeros", _attend(6, 128, 5, 3, "fp32"), layout="values:zero_rows")
    yield CorpusEntry("a gradient through lse only", _attend(6, 128, 5, 3, "fp32"), layout="grads:lse")
    yield CorpusEntry("blocks within rows", _attend(6, 128, 5, 3), layout="values:transposed")
    yield CorpusEntry("strided inputs", _attend(6, 96, 5, 3), layout="values,queries:wide dout:wide")
    yield CorpusEntry("inputs off their alignment", _attend(6, 96, 5, 3), layout="values,queries,dout:offset")
    yield CorpusEntry("an expanded gradient", _attend(6, 96, 5, 3), layout="dout:expanded")
    rows = 20000 if gpu else 7
    yield CorpusEntry("determinism of the pseudo-query gradients", _attend(rows, 256, 5, 8), repeats=20 if gpu else 2)
    if gpu:
        yield CorpusEntry("offsets beyond 2^31", _attend(33_300, 7168, 9, 2), gpu_only=True)
