"""The check corpus holds what it promises; input variants keep the values and change what they say."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from attnbench.ops import attention_corpus, operation
from attnbench.ops.corpus import CorpusEntry, apply_layout, corpus
from attnbench.ops.layouts import LAYOUTS, laid_out
from attnbench.scenario.case import AttentionCase

ATTENTION = operation("attention")
GPU = [e for e in attention_corpus.entries("gpu") if e.case.dtype == "bf16"]
CPU = list(attention_corpus.entries("cpu"))


def cases(entries: list[CorpusEntry]) -> list[AttentionCase]:
    return [e.case for e in entries if isinstance(e.case, AttentionCase)]


def test_every_dtype_and_every_axis_is_there() -> None:
    whole = cases(list(attention_corpus.entries("gpu")))
    assert {c.dtype for c in whole} == {"bf16", "fp16", "fp32"}
    assert {(c.head_dim, c.dv) for c in whole} >= set(attention_corpus.HEAD_DIMS)
    assert {(c.heads, c.kv_heads) for c in whole} >= set(attention_corpus.HEADS)
    assert {(c.seqlen_q, c.seqlen_k) for c in whole if c.layout == "dense"} >= set(attention_corpus.LENGTHS)
    for wanted in ((1,), (127, 128, 129), (0, 0, 1023), (63, 65), (1, 8191)):
        assert any(c.seqlens_q == wanted for c in whole), wanted
    for seqlen_q, seqlen_k in ((0, 100), (150, 100), (1, 0)):  # no query, fewer keys, no key
        assert any((seqlen_q, seqlen_k) in c.lengths for c in whole), (seqlen_q, seqlen_k)
    assert any(sum(c.seqlens_q) * c.heads * c.head_dim > 2**31 for c in whole)
    assert any(len(c.seqlens_q) > 65535 for c in whole)  # a grid's y and z axes end there
    words = {word for e in GPU for word in e.layout.split()}
    for layout in LAYOUTS:
        assert any(word.endswith(f":{layout}") for word in words), layout
    assert words >= {"values:x10", "values:equal_keys", "values:hidden_key", "grads:out", "grads:lse"}
    assert {c.softmax_scale for c in whole} >= {None, 1.0}


@pytest.mark.parametrize("size", ["cpu", "gpu"])
def test_the_public_bug_reports_are_there_by_name(size: str) -> None:
    names = {e.name for e in attention_corpus.entries(size)}
    for wanted in (
        "leading empty sequences",
        "more sequences than tokens",
        "no query where there are keys",
        "offsets beyond int32 in accumulators",
        "gradient laid out otherwise than the output",
        "gradient that is a slice of a wider tensor",
        "transposed inputs",
        "token stride not a multiple of 16 bytes",
        "key gradients bit for bit",
        "causal with more queries than keys",
        "one token",
        "tails that touch",
        "different value head dim",
    ):
        assert wanted in names


def test_the_cpu_corpus_is_small() -> None:
    for case in cases(CPU):
        assert ATTENTION.work(case, "forward").pairs <= 60_000, case.label
    assert not any(e.gpu_only for e in CPU)


def test_few_entries_say_the_same() -> None:
    for entries in (CPU, GPU):
        keys = [(e.case.case_id, e.layout, e.repeats) for e in entries]
        assert len(keys) - len(set(keys)) <= 4


def test_every_entry_can_be_made_and_its_reference_is_finite_or_minus_infinity() -> None:
    for entry in CPU:
        if entry.case.dtype != "bf16":
            continue
        inputs = apply_layout(ATTENTION.make_inputs(entry.case, "cpu"), entry.layout)
        reference = ATTENTION.reference(entry.case, inputs)
        for name, tensor in reference.items():
            assert (tensor.isfinite() | (tensor.isneginf() if name == "lse" else False)).all(), (entry.name, name)


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("shape", [(2, 5, 3, 8), (7, 3, 8), (0, 3, 8)], ids=str)
def test_layouts_keep_values_and_surround_them_with_nan(layout: str, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape)
    other = laid_out(tensor, layout)
    assert other.shape == tensor.shape
    want = tensor[..., :1, :, :].expand(shape) if layout == "expanded" else tensor
    assert torch.equal(other, want)
    if tensor.numel():
        assert other.stride() != tensor.stride() or other.storage_offset() > 0
    memory = other.as_strided((other.untyped_storage().nbytes() // 4,), (1,), 0)
    distinct = tensor[..., :1, :, :].numel() if layout == "expanded" else tensor.numel()
    assert int(memory.isfinite().sum()) == distinct


def test_variants_keep_leaves_and_cotangents_apart() -> None:
    case = AttentionCase("fp32", 4, 2, 16, True, layout="varlen", seqlens_q=(3, 4), seqlens_k=(5, 2))
    inputs = ATTENTION.make_inputs(case, "cpu")
    other = apply_layout(inputs, "q:transposed dout:wide values:x10 beyond:2 grads:out")
    assert list(other.cotangents) == ["out"]
    assert other.cotangents["out"].stride(-2) == 32
    assert other.tensors["q"].shape == (9, 4, 16)
    assert other.tensors["q"].stride() == (16, 144, 1)
    assert other.tensors["q"].is_leaf
    assert other.tensors["q"].requires_grad
    assert other.tensors["q"][7:].isnan().all()
    assert other.tensors["q"].detach()[:7].abs().mean() > 5
    assert apply_layout(inputs, "").extras is inputs.extras
    for wrong in ("q:sideways", "values:none", "beyond:-1", "dx:wide", "nonsense"):
        with pytest.raises(ValueError, match="variant"):
            apply_layout(inputs, wrong)


def test_corpus_by_device_needs_no_torch() -> None:
    assert len(corpus("cuda")) > len(corpus("cpu")) > 100
    code = (
        "import sys; from attnbench.ops.corpus import corpus; from attnbench.ops import operation; "
        "case = corpus('cuda')[0].case; op = operation('attention'); op.work(case, 'backward'); op.memory(case); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
