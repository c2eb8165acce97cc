"""Triton attention under the interpreter against fp64, on tiny shapes: every kind of input, every gradient."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from attention_fp64 import Problem, assert_close, compute, dense_problem, packed_problem, reference
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels_triton

HALF = (torch.bfloat16, torch.float16)


def check(p: Problem) -> dict[str, torch.Tensor]:
    got = compute(kernels_triton.attention, p, validate=True)
    assert_close(got, reference(p), p.q.dtype)
    return got


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(33, 33), (40, 70), (70, 40)])
def test_dense(seqlen_q: int, seqlen_k: int, dtype: torch.dtype, causal: bool) -> None:
    check(dense_problem(2, seqlen_q, seqlen_k, 2, 1, 16, causal=causal, dtype=dtype))


@settings(max_examples=10, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_packed_batch(data: st.DataObject) -> None:
    lengths = st.integers(0, 40)
    pairs = data.draw(st.lists(st.tuples(lengths, lengths), min_size=1, max_size=4))
    kv_heads = data.draw(st.integers(1, 2))
    p = packed_problem(
        [a for a, _ in pairs],
        [b for _, b in pairs],
        kv_heads * data.draw(st.integers(1, 2)),
        kv_heads,
        data.draw(st.sampled_from((8, 16, 24))),
        causal=data.draw(st.booleans()),
        padding=data.draw(st.integers(0, 3)),
    )
    check(p)


@pytest.mark.parametrize(
    ("lens_q", "lens_k", "heads", "kv_heads", "head_dim", "causal"),
    [
        ([0, 0, 33], [0, 1, 65], 2, 2, 16, True),
        ([0, 0, 0, 1], [3, 0, 5, 7], 6, 2, 120, False),
        ([0, 20, 0, 20], [10, 10, 10, 10], 2, 2, 16, True),
        ([1] * 6, [1] * 6, 4, 4, 16, True),
        ([33, 31], [33, 31], 2, 2, 16, False),
        ([40, 8], [8, 8], 4, 4, 16, True),
        ([0, 0], [5, 3], 2, 1, 16, True),
        ([5, 3], [0, 0], 2, 1, 16, True),
        ([0], [0], 1, 1, 16, False),
    ],
    ids=["leading empty", "more sequences than tokens", "no query", "many of one", "tails that touch",
         "wide and narrow", "no query at all", "no key at all", "nothing at all"],
)  # fmt: skip
@pytest.mark.parametrize("padding", [0, 3])
def test_packed_kinds(lens_q, lens_k, heads, kv_heads, head_dim, causal, padding) -> None:
    got = check(packed_problem(lens_q, lens_k, heads, kv_heads, head_dim, causal=causal, padding=padding))
    start_q = start_k = 0
    for n_q, n_k in zip(lens_q, lens_k, strict=True):
        if n_q == 0:
            assert not got["dk"][start_k : start_k + n_k].any()
            assert not got["dv"][start_k : start_k + n_k].any()
        if n_k == 0:
            assert not got["out"][start_q : start_q + n_q].any()
            assert torch.isneginf(got["lse"][:, start_q : start_q + n_q]).all()
        start_q, start_k = start_q + n_q, start_k + n_k
    assert not got["out"][start_q:].any()
    assert torch.isneginf(got["lse"][:, start_q:]).all()
    assert not got["dq"][start_q:].any()
    assert not got["dk"][start_k:].any()


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(39, 1), (67, 3), (1, 40)])
def test_causal_is_aligned_bottom_right(seqlen_q: int, seqlen_k: int) -> None:
    got = check(dense_problem(1, seqlen_q, seqlen_k, 2, 2, 16, causal=True))
    blind = max(0, seqlen_q - seqlen_k)
    assert not got["out"][:, :blind].any()
    assert torch.isneginf(got["lse"][..., :blind]).all()
    assert not got["dq"][:, :blind].any()


@pytest.mark.parametrize("head_dim", [8, 40, 72, 80, 104, 120])
def test_odd_head_dims(head_dim: int) -> None:
    check(dense_problem(1, 34, 34, 1, 1, head_dim, causal=True, dtype=torch.bfloat16))


@pytest.mark.parametrize(("head_dim", "value_head_dim"), [(24, 16), (16, 40), (192, 128)])
def test_another_value_head_dim(head_dim: int, value_head_dim: int) -> None:
    check(dense_problem(1, 33, 33, 2, 1, head_dim, value_head_dim, causal=True))


@pytest.mark.parametrize("scale", [-0.3, 0.0, 2.5])
def test_scales(scale: float) -> None:
    check(dense_problem(1, 35, 40, 1, 1, 16, scale=scale, causal=True))


def test_saturated_softmax() -> None:
    p = dense_problem(1, 33, 70, 1, 1, 16)
    p.q *= 30
    check(p)


def test_one_token_of_equal_values() -> None:
    p = dense_problem(1, 1, 1, 1, 1, 16, dtype=torch.float16)
    for t in (p.q, p.k, p.v):
        t.fill_(3.0)
    p.dlse = None
    got = compute(kernels_triton.attention, p)
    assert torch.isfinite(got["dq"]).all()
    assert got["dq"].abs().max() <= 2e-3
    p.dout = torch.ones_like(p.dout)
    assert not compute(kernels_triton.attention, p)["dq"].any()


@pytest.mark.parametrize("which", ["out", "lse"])
def test_a_loss_on_one_output(which: str) -> None:
    p = dense_problem(1, 34, 40, 2, 1, 16, causal=True)
    p.dlse, p.dout = (None, p.dout) if which == "out" else (p.dlse, None)
    check(p)


@pytest.mark.parametrize("needed", ["q", "k", "v", "qk", "kv", "qv"])
def test_only_the_needed_gradients(needed: str) -> None:
    p = dense_problem(1, 34, 40, 2, 1, 16, causal=True)
    want = reference(p)
    leaves = {name: getattr(p, name).clone().requires_grad_(name in needed) for name in "qkv"}
    out, lse = kernels_triton.attention(*leaves.values(), causal=True, return_lse=True)
    torch.autograd.backward((out, lse), (p.dout, p.dlse))
    for name, leaf in leaves.items():
        assert (leaf.grad is not None) == (name in needed)
        if leaf.grad is not None:
            assert_close({"d": leaf.grad}, {"d": want[f"d{name}"]}, torch.float32)


def test_every_tensor_has_its_own_strides() -> None:
    p = dense_problem(2, 34, 37, 2, 1, 16, causal=True)
    want = reference(p)
    p.q = p.q.transpose(1, 2).contiguous().transpose(1, 2)
    p.k = torch.cat((p.k, p.k), -1)[..., :16]
    p.v = p.v.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    p.dout = torch.cat((p.dout, p.dout), -1)[..., 16:]
    p.dlse = p.dlse.transpose(1, 2).contiguous().transpose(1, 2)
    got = compute(kernels_triton.attention, p)
    assert_close(got, want, torch.float32)
    assert all(t.is_contiguous() for t in got.values())


def test_expanded_and_unaligned_inputs() -> None:
    p = dense_problem(2, 20, 20, 3, 3, 40, dtype=torch.bfloat16)
    p.q = torch.cat((p.q[..., :1], p.q), -1)[..., 1:]
    p.k = p.k[:1].expand(2, -1, -1, -1)
    p.dout = p.dout[:, :1, :1].expand(-1, 20, 3, -1)
    assert_close(compute(kernels_triton.attention, p), reference(p), torch.bfloat16)


def test_nan_stays_in_its_sequence() -> None:
    lens = [20, 33, 15]
    p = packed_problem(lens, lens, 2, 1, 16, causal=True)
    clean = compute(kernels_triton.attention, p)
    for t in (p.q, p.k, p.v, p.dout):
        t[20:53] = float("nan")
    got = compute(kernels_triton.attention, p)
    for name, x in got.items():
        rows = x.transpose(0, 1) if name == "lse" else x
        before = clean[name].transpose(0, 1) if name == "lse" else clean[name]
        for where in (slice(0, 20), slice(53, None)):
            assert torch.equal(rows[where], before[where]), name


def test_a_second_backward_gives_the_same() -> None:
    p = dense_problem(1, 20, 20)
    q = p.q.clone().requires_grad_()
    out = kernels_triton.attention(q, p.k, p.v)
    first, second = (torch.autograd.grad(out, q, p.dout, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_raw_entry_points_agree_with_autograd() -> None:
    p = packed_problem([20, 13], [25, 13], 2, 1, 16, causal=True)
    want = compute(kernels_triton.attention, p)
    out, lse = kernels_triton.attention_forward(p.q, p.k, p.v, **p.options())
    grads = kernels_triton.attention_backward(p.dout, p.dlse, p.q, p.k, p.v, out, lse, **p.options())
    for name, x in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), strict=True):
        assert torch.equal(x, want[name]), name
    results = {"out": out, "lse": lse, "dout": p.dout, "dlse": p.dlse}
    for name, wrong in results.items():
        for error, match, value in (
            (ValueError, "has shape", wrong[1:]),
            (TypeError, "is torch.float64", wrong.double()),
            (ValueError, "is on meta", wrong.to("meta")),
        ):
            dout, dlse, *rest = ((results | {name: value})[x] for x in ("dout", "dlse", "out", "lse"))
            with pytest.raises(error, match=f"{name} {match}"):
                kernels_triton.attention_backward(dout, dlse, p.q, p.k, p.v, *rest, **p.options())


@pytest.mark.parametrize("packed", [False, True])
def test_opcheck(packed: bool) -> None:
    p = packed_problem([5, 7], [6, 7], 2, 1, 16, causal=True) if packed else dense_problem(1, 9, 9, causal=True)
    cu = [p.options().get(f"cu_seqlens_{n}") for n in "qk"]
    longest = [7, 7] if packed else [None, None]
    q, k, v = (t.clone().requires_grad_() for t in (p.q, p.k, p.v))
    out, lse = kernels_triton.attention_forward(p.q, p.k, p.v, **p.options())  # the first call registers the ops
    torch.library.opcheck(
        torch.ops.attnbench_triton.attention_forward.default, (q, k, v, *cu, *longest, True, p.softmax_scale)
    )
    torch.library.opcheck(
        torch.ops.attnbench_triton.attention_backward.default,
        (p.dout, p.dlse, p.q, p.k, p.v, out, lse, *cu, *longest, True, p.softmax_scale, True, False, True),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_tuning_under_the_interpreter_reports_the_fixed_tile() -> None:
    p = dense_problem(1, 9, 9)
    chosen = kernels_triton.tune(p.q, p.k, p.v, causal=True)
    assert set(chosen) == {"forward", "dq", "dkv"}
    assert not any(choice["tuned"] for choice in chosen.values())
    assert all(choice["block_m"] > 0 for choice in chosen.values())


def test_unsupported_says_why() -> None:
    fine = {"dtype": torch.bfloat16, "head_dim": 64, "value_head_dim": 64, "heads": 4, "kv_heads": 2}
    assert kernels_triton.attention_unsupported(**fine) is None
    for change, word in (
        ({"head_dim": 12}, "12"),
        ({"value_head_dim": 264}, "264"),
        ({"kv_heads": 3}, "3 and 4"),
        ({"dtype": torch.float64}, "float64"),
    ):
        assert word in (kernels_triton.attention_unsupported(**{**fine, **change}) or "")


def test_importing_the_package_is_cheap() -> None:
    code = "import sys, kernels_triton; assert not {'torch', 'triton'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_cpu_tensors_outside_the_interpreter_are_refused() -> None:
    code = (
        "import torch, kernels_triton\n"
        "q = torch.zeros(1, 2, 1, 16)\n"
        "try:\n    kernels_triton.attention(q, q, q)\n"
        "except ValueError as error:\n    assert 'CUDA' in str(error), error\n"
        "else:\n    raise SystemExit('no error')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PATH": "", "TRITON_INTERPRET": "0"})


@pytest.mark.parametrize("packed", [False, True])
def test_no_graph_break_under_compile(packed: bool) -> None:
    p = packed_problem([5, 7], [6, 7], 2, 1, 16, causal=True) if packed else dense_problem(1, 9, 9, causal=True)
    compiled = torch.compile(kernels_triton.attention, fullgraph=True, backend="aot_eager")
    assert_close(compute(compiled, p), reference(p), torch.float32)
