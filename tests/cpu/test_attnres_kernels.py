"""Block attention residuals under Triton's interpreter: the check corpus, and what a corpus entry cannot say."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import kernels_triton
from attnbench.measure.check import check_fixed, check_tensors
from attnbench.ops import operation
from attnbench.ops.attnres_corpus import HARNESS_HIDDEN, entries
from attnbench.ops.attnres_eager import phase1 as eager_phase1
from attnbench.ops.attnres_eager import phase2 as eager_phase2
from attnbench.ops.corpus import CorpusEntry, apply_layout
from attnbench.scenario.case import AttnresCase, op_name

Tensors = dict[str, torch.Tensor]
CORPUS = list(entries("cpu"))


def compute(case: AttnresCase, inputs) -> Tensors:
    """Outputs and gradients by name from the public function."""
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


@pytest.mark.parametrize("entry", CORPUS, ids=lambda e: f"{e.name} {e.case.label} {e.layout}")
def test_corpus(entry: CorpusEntry) -> None:
    op = operation(op_name(entry.case))
    inputs = op.make_inputs(entry.case, "cpu")
    if entry.layout:
        inputs = apply_layout(inputs, entry.layout)
    got = compute(entry.case, inputs)
    checks = check_tensors(op.reference(entry.case, inputs), op.yardstick(entry.case, inputs), got)
    assert all(check.passed for check in checks.values()), checks
    again = compute(entry.case, inputs)
    assert all(torch.equal(got[name], again[name]) for name in got)


@pytest.mark.parametrize(
    "case",
    [
        AttnresCase(phase=2, rows=6, hidden=hidden, dtype="fp32", lse_grad=lse_grad, logit_scale=hidden**0.5)
        for hidden in HARNESS_HIDDEN
        for lse_grad in (True, False)
    ]
    + [AttnresCase(phase=2, rows=20, hidden=h, dtype="fp16", logit_scale=h**0.5) for h in (32, 64, 128)],
    ids=lambda case: case.label,
)
def test_the_first_harness_at_its_own_tolerances(case: AttnresCase) -> None:
    op = operation("attnres_phase2")
    inputs = op.make_inputs(case, "cpu")
    tolerance = 2e-4 if case.dtype == "fp32" else 2e-3
    checks = check_fixed(op.reference(case, inputs), compute(case, inputs), rtol=tolerance, atol=tolerance)
    assert all(check.passed for check in checks.values()), checks


def test_two_phases_are_one_softmax_over_all_sources() -> None:
    torch.manual_seed(0)
    values, queries = torch.randn(4, 6, 40), torch.randn(2, 40)
    partial_sum = torch.randn(6, 40)
    for s in range(2):
        out, lse = kernels_triton.attnres_phase1(values, queries)
        merged, merged_lse = kernels_triton.attnres_phase2(partial_sum, queries[s], out[s], lse[s])
        joint, joint_lse = eager_phase1(torch.cat([values, partial_sum[None]]).double().float(), queries[s : s + 1])
        torch.testing.assert_close(merged, joint[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(merged_lse, joint_lse[0], rtol=1e-5, atol=1e-5)


def test_values_that_are_views_of_one_stacked_buffer() -> None:
    torch.manual_seed(1)
    queries = torch.randn(3, 24)
    grads = []
    for call in (kernels_triton.attnres_phase1, eager_phase1):
        buffer = torch.randn(5, 2, 4, 24, generator=torch.Generator().manual_seed(2)).requires_grad_()
        views = (buffer * 1.0).unbind(0)
        out, lse = call(torch.stack(views[:3]), queries)
        partial = views[3]
        merge = kernels_triton.attnres_phase2 if call is kernels_triton.attnres_phase1 else eager_phase2
        merged, merged_lse = merge(partial, queries[0], out[0], lse[0])
        (merged.square().sum() + merged_lse.sum() + views[4].sum()).backward()
        assert buffer.grad is not None
        grads.append(buffer.grad)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-4)


def test_a_stage_shaped_slice_needs_no_copy_and_has_right_gradients() -> None:
    buffer = torch.randn(6, 3, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    queries = torch.randn(2, 32, generator=torch.Generator().manual_seed(1))
    grads = []
    for call in (kernels_triton.attnres_phase1, eager_phase1):
        out, _ = call(buffer[1:5].transpose(0, 1)[:, ::2].transpose(0, 1), queries)
        grads.append(torch.autograd.grad(out.square().sum(), buffer)[0])
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-4)


def test_no_input_is_returned_as_an_output() -> None:
    values, queries = torch.randn(1, 3, 8), torch.zeros(1, 8)
    out, lse = kernels_triton.attnres_phase1(values, queries)
    x, y0, l0 = torch.randn(3, 8), torch.randn(3, 8), torch.full((3,), -torch.inf)
    merged, merged_lse = kernels_triton.attnres_phase2(x, queries[0], y0, l0)
    inputs = {t.untyped_storage().data_ptr() for t in (values, queries, x, y0, l0)}
    assert not inputs & {t.untyped_storage().data_ptr() for t in (out, lse, merged, merged_lse)}
    assert torch.equal(merged, x)


def test_recompute_under_checkpoint_gives_the_same_gradients() -> None:
    torch.manual_seed(3)
    values, queries = torch.randn(3, 4, 24, requires_grad=True), torch.randn(2, 24, requires_grad=True)
    x = torch.randn(4, 24, requires_grad=True)

    def block(values: torch.Tensor, queries: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        out, lse = kernels_triton.attnres_phase1(values, queries)
        return kernels_triton.attnres_phase2(x, queries[1], out[1], lse[1])[0].square().sum()

    leaves = (values, queries, x)
    plain = torch.autograd.grad(block(*leaves), leaves)
    again = torch.autograd.grad(checkpoint(block, *leaves, use_reentrant=False), leaves)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_inter_block_result_of_weight_zero_does_not_leak() -> None:
    x, q = torch.randn(4, 16, requires_grad=True), torch.randn(16, requires_grad=True)
    y0 = torch.full((4, 16), torch.nan).requires_grad_()
    l0 = torch.full((4,), -torch.inf).requires_grad_()
    out, lse = kernels_triton.attnres_phase2(x, q, y0, l0)
    assert torch.equal(out, x)
    grads = torch.autograd.grad([out, lse], [x, q, y0, l0], [torch.randn(4, 16), torch.randn(4)])
    assert all(bool(grad.isfinite().all()) for grad in grads)
    assert not grads[2].any()
    assert not grads[3].any()


def test_invariants_of_the_log_sum_exp_gradients() -> None:
    """dlse_inter + dlogit = dlse_merged, where dlogit = <dx's logit part>; and sum over sources of dlogits = dlse."""
    torch.manual_seed(4)
    x, q, y0 = torch.randn(5, 64), torch.randn(64) / 8, torch.randn(5, 64)
    l0, dlse = torch.randn(5), torch.randn(5)
    dout = torch.randn(5, 64)
    _, dq, _, dl0 = kernels_triton.attnres_phase2_backward(dout, dlse, x, q, y0, l0)
    rstd = torch.rsqrt(x.square().mean(-1) + torch.finfo(torch.float32).eps)
    expected = ((dlse - dl0) * rstd) @ x
    torch.testing.assert_close(dq, expected, rtol=1e-4, atol=1e-4)

    values, queries = torch.randn(4, 1, 64), torch.randn(1, 64) / 8
    _, lse, logits, rstd = kernels_triton.attnres_phase1_forward(values, queries)
    dvalues, dqueries = kernels_triton.attnres_phase1_backward(
        None, torch.ones(1, 1), values, queries, lse, logits, rstd
    )
    weights = torch.exp(logits - lse[0, 0])
    torch.testing.assert_close(weights.sum(), torch.tensor(1.0))
    torch.testing.assert_close(dqueries[0], (weights * rstd[0]) @ values[:, 0], rtol=1e-4, atol=1e-5)
    assert dvalues.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_inter_block_lse_in_any_float_dtype(dtype: torch.dtype) -> None:
    x, q, y0 = torch.randn(4, 16), torch.randn(16), torch.randn(4, 16)
    l0 = torch.randn(4).to(dtype).requires_grad_()
    out, lse = kernels_triton.attnres_phase2(x, q, y0, l0)
    expected, expected_lse = eager_phase2(x, q, y0, l0.detach().float())
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    assert torch.autograd.grad(out.sum(), l0)[0].dtype == dtype


