"""Triton attention on a GPU: the CPU tests' kinds at size, and what only a GPU can show."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from attention_fp64 import Problem, assert_close, compute, dense_problem, packed_problem, reference

import kernels_triton
from kernels_triton import attention_config


def check(p: Problem) -> dict[str, torch.Tensor]:
    got = compute(kernels_triton.attention, p, validate=True)
    assert_close(got, reference(p), p.q.dtype)
    return got


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [*((torch.bfloat16, d) for d in (64, 128, 192, 256)), (torch.float16, 128), (torch.float32, 64)],
)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(384, 384), (200, 333), (333, 200)])
def test_dense(seqlen_q: int, seqlen_k: int, head_dim: int, dtype: torch.dtype, causal: bool) -> None:
    check(dense_problem(2, seqlen_q, seqlen_k, 4, 2, head_dim, causal=causal, dtype=dtype, device="cuda"))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("lens_q", "lens_k", "heads", "kv_heads"),
    [
        ([0, 0, 1023], [0, 1, 2045], 8, 4),
        ([0, 0, 0, 1], [3, 0, 5, 7], 21, 7),
        ([0, 150, 0, 150], [100, 100, 100, 100], 8, 4),
        ([65, 63], [65, 63], 4, 2),
        ([127, 128, 129, 1, 300], [127, 128, 129, 8191, 300], 4, 2),
        ([400, 8], [8, 400], 4, 2),
    ],
    ids=["leading empty", "more sequences than tokens", "no query", "tails that touch", "around a tile", "uneven"],
)
@pytest.mark.parametrize("padding", [200])
def test_packed(lens_q, lens_k, heads, kv_heads, head_dim, causal, padding) -> None:
    p = packed_problem(
        lens_q, lens_k, heads, kv_heads, head_dim, causal=causal, dtype=torch.bfloat16, padding=padding, device="cuda"
    )
    got = check(p)
    assert not got["out"][sum(lens_q) :].any()
    assert not got["dq"][sum(lens_q) :].any()
    assert not got["dk"][sum(lens_k) :].any()
    assert not got["dv"][sum(lens_k) :].any()


@pytest.mark.parametrize("head_dim", [8, 40, 80, 120])
def test_odd_head_dims(head_dim: int) -> None:
    check(dense_problem(1, 130, 130, 4, 2, head_dim, causal=True, dtype=torch.bfloat16, device="cuda"))


@pytest.mark.parametrize(("head_dim", "value_head_dim"), [(192, 128), (72, 40)])
def test_another_value_head_dim(head_dim: int, value_head_dim: int) -> None:
    check(dense_problem(1, 256, 256, 4, 2, head_dim, value_head_dim, causal=True, dtype=torch.bfloat16, device="cuda"))


@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "head_dim"), [(239, 1, 64), (799, 3, 128), (1, 8191, 128)])
def test_causal_is_aligned_bottom_right(seqlen_q: int, seqlen_k: int, head_dim: int) -> None:
    got = check(dense_problem(1, seqlen_q, seqlen_k, 4, 2, head_dim, causal=True, dtype=torch.bfloat16, device="cuda"))
    blind = max(0, seqlen_q - seqlen_k)
    assert not got["out"][:, :blind].any()
    assert torch.isneginf(got["lse"][..., :blind]).all()


@pytest.mark.parametrize("scale", [-0.3, 0.0, 1.0])
def test_scales(scale: float) -> None:
    check(dense_problem(1, 300, 300, 2, 1, 128, causal=True, dtype=torch.float16, scale=scale, device="cuda"))


@pytest.mark.parametrize("layout", ["transposed", "slice", "odd token stride", "expanded"])
def test_strides(layout: str) -> None:
    p = dense_problem(2, 257, 257, 3, 3, 40, causal=True, dtype=torch.bfloat16, device="cuda")
    tensors = {"q": p.q, "k": p.k, "v": p.v, "dout": p.dout}
    for name, t in tensors.items():
        if layout == "transposed":
            t = t.transpose(1, 2).contiguous().transpose(1, 2)
        elif layout == "slice":
            t = torch.cat((t, t), -1)[..., 40:]
        elif layout == "odd token stride":
            t = torch.cat((t[..., :1], t), -1)[..., 1:]
        else:
            t = t[:1].expand(2, -1, -1, -1) if name != "dout" else t[:, :1, :1].expand(-1, 257, 3, -1)
        setattr(p, name, t)
    check(p)


def test_nan_stays_in_its_sequence() -> None:
    lens = [200, 333, 150]
    p = packed_problem(lens, lens, 4, 2, 128, causal=False, dtype=torch.bfloat16, device="cuda")
    clean = compute(kernels_triton.attention, p)
    for t in (p.q, p.k, p.v, p.dout):
        t[200:533] = float("nan")
    got = compute(kernels_triton.attention, p)
    for name, x in got.items():
        rows, before = (y.transpose(0, 1) if name == "lse" else y for y in (x, clean[name]))
        for where in (slice(0, 200), slice(533, None)):
            assert torch.equal(rows[where], before[where]), name


@pytest.mark.parametrize("head_dim", [64, 128])
def test_twenty_runs_are_equal_bit_for_bit(head_dim: int) -> None:
    p = dense_problem(2, 1024, 1024, 8, 2, head_dim, causal=True, dtype=torch.bfloat16, device="cuda")
    first = compute(kernels_triton.attention, p, deterministic=True)
    for _ in range(19):
        for name, x in compute(kernels_triton.attention, p, deterministic=True).items():
            assert torch.equal(x, first[name]), name


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_sequence_does_not_see_the_batch(head_dim: int) -> None:
    lens = [300, 700, 50]
    p = packed_problem(lens, lens, 4, 4, head_dim, causal=True, dtype=torch.bfloat16, device="cuda")
    together = compute(kernels_triton.attention, p)
    own = slice(300, 1000)
    alone = Problem(
        p.q[own], p.k[own], p.v[own], p.dout[own], p.dlse[:, own], True, None, (0, 700), (0, 700)
    )  # fmt: skip
    for name, x in compute(kernels_triton.attention, alone, max_seqlen_q=700, max_seqlen_k=700).items():
        part = together[name][:, own] if name == "lse" else together[name][own]
        assert torch.equal(x, part), name


def test_many_sequences_of_one_token() -> None:
    lens = [1] * 8300
    p = packed_problem(lens, lens, 16, 16, 128, causal=True, dtype=torch.bfloat16, device="cuda")
    got = compute(kernels_triton.attention, p)
    assert torch.equal(got["out"], p.v)
    assert all(bool(torch.isfinite(x).all()) for x in got.values())


def test_more_than_two_to_the_31_elements() -> None:
    lens_q, lens_k = [524544, 256], [256, 256]
    g = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(sum(lens_q), 32, 128, generator=g, device="cuda", dtype=torch.bfloat16)
    assert q.numel() > 2**31
    k, v = (torch.randn(512, 32, 128, generator=g, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    cu_q, cu_k = (
        torch.tensor(tuple(accumulate(x, initial=0)), dtype=torch.int32, device="cuda") for x in (lens_q, lens_k)
    )
    options = {
        "causal": True,
        "cu_seqlens_q": cu_q,
        "cu_seqlens_k": cu_k,
        "max_seqlen_q": max(lens_q),
        "max_seqlen_k": 256,
    }
    out, lse = kernels_triton.attention_forward(q, k, v, **options)
    dq, dk, dv = kernels_triton.attention_backward(q, None, q, k, v, out, lse, **options)
    last = Problem(q[-256:], k[256:], v[256:], q[-256:], None, True, None, (0, 256), (0, 256))
    got = {"out": out[-256:], "lse": lse[:, -256:], "dq": dq[-256:], "dk": dk[256:], "dv": dv[256:]}
    assert_close(got, reference(last), torch.bfloat16)
    assert not out[: 524544 - 256].any()
    assert not dq[: 524544 - 256].any()
    assert torch.isneginf(lse[:, : 524544 - 256]).all()


@pytest.mark.parametrize("head_dim", [128, 256])
def test_graph_replay_with_other_lengths(head_dim: int) -> None:
    first, second = [300, 212], [128, 384]
    p = packed_problem(first, first, 4, 4, head_dim, causal=True, dtype=torch.bfloat16, device="cuda")
    p.dlse = None
    cu = torch.tensor(p.cu_q, dtype=torch.int32, device="cuda")
    options = {"causal": True, "cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 384, "max_seqlen_k": 384}
    q, k, v = (t.clone().requires_grad_() for t in (p.q, p.k, p.v))

    def step() -> tuple[torch.Tensor, ...]:
        out, lse = kernels_triton.attention(q, k, v, return_lse=True, **options)
        return out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), p.dout)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for lens in (first, second):
        p.cu_q = p.cu_k = tuple(accumulate(lens, initial=0))
        cu.copy_(torch.tensor(p.cu_q, dtype=torch.int32))
        graph.replay()
        torch.cuda.synchronize()
        got = dict(zip(("out", "lse", "dq", "dk", "dv"), results, strict=True))
        assert_close(got, reference(p), torch.bfloat16)


def test_capture_without_max_seqlen_is_an_error_that_says_so() -> None:
    p = packed_problem([30, 20], [30, 20], device="cuda", dtype=torch.bfloat16)
    options = p.options()
    kernels_triton.attention(p.q, p.k, p.v, **options)
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="max_seqlen_q"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        kernels_triton.attention(p.q, p.k, p.v, **options)


def test_another_stream() -> None:
    p = dense_problem(2, 512, 512, 4, 4, 128, causal=True, dtype=torch.bfloat16, device="cuda")
    want = compute(kernels_triton.attention, p)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        p.q = p.q * 1
        got = compute(kernels_triton.attention, p)
    torch.cuda.current_stream().wait_stream(stream)
    for name, x in got.items():
        assert torch.equal(x, want[name]), name


@pytest.mark.parametrize("packed", [False, True])
def test_compile_has_no_graph_break(packed: bool) -> None:
    if packed:
        p = packed_problem([100, 200], [100, 200], 4, 2, 64, causal=True, dtype=torch.bfloat16, device="cuda")
    else:
        p = dense_problem(2, 256, 256, 4, 2, 64, causal=True, dtype=torch.bfloat16, device="cuda")
    compiled = torch.compile(kernels_triton.attention, fullgraph=True)
    assert_close(compute(compiled, p), reference(p), torch.bfloat16)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_every_candidate_tile_is_right(head_dim: int) -> None:
    dtype = torch.bfloat16
    p = packed_problem([257, 130], [300, 130], 4, 2, head_dim, causal=True, dtype=dtype, padding=3, device="cuda")
    want = reference(p)
    args = kernels_triton.attention_arguments(p.q, p.k, p.v, **p.options())
    ran = 0
    for kernel in attention_config.PASSES:
        key = attention_config.config_key(kernel, args)
        for config in attention_config.candidates(key):
            attention_config.choose(key, config)
            try:
                got = compute(kernels_triton.attention, p)
            finally:
                attention_config.forget()
            assert_close(got, want, dtype)
            ran += 1
    assert ran >= 5


def test_tuning_keeps_what_it_found() -> None:
    p = dense_problem(2, 600, 600, 4, 4, 64, causal=True, dtype=torch.bfloat16, device="cuda")
    try:
        chosen = kernels_triton.tune(p.q, p.k, p.v, causal=True)
        assert all(choice["tuned"] for choice in chosen.values())
        check(p)
    finally:
        attention_config.forget()
