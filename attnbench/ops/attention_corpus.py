"""Attention's part of the check corpus.

The named bug reports come first, as `docs/attention.md` lists them; then one axis after the other: head dims, head
counts, lengths, packed batches, memory layouts, values, cotangents. Each entry comes in bf16, fp16 and fp32.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from attnbench.ops.corpus import CorpusEntry
from attnbench.scenario.case import DTYPES, AttentionCase

HEADS = ((32, 32), (32, 8), (8, 1), (21, 7), (6, 2))
HEAD_DIMS = (
    (64, 64),
    (96, 96),
    (128, 128),
    (192, 192),
    (192, 128),
    (256, 256),
    (40, 40),
    (72, 72),
    (80, 80),
    (104, 104),
    (120, 120),
)
LENGTHS = (
    (1, 1),
    (64, 128),
    (128, 192),
    (256, 256),
    (239, 1),
    (799, 3),
    (113, 203),
    (128, 217),
    (108, 256),
    (384, 256),
    (640, 128),
    (512, 256),
    (1024, 1024),
    (1023, 1024),
    (1024, 1023),
    (4096, 4096),
    (4224, 4224),
)
"""(queries, keys) at the edges of tiles; the list of FlashAttention-3's own tests."""

_NOT_INTERPRETED_IN_BF16 = ("values x10", "packed values x10", "scale 1")
"""Saturated rows show that Triton's interpreter truncates to bf16 where a GPU rounds."""


def entries(size: str) -> Iterator[CorpusEntry]:
    """Every entry of `size` "cpu" or "gpu", in every dtype."""
    found = list(_cpu() if size == "cpu" else _gpu())
    for dtype in ("bf16", "fp16", "fp32"):
        for entry in found:
            assert isinstance(entry.case, AttentionCase)
            if size == "cpu" and dtype == "bf16" and entry.name in _NOT_INTERPRETED_IN_BF16:
                continue
            yield replace(entry, case=replace(entry.case, dtype=dtype))


def _dense(
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    *,
    causal: bool = True,
    scale: float | None = None,
) -> AttentionCase:
    value_head_dim = 0 if dims[0] == dims[1] else dims[1]
    return AttentionCase(
        dtype=DTYPES[0],
        heads=heads[0],
        kv_heads=heads[1],
        head_dim=dims[0],
        value_head_dim=value_head_dim,
        causal=causal,
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        softmax_scale=scale,
    )


def _packed(
    seqlens_q: list[int] | tuple[int, ...],
    seqlens_k: list[int] | tuple[int, ...],
    heads: tuple[int, int],
    head_dim: int,
    *,
    causal: bool = True,
) -> AttentionCase:
    return AttentionCase(
        dtype=DTYPES[0],
        heads=heads[0],
        kv_heads=heads[1],
        head_dim=head_dim,
        causal=causal,
        layout="varlen",
        seqlens_q=tuple(seqlens_q),
        seqlens_k=tuple(seqlens_k),
    )


def _both(name: str, case: AttentionCase, layout: str = "") -> Iterator[CorpusEntry]:
    for causal in (False, True):
        yield CorpusEntry(f"{name}, {'causal' if causal else 'full'}", replace(case, causal=causal), layout)


