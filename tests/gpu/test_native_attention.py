"""sm90_mma on the GPU: what `attnbench check` over the corpus does not ask."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import kernels_native
import kernels_triton
from attnbench.ops.attention_inputs import cu_seqlens, make_inputs
from attnbench.ops.attention_reference import reference, yardstick
from attnbench.scenario.case import AttentionCase

pytestmark = pytest.mark.sm90


def case(**changes: Any) -> AttentionCase:
    fields: dict[str, Any] = {"dtype": "bf16", "heads": 4, "kv_heads": 2, "head_dim": 128, "causal": True}
    if "seqlens_q" in changes:
        fields["layout"] = "varlen"
        changes.setdefault("seqlens_k", changes["seqlens_q"])
    else:
        fields |= {"batch": 2, "seqlen_q": 300, "seqlen_k": 300}
    return AttentionCase(**{**fields, **changes})


def ours(inputs: Any, **options: Any) -> dict[str, torch.Tensor]:
    t = inputs.tensors
    out, lse = kernels_native.attention(
        t["q"], t["k"], t["v"], return_lse=True, kernel="sm90_mma", **inputs.extras, **options
    )
    live = torch.isfinite(lse)
    cotangents = inputs.cotangents["out"], inputs.cotangents["lse"].masked_fill(~live, 0)
    grads = torch.autograd.grad((out, lse), (t["q"], t["k"], t["v"]), cotangents)
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), strict=True))


CASES = [
    case(),
    case(causal=False),
    case(dtype="fp16"),
    case(head_dim=64, kv_heads=4, seqlen_k=513),
    case(head_dim=64, seqlen_q=239, seqlen_k=1),
    case(head_dim=80),
    case(head_dim=64, value_head_dim=128),
    case(seqlens_q=(0, 150, 0, 65, 63), seqlens_k=(7, 150, 3, 0, 200)),
    case(seqlens_q=(1,) * 200, head_dim=64),
    case(softmax_scale=-0.1),
]


@pytest.mark.parametrize("one", CASES, ids=lambda one: f"{one.label} {one.softmax_scale or ''}".strip())
def test_against_fp64_and_triton(one: AttentionCase) -> None:
    inputs = make_inputs(one, "cuda")
    truth, unit, got = reference(inputs), yardstick(inputs), ours(inputs)
    for name, value in got.items():
        exact = truth[name]
        assert torch.equal(torch.isfinite(value), torch.isfinite(exact)), name
        finite = torch.isfinite(exact)
        error = (value.double() - exact)[finite].abs().max() if finite.any() else 0
        budget = (unit[name].double() - exact)[finite].abs().max() if finite.any() else 0
        assert error <= 2 * budget + 1e-2, name

    t = inputs.tensors
    out, lse = kernels_triton.attention(t["q"], t["k"], t["v"], return_lse=True, **inputs.extras)
    torch.testing.assert_close(got["out"], out, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(got["lse"], lse, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    "one", [case(head_dim=64, seqlen_q=1024, seqlen_k=1024, heads=8), case(seqlens_q=(500, 77, 900))]
)
def test_deterministic_bit_for_bit(one: AttentionCase) -> None:
    inputs = make_inputs(one, "cuda")
    first = ours(inputs, deterministic=True)
    for _ in range(20):
        again = ours(inputs, deterministic=True)
        assert all(torch.equal(first[name], again[name]) for name in first)


def test_a_sequence_alone_gives_the_bits_that_it_gives_packed() -> None:
    inputs = make_inputs(case(seqlens_q=(130, 300, 65)), "cuda")
    t = {name: x.detach() for name, x in inputs.tensors.items()}
    whole, _ = kernels_native.attention_forward(t["q"], t["k"], t["v"], kernel="sm90_mma", **inputs.extras)
    alone = [x[130:430].unsqueeze(0).contiguous() for x in (t["q"], t["k"], t["v"])]
    out, _ = kernels_native.attention_forward(*alone, causal=True, kernel="sm90_mma")
    assert torch.equal(whole[130:430], out[0])


def test_nan_beyond_and_beside_stays_there() -> None:
    inputs = make_inputs(case(seqlens_q=(65, 63, 200)), "cuda", extra_rows=70)
    clean = ours(inputs)
    with torch.no_grad():
        for tensor in (*inputs.tensors.values(), inputs.cotangents["out"]):
            tensor[65:128] = torch.nan
            tensor[328:] = torch.nan
        inputs.cotangents["lse"][:, 65:128] = torch.nan
        inputs.cotangents["lse"][:, 328:] = torch.nan
    dirty = ours(inputs)
    for name in ("out", "dq", "dk", "dv"):
        assert not dirty[name][328:].any(), name
        for rows in (slice(0, 65), slice(128, 328)):
            assert not dirty[name][rows].isnan().any(), name
            torch.testing.assert_close(dirty[name][rows], clean[name][rows], atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("layout", ["transposed", "sliced", "expanded", "misaligned"])
def test_strides_of_inputs_and_gradient(layout: str) -> None:
    def laid_out(x: torch.Tensor) -> torch.Tensor:
        if layout == "transposed":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if layout == "sliced":
            return torch.cat((x, x), -1)[..., x.shape[-1] :]
        if layout == "misaligned":
            return torch.nn.functional.pad(x, (1, 0))[..., 1:]
        return x[:, :1].expand_as(x)

    inputs = make_inputs(case(head_dim=64), "cuda")
    q, k, v, dout = (x.detach() for x in (*inputs.tensors.values(), inputs.cotangents["out"]))
    results = []
    for change in (laid_out, lambda x: laid_out(x).contiguous()):
        leaves = [change(x).requires_grad_() for x in (q, k, v)]
        out = kernels_native.attention(*leaves, causal=True, kernel="sm90_mma", deterministic=True)
        results.append((out, *torch.autograd.grad(out, leaves, change(dout))))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_partial_gradients_and_no_lse() -> None:
    inputs = make_inputs(case(), "cuda")
    q, k, v = inputs.tensors.values()
    out = kernels_native.attention(q, k.detach(), v, causal=True, kernel="sm90_mma")
    dq, dv = torch.autograd.grad(out, (q, v), inputs.cotangents["out"])
    full = kernels_native.attention(q, k, v, causal=True, kernel="sm90_mma")
    want = torch.autograd.grad(full, (q, k, v), inputs.cotangents["out"])
    torch.testing.assert_close(dq, want[0], atol=1e-2, rtol=1e-2)
    assert torch.equal(dv, want[2])


def test_custom_op_and_compile() -> None:
    inputs = make_inputs(case(seqlen_q=64, seqlen_k=64), "cuda")
    q, k, v = inputs.tensors.values()
    from kernels_native.attention_op import _forward_op

    torch.library.opcheck(_forward_op, (q, k, v, None, None, True, 0.1, "sm90_mma", True))

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return kernels_native.attention(q * 1, k, v, causal=True, kernel="sm90_mma") * 2

    compiled = torch.compile(call, fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), call(q, k, v))


def test_graph_replay_with_other_lengths() -> None:
    one, two = case(seqlens_q=(300, 212)), case(seqlens_q=(128, 384))
    inputs = make_inputs(one, "cuda")
    q, k, v = (x.detach() for x in inputs.tensors.values())
    extras = dict(inputs.extras)
    extras |= {"max_seqlen_q": 384, "max_seqlen_k": 384}
    kernels_native.attention(q, k, v, kernel="sm90_mma", **extras)  # builds
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernels_native.attention(q, k, v, kernel="sm90_mma", **extras)
    for lengths in (one, two):
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            extras[name].copy_(cu_seqlens(lengths.seqlens_q, "cuda"))
        graph.replay()
        assert torch.equal(out, kernels_native.attention(q, k, v, kernel="sm90_mma", **extras))


def test_runs_on_the_current_stream() -> None:
    inputs = make_inputs(case(), "cuda")
    q, k, v = (x.detach() for x in inputs.tensors.values())
    want = kernels_native.attention(q, k, v, causal=True, kernel="sm90_mma")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late = q * 1
        got = kernels_native.attention(late, k, v, causal=True, kernel="sm90_mma")
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(got, want)


@pytest.mark.quiet
def test_module_load_and_call_are_quick() -> None:
    q, k, v = (torch.randn(1, 64, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    kernels_native.attention(q, k, v, kernel="sm90_mma")
    from kernels_native import launch, sm90_mma

    start = time.perf_counter()
    launch.Kernel(sm90_mma.forward_specialisation(64, False, "bf16"))
    assert time.perf_counter() - start < 0.1
    torch.cuda.synchronize()
    times = []
    for _ in range(300):
        start = time.perf_counter()
        kernels_native.attention(q, k, v, kernel="sm90_mma")
        times.append(time.perf_counter() - start)
    # The goal is 40 us on an idle host (the run's call_ms has the figure); this catches what doubles it.
    assert sorted(times)[30] < 80e-6


def test_launch_failure_names_kernel_and_limit() -> None:
    from kernels_native import launch, sm90_mma

    kernel = launch.kernel(sm90_mma.forward_specialisation(64, False, "bf16"), 0)
    with pytest.raises(kernels_native.LaunchFailed, match=r"attention_forward<64.*usual reason"):
        kernel.launch((1, 70000, 1), bytes(512), 0)
