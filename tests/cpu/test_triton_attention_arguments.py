"""Checked arguments: each wrong call is named, with what was given and what is wanted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels_triton import attention_arguments


def dense(batch: int = 2, seqlen: int = 5, heads: int = 4, head_dim: int = 16, **kw: Any) -> torch.Tensor:
    return torch.zeros(batch, seqlen, heads, head_dim, **kw)


def packed(tokens: int = 20, heads: int = 4, head_dim: int = 16) -> torch.Tensor:
    return torch.zeros(tokens, heads, head_dim)


def cu(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def test_defaults() -> None:
    args = attention_arguments(dense(), dense(seqlen=7, heads=2), dense(seqlen=7, heads=2, head_dim=8))
    assert (args.batch, args.heads, args.kv_heads, args.head_dim, args.value_head_dim) == (2, 4, 2, 16, 8)
    assert (args.softmax_scale, args.causal, args.varlen) == (0.25, False, False)
    assert (args.max_seqlen_q, args.max_seqlen_k) == (5, 7)


def test_max_seqlen_is_read_from_cu_seqlens_where_left_out() -> None:
    x = packed()
    args = attention_arguments(x, x, x, cu_seqlens_q=cu(0, 3, 3, 20), cu_seqlens_k=cu(0, 0, 12, 18), max_seqlen_k=16)
    assert (args.batch, args.varlen, args.max_seqlen_q, args.max_seqlen_k) == (3, True, 17, 16)


def test_no_sequence_at_all() -> None:
    x = packed()
    args = attention_arguments(x, x, x, cu_seqlens_q=cu(0), cu_seqlens_k=cu(0), validate=True)
    assert (args.batch, args.max_seqlen_q) == (0, 0)


@pytest.mark.parametrize(
    ("q", "k", "v", "error", "words"),
    [
        (packed(), packed(), packed(), ValueError, ["q has shape [20, 4, 16]", "[batch, seqlen, heads, head_dim]"]),
        (dense(dtype=torch.float64), dense(), dense(), TypeError, ["q is torch.float64", "bfloat16"]),
        (dense(), dense(dtype=torch.float16), dense(), TypeError, ["k is torch.float16", "q is torch.float32"]),
        (dense(), dense(), dense(device="meta"), ValueError, ["v is on meta", "q is on cpu"]),
        (dense(head_dim=12), dense(head_dim=12), dense(), ValueError, ["head dim 12", "multiple of 8"]),
        (dense(head_dim=264), dense(head_dim=264), dense(), ValueError, ["head dim 264", "256"]),
        (dense(head_dim=8), dense(), dense(), ValueError, ["k has head dim 16", "q has 8"]),
        (dense(), dense(), dense(seqlen=6), ValueError, ["v has shape [2, 6, 4, 16]", "k has [2, 5, 4, 16]"]),
        (dense(), dense(batch=3), dense(batch=3), ValueError, ["k has batch 3", "q has 2"]),
        (dense(), dense(heads=3), dense(heads=3), ValueError, ["q has 4 heads", "k has 3", "divide"]),
        (dense(), dense(heads=0), dense(heads=0), ValueError, ["k has shape", "at least one head"]),
        ("q", dense(), dense(), TypeError, ["q is a str", "torch.Tensor"]),
    ],
)
def test_wrong_tensors(q: Any, k: Any, v: Any, error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as caught:
        attention_arguments(q, k, v)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"cu_seqlens_q": cu(0, 20)}, ValueError, ["cu_seqlens_k is missing"]),
        ({"cu_seqlens_k": cu(0, 20)}, ValueError, ["cu_seqlens_q is missing"]),
        ({"cu_seqlens_q": cu(0, 20, dtype=torch.int64), "cu_seqlens_k": cu(0, 20)}, TypeError, ["int64", "int32"]),
        ({"cu_seqlens_q": [0, 20], "cu_seqlens_k": cu(0, 20)}, TypeError, ["cu_seqlens_q is a list", "int32"]),
        ({"cu_seqlens_q": cu(0, 20).to("meta"), "cu_seqlens_k": cu(0, 20)}, ValueError, ["is on meta", "on cpu"]),
        ({"cu_seqlens_q": cu(0, 20)[None], "cu_seqlens_k": cu(0, 20)}, ValueError, ["shape [1, 2]", "[sequences + 1]"]),
        ({"cu_seqlens_q": cu(0, 1, 20)[::2], "cu_seqlens_k": cu(0, 20)}, ValueError, ["not contiguous"]),
        ({"cu_seqlens_q": cu(0, 5, 20), "cu_seqlens_k": cu(0, 20)}, ValueError, ["3 entries", "has 2"]),
        ({"cu_seqlens_q": cu(0, 20), "cu_seqlens_k": cu(0, 20), "max_seqlen_q": 2.0}, TypeError, ["_q is a float"]),
        ({"cu_seqlens_q": cu(0, 20), "cu_seqlens_k": cu(0, 20), "max_seqlen_k": -1}, ValueError, ["_k is -1"]),
    ],
)  # fmt: skip
def test_wrong_packing(options: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    x = packed()
    with pytest.raises(error) as caught:
        attention_arguments(x, x, x, **options)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cu_seqlens_q": cu(0, 10, 5, 20), "cu_seqlens_k": cu(0, 1, 2, 3)}, ["cu_seqlens_q falls from 10 to 5"]),
        ({"cu_seqlens_q": cu(1, 20), "cu_seqlens_k": cu(0, 20)}, ["cu_seqlens_q starts at 1", "want 0"]),
        ({"cu_seqlens_q": cu(0, 20), "cu_seqlens_k": cu(0, 21)}, ["cu_seqlens_k ends at 21", "20 tokens"]),
        ({"cu_seqlens_q": cu(0, 18), "cu_seqlens_k": cu(0, 20), "max_seqlen_q": 16}, ["18 tokens", "_q is 16"]),
    ],
)  # fmt: skip
def test_wrong_values_under_validate(options: dict[str, Any], words: list[str]) -> None:
    x = packed()
    with pytest.raises(ValueError, match=r".") as caught:
        attention_arguments(x, x, x, validate=True, **options)
    for word in words:
        assert word in str(caught.value)
    attention_arguments(x, x, x, **options)


@pytest.mark.parametrize(
    ("options", "error", "word"),
    [
        ({"softmax_scale": float("nan")}, ValueError, "finite"),
        ({"softmax_scale": "0.1"}, TypeError, "softmax_scale is a str"),
        ({"causal": 1}, TypeError, "causal is 1"),
        ({"max_seqlen_q": 5}, ValueError, "dense"),
    ],
)
def test_wrong_options(options: dict[str, Any], error: type[Exception], word: str) -> None:
    with pytest.raises(error, match=word):
        attention_arguments(dense(), dense(), dense(), **options)