def _gpu() -> Iterator[CorpusEntry]:
    yield from _reported(1)
    yield CorpusEntry("offsets beyond int32 in accumulators", _packed([1] * 8301, [1] * 8301, (16, 16), 128))
    yield CorpusEntry(
        "more than 2^31 elements", _packed([524544, 256], [256, 256], (32, 32), 128), repeats=1, gpu_only=True
    )
    yield CorpusEntry("more sequences than a grid's y axis", _packed([16] * 70000, [16] * 70000, (2, 1), 64))
    yield CorpusEntry("one very long sequence", _packed([81920], [81920], (1, 1), 64), repeats=1, gpu_only=True)
    for head_dim, value_head_dim in HEAD_DIMS:
        name = f"head dim {head_dim}" + (f"/{value_head_dim}" if value_head_dim != head_dim else "")
        yield from _both(name, _dense(2, 257, 385, (4, 2), (head_dim, value_head_dim)))
        yield CorpusEntry(
            f"{name}, packed",
            replace(_packed([127, 0, 130], [64, 5, 130], (4, 4), head_dim), value_head_dim=value_head_dim),
        )
    for heads in HEADS:
        for head_dim in (64, 128):
            name = f"heads {heads[0]}/{heads[1]}"
            yield CorpusEntry(name, _dense(2, 200, 264, heads, (head_dim, head_dim)), alone=True)
            packed = _packed([127, 128, 129], [130, 128, 64], heads, head_dim)
            yield CorpusEntry(f"{name}, packed", packed, alone=True)
    for seqlen_q, seqlen_k in LENGTHS:
        for head_dim in (64, 128):
            name = f"{seqlen_q} queries, {seqlen_k} keys"
            yield from _both(name, _dense(1, seqlen_q, seqlen_k, (6, 2), (head_dim, head_dim)))
    generator = random.Random(0)
    many = [generator.randint(1, 64) for _ in range(512)]
    for lengths in ([1], [127, 128, 129], [0, 0, 1023], [63, 65], [1, 8191], many):
        name = f"packed {lengths}" if len(lengths) < 9 else "packed, 512 short sequences"
        yield from _both(name, _packed(lengths, lengths, (8, 2), 128))
        longer, shorter = [n + 7 for n in lengths], [max(0, n - 3) for n in lengths]
        yield CorpusEntry(f"{name}, 7 more keys each", _packed(lengths, longer, (8, 2), 128))
        yield CorpusEntry(f"{name}, 3 fewer keys each", _packed(lengths, shorter, (8, 2), 64))
    yield from _variants((2, 384, 384, (8, 4), (128, 128)), ([200, 0, 57, 129], [200, 64, 57, 300]))


def _cpu() -> Iterator[CorpusEntry]:
    yield from _reported(16)
    yield CorpusEntry("offsets beyond int32 in accumulators", _packed([1] * 12, [1] * 12, (2, 2), 16))
    for head_dim, value_head_dim in ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (40, 40), (104, 104)):
        name = f"head dim {head_dim}" + (f"/{value_head_dim}" if value_head_dim != head_dim else "")
        yield CorpusEntry(name, _dense(1, 19, 23, (2, 1), (head_dim, value_head_dim)))
    for heads in ((8, 1), (6, 2), (21, 7)):
        yield CorpusEntry(f"heads {heads[0]}/{heads[1]}", _dense(1, 9, 17, heads, (16, 16)))
    for seqlen_q, seqlen_k in ((1, 1), (16, 33), (40, 1), (50, 3), (32, 32), (1, 70), (33, 0)):
        yield from _both(f"{seqlen_q} queries, {seqlen_k} keys", _dense(1, seqlen_q, seqlen_k, (2, 1), (16, 16)))
    for lengths in ([15, 16, 17], [0, 0, 35], [1, 40]):
        yield CorpusEntry(f"packed {lengths}", _packed(lengths, lengths, (2, 1), 16), alone=True)
        yield CorpusEntry(f"packed {lengths}, 7 more keys each", _packed(lengths, [n + 7 for n in lengths], (2, 1), 16))
        shorter = [max(0, n - 3) for n in lengths]
        yield CorpusEntry(f"packed {lengths}, 3 fewer keys each", _packed(lengths, shorter, (2, 1), 16))
    yield from _variants((1, 37, 37, (2, 1), (16, 16)), ([20, 0, 7], [20, 5, 18]))