def test_pseudo_queries_in_fp32_with_values_in_bf16() -> None:
    torch.manual_seed(5)
    values = torch.randn(3, 4, 48, dtype=torch.bfloat16, requires_grad=True)
    queries = torch.randn(2, 48, requires_grad=True)
    out, lse = kernels_triton.attnres_phase1(values, queries)
    expected, expected_lse = eager_phase1(values, queries)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)
    dvalues, dqueries = torch.autograd.grad(out.float().sum() + lse.sum(), (values, queries))
    assert (dvalues.dtype, dqueries.dtype) == (torch.bfloat16, torch.float32)
    wanted = torch.autograd.grad(expected.float().sum() + expected_lse.sum(), (values, queries))
    torch.testing.assert_close(dqueries, wanted[1], rtol=1e-4, atol=1e-4)


def test_accumulating_into_gradient_buffers() -> None:
    torch.manual_seed(6)
    values, queries = torch.randn(3, 5, 32), torch.randn(2, 32)
    dout, dlse = torch.randn(2, 5, 32), torch.randn(2, 5)
    out, lse, logits, rstd = kernels_triton.attnres_phase1_forward(values, queries)
    fresh = kernels_triton.attnres_phase1_backward(dout, dlse, values, queries, lse, logits, rstd)
    held = torch.ones_like(values), torch.ones_like(queries)
    kernels_triton.attnres_phase1_backward(
        dout, dlse, values, queries, lse, logits, rstd, dvalues=held[0], dqueries=held[1], accumulate=True
    )
    for new, old in zip(held, fresh, strict=True):
        torch.testing.assert_close(new, old + 1.0)

    x = torch.randn(5, 32)
    fresh2 = kernels_triton.attnres_phase2_backward(dout[0], dlse[0], x, queries[0], out[0], lse[0])
    dx, dq = torch.ones_like(x), torch.ones_like(queries[0])
    added = kernels_triton.attnres_phase2_backward(
        dout[0], dlse[0], x, queries[0], out[0], lse[0], dpartial_sum=dx, dquery=dq, accumulate=True
    )
    torch.testing.assert_close(dx, fresh2[0] + 1.0)
    torch.testing.assert_close(dq, fresh2[1] + 1.0)
    torch.testing.assert_close(added[2], fresh2[2])
    with pytest.raises(ValueError, match="dpartial_sum is missing"):
        kernels_triton.attnres_phase2_backward(dout[0], None, x, queries[0], out[0], lse[0], accumulate=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_nan_row_stays_its_own(dtype: torch.dtype) -> None:
    values, queries = torch.randn(3, 4, 16).to(dtype), torch.randn(2, 16).to(dtype)
    values[1, 1, 3] = torch.nan
    out, lse = kernels_triton.attnres_phase1(values, queries)
    others = [0, 2, 3]
    assert out[:, others].isfinite().all()
    assert lse[:, others].isfinite().all()
    assert out[:, 1].isnan().all()


def test_custom_ops_pass_opcheck() -> None:
    assert callable(kernels_triton.attnres_phase1)  # loading them registers the ops
    assert callable(kernels_triton.attnres_phase2)
    values, queries = torch.randn(2, 3, 4, 8, requires_grad=True), torch.randn(3, 8, requires_grad=True)
    torch.library.opcheck(torch.ops.attnbench_triton.attnres_phase1_forward, (values, queries, 1e-6))
    x, q = torch.randn(3, 4, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    y0, l0 = torch.randn(3, 4, 8, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    torch.library.opcheck(torch.ops.attnbench_triton.attnres_phase2_forward, (x, q, y0, l0, 1e-6))


def test_errors_name_what_is_wrong() -> None:
    values, queries = torch.randn(3, 4, 16), torch.randn(2, 16)
    x, l0 = values[0], torch.zeros(4)
    with pytest.raises(ValueError, match="queries are 8 wide and values 16"):
        kernels_triton.attnres_phase1(values, queries[:, :8])
    with pytest.raises(ValueError, match="want 1 to 64"):
        kernels_triton.attnres_phase1(values[:0], queries)
    with pytest.raises(TypeError, match=r"values is torch\.int64"):
        kernels_triton.attnres_phase1(values.long(), queries)
    with pytest.raises(ValueError, match="eps is -1"):
        kernels_triton.attnres_phase1(values, queries, -1.0)
    with pytest.raises(ValueError, match=r"inter_lse has shape \[3\]: want \[4\]"):
        kernels_triton.attnres_phase2(x, queries[0], x, l0[:3])
    with pytest.raises(ValueError, match="inter_out has shape"):
        kernels_triton.attnres_phase2(x, queries[0], x[:3], l0)
    with pytest.raises(TypeError, match=r"inter_lse is torch\.int64"):
        kernels_triton.attnres_phase2(x, queries[0], x, l0.long())


def test_queries_may_be_none_at_all() -> None:
    values, queries = torch.randn(3, 4, 16, requires_grad=True), torch.randn(0, 16, requires_grad=True)
    out, lse = kernels_triton.attnres_phase1(values, queries)
    assert out.shape == (0, 4, 16)
    assert lse.shape == (0, 4)
    dvalues, dqueries = torch.autograd.grad(out.sum() + lse.sum(), (values, queries))
    assert not dvalues.any()
    assert dqueries.shape == (0, 16)
