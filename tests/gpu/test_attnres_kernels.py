"""Block attention residuals on the GPU: what only real sizes, real concurrency and real clocks can show."""

from __future__ import annotations

import pytest
import torch

import kernels_triton
from attnbench.measure.check import check_tensors
from attnbench.ops import operation
from attnbench.ops.attnres_corpus import entries
from attnbench.ops.corpus import CorpusEntry, apply_layout
from attnbench.scenario.case import AttnresCase, op_name


def compute(case: AttnresCase, inputs) -> dict[str, torch.Tensor]:
    op = operation(op_name(case))
    outputs = dict(
        zip(op.output_names, getattr(kernels_triton, op.name)(**inputs.tensors, **inputs.extras), strict=True)
    )
    names = list(inputs.cotangents)
    leaves = [inputs.tensors[name] for name in op.grad_names.values()]
    grads = torch.autograd.grad(
        [outputs[n] for n in names], leaves, [inputs.cotangents[n] for n in names], allow_unused=True
    )
    kept = {
        name: torch.zeros_like(leaf) if grad is None else grad
        for name, grad, leaf in zip(op.grad_names, grads, leaves, strict=True)
    }
    return {name: tensor.detach() for name, tensor in (outputs | kept).items()}


@pytest.mark.parametrize(
    "entry", [e for e in entries("gpu") if not e.gpu_only], ids=lambda e: f"{e.name} {e.case.label} {e.layout}"
)
def test_corpus(entry: CorpusEntry) -> None:
    op = operation(op_name(entry.case))
    inputs = op.make_inputs(entry.case, "cuda")
    if entry.layout:
        inputs = apply_layout(inputs, entry.layout)
    got = compute(entry.case, inputs)
    checks = check_tensors(op.reference(entry.case, inputs), op.yardstick(entry.case, inputs), got)
    assert all(check.passed for check in checks.values()), checks
    for _ in range(entry.repeats - 1):
        again = compute(entry.case, inputs)
        assert all(torch.equal(got[name], again[name]) for name in got)


def test_offsets_beyond_two_to_the_31() -> None:
    """A row near the end of 4.3 GB of sources gives what the same row gives alone."""
    values = torch.randn(9, 33_300, 7168, device="cuda", dtype=torch.bfloat16)
    queries = torch.randn(2, 7168, device="cuda", dtype=torch.bfloat16) / 85
    out, lse = kernels_triton.attnres_phase1(values, queries)
    alone, lse_alone = kernels_triton.attnres_phase1(values[:, -3:].clone(), queries)
    assert torch.equal(out[:, -3:], alone)
    assert torch.equal(lse[:, -3:], lse_alone)


def test_the_pseudo_query_gradient_is_cheap_under_contention() -> None:
    """32768 rows of 4096: the second stage and all it moves stay under 5 % of phase 2's backward."""
    case = AttnresCase(phase=2, rows=32768, hidden=4096, dtype="bf16")
    inputs = operation("attnres_phase2").make_inputs(case, "cuda")
    tensors = {name: tensor.detach() for name, tensor in inputs.tensors.items()}
    d_out, d_lse = inputs.cotangents["out"], inputs.cotangents["lse"]
    kernels_triton.attnres_phase2_backward(d_out, d_lse, **tensors)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            kernels_triton.attnres_phase2_backward(d_out, d_lse, **tensors)
        torch.cuda.synchronize()
    times = {e.key: e.device_time_total for e in profile.key_averages() if e.device_time_total}
    reduction = sum(t for name, t in times.items() if "column_sum" in name)
    assert reduction > 0
    assert reduction < 0.05 * sum(times.values()), times


def test_both_phases_compile_without_a_graph_break() -> None:
    values = torch.randn(3, 64, 96, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    queries = torch.randn(2, 96, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    x = torch.randn(64, 96, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def step(values: torch.Tensor, queries: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        out, lse = kernels_triton.attnres_phase1(values, queries)
        return kernels_triton.attnres_phase2(x, queries[1], out[1], lse[1])[0].float().square().sum()

    leaves = (values, queries, x)
    plain = torch.autograd.grad(step(*leaves), leaves)
    compiled = torch.autograd.grad(torch.compile(step, fullgraph=True)(*leaves), leaves)
    for a, b in zip(plain, compiled, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def test_forward_and_backward_are_captured_in_a_cuda_graph() -> None:
    values = torch.randn(3, 64, 96, device="cuda", dtype=torch.bfloat16)
    queries = torch.randn(2, 96, device="cuda", dtype=torch.bfloat16)
    dout = torch.randn(2, 64, 96, device="cuda", dtype=torch.bfloat16)

    def step() -> tuple[torch.Tensor, ...]:
        out, lse, logits, rstd = kernels_triton.attnres_phase1_forward(values, queries)
        first = kernels_triton.attnres_phase1_backward(dout, None, values, queries, lse, logits, rstd)
        merged = kernels_triton.attnres_phase2_forward(values[0], queries[0], out[0], lse[0])
        second = kernels_triton.attnres_phase2_backward(dout[0], None, values[0], queries[0], out[0], lse[0])
        return (*first, *merged, *second)

    expected = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(expected, captured, strict=True))


def test_a_missing_lse_gradient_launches_no_kernel_of_its_own() -> None:
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
    q, l0 = torch.randn(256, device="cuda", dtype=torch.bfloat16), torch.randn(64, device="cuda")
    kernels_triton.attnres_phase2_backward(x, None, x, q, x, l0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        kernels_triton.attnres_phase2_backward(x, None, x, q, x, l0)
        torch.cuda.synchronize()
    launched = sorted(e.key for e in profile.key_averages() if e.device_time_total)
    assert len(launched) == 2, launched