def _reported(cut: int) -> Iterator[CorpusEntry]:
    """Inputs of public bug reports; `cut` divides lengths and head counts for the CPU, where size is not the point."""

    def n(length: int) -> int:
        return length if cut == 1 or length < 16 else length // cut + 2

    def heads(query: int, key: int) -> tuple[int, int]:
        return (query, key) if cut == 1 else (max(1, query // key), 1)

    def width(head_dim: int) -> int:
        return head_dim if cut == 1 else max(16, head_dim // 8 * 2)

    square = (n(384), n(384), heads(8, 8), (width(64), width(64)))
    yield CorpusEntry("leading empty sequences", _packed([0, 0, n(1023)], [0, 1, n(2045)], heads(8, 8), width(128)))
    yield CorpusEntry("more sequences than tokens", _packed([0, 0, 0, 1], [3, 0, 5, 7], (21, 7), 120, causal=False))
    yield CorpusEntry(
        "no query where there are keys", _packed([0, n(150), 0, n(150)], [n(100)] * 4, heads(8, 8), width(64))
    )
    yield CorpusEntry("no key at all", _packed([3, 1], [0, 0], heads(8, 2), 64))
    yield CorpusEntry("no query at all", _packed([0, 0], [3, 1], heads(8, 2), 64))
    yield CorpusEntry("no sequence at all", _packed([], [], heads(8, 2), 64))
    yield CorpusEntry("gradient laid out otherwise than the output", _dense(2, *square), "dout:transposed")
    yield CorpusEntry("gradient that is a slice of a wider tensor", _dense(2, *square, causal=False), "dout:wide")
    yield CorpusEntry(
        "transposed inputs",
        _dense(2, n(257), n(257), heads(4, 4), (width(128), width(128))),
        "q,k,v:transposed",
        alone=True,
    )
    yield CorpusEntry(
        "token stride not a multiple of 16 bytes", _dense(1, n(200), n(200), heads(3, 3), (40, 40)), "q,k,v:odd_stride"
    )
    yield CorpusEntry(
        "key gradients bit for bit",
        _dense(2, n(1024), n(1024), heads(8, 2), (width(64), width(64))),
        repeats=20 // cut + 2,
    )
    yield CorpusEntry("causal with more queries than keys", _dense(1, n(239), 1, heads(4, 4), (width(64),) * 2))
    yield CorpusEntry("causal with more queries than keys", _dense(1, n(799), 3, heads(4, 4), (width(128),) * 2))
    yield CorpusEntry("one token", _dense(1, 1, 1, (1, 1), (16, 16), causal=False), "values:threes grads:out")
    yield CorpusEntry("tails that touch", _packed([n(65), n(63)], [n(65), n(63)], (2, 2), width(64), causal=False))
    for head_dim in (40, 72, 80, 104, 120) if cut == 1 else ():
        yield CorpusEntry(f"odd head dim {head_dim}", _dense(1, 130, 130, (2, 2), (head_dim, head_dim)))
    yield CorpusEntry("different value head dim", _dense(1, n(256), n(256), heads(4, 4), (192, 128)))


def _variants(
    dense: tuple[int, int, int, tuple[int, int], tuple[int, int]], lengths: tuple[list[int], list[int]]
) -> Iterator[CorpusEntry]:
    """The same case in other layouts, with other values, scales and cotangents."""
    case = _dense(*dense)
    packed = _packed(*lengths, dense[3], dense[4][0])
    for layout in ("q,k,v:slice", "q,k,v:offset", "q,k,v:wide", "k,v:expanded", "q:transposed", "v:odd_stride"):
        yield CorpusEntry(f"inputs {layout}", case, layout)
        yield CorpusEntry(f"packed inputs {layout}", packed, layout)
    for layout in ("dout:slice", "dout:offset", "dout:expanded", "dout:odd_stride"):
        yield CorpusEntry(f"gradient {layout}", case, layout)
        yield CorpusEntry(f"packed gradient {layout}", packed, layout)
    for values in ("x10", "equal_keys", "hidden_key"):
        yield CorpusEntry(f"values {values}", case, f"values:{values}")
        yield CorpusEntry(f"packed values {values}", replace(packed, causal=False), f"values:{values}")
    yield CorpusEntry("scale 1", replace(case, softmax_scale=1.0))
    yield CorpusEntry("scale 0", replace(case, softmax_scale=0.0))
    yield CorpusEntry("negative scale", replace(packed, softmax_scale=-0.1))
    yield CorpusEntry("rows of NaN beyond the last sequence", packed, "beyond:3")
    yield CorpusEntry("rows of NaN beyond the last sequence, full", replace(packed, causal=False), "beyond:70")
    for output in ("out", "lse"):
        yield CorpusEntry(f"loss on {output} only", case, f"grads:{output}")
        yield CorpusEntry(f"packed, loss on {output} only", packed, f"grads:{output}")
