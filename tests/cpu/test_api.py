"""The public functions: dispatch, reasons, and semantics of the CPU path."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

import attnbench
from attnbench.api import Unsupported


def qkv(*lead: int, keys: int | None = None, heads: int = 4, kv_heads: int = 2, dim: int = 16) -> list[torch.Tensor]:
    keyed = (*lead[:-1], lead[-1] if keys is None else keys)
    shapes = [(*lead, heads, dim), (*keyed, kv_heads, dim), (*keyed, kv_heads, dim)]
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def offsets(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_importing_needs_no_torch() -> None:
    code = "import sys, attnbench; attnbench.__version__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert set(dir(attnbench)) == {"__version__", "attention", "attnres_phase1", "attnres_phase2"}
    with pytest.raises(AttributeError, match="no attribute 'atention'"):
        attnbench.atention  # noqa: B018


@pytest.mark.parametrize("backend", ["auto", "eager", "triton"])
def test_dense_and_packed_agree(backend: str) -> None:
    torch.manual_seed(0)
    q, k, v = qkv(2, 9, keys=12)
    out, lse = attnbench.attention(q, k, v, causal=True, return_lse=True, backend=backend)
    assert out.shape == (2, 9, 4, 16)
    assert lse.shape == (2, 4, 9)
    assert lse.dtype == torch.float32
    packed = [x.detach().flatten(0, 1).requires_grad_() for x in (q, k, v)]
    out_packed, lse_packed = attnbench.attention(
        *packed,
        causal=True,
        cu_seqlens_q=offsets(0, 9, 18),
        cu_seqlens_k=offsets(0, 12, 24),
        return_lse=True,
        validate=True,
        backend=backend,
    )
    torch.testing.assert_close(out_packed.unflatten(0, (2, 9)), out)
    torch.testing.assert_close(lse_packed.unflatten(1, (2, 9)).transpose(0, 1), lse)
    for loss in (lambda o, s: o.square().sum(), lambda o, s: s.square().sum()):
        dense = torch.autograd.grad(loss(out, lse), (q, k, v), retain_graph=True, allow_unused=True)
        other = torch.autograd.grad(loss(out_packed, lse_packed), packed, retain_graph=True, allow_unused=True)
        for a, b, x in zip(dense, other, (q, k, v), strict=True):
            a, b = (torch.zeros_like(x).flatten(0, 1) if g is None else g.reshape(-1, *x.shape[2:]) for g in (a, b))
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_rows_that_see_nothing(backend: str) -> None:
    q, k, v = qkv(1, 5, keys=3)
    out, lse = attnbench.attention(q, k, v, causal=True, return_lse=True, backend=backend)
    assert not out[:, :2].any()
    assert lse[:, :, :2].isneginf().all()
    assert lse[:, :, 2:].isfinite().all()
    grads = torch.autograd.grad(out.sum() + lse[:, :, 2:].sum(), (q, k, v))
    assert all(g.isfinite().all() for g in grads)
    assert not grads[0][:, :2].any()
    alone = attnbench.attention(q, k, v, causal=True, backend=backend)
    assert torch.equal(alone, out)


def test_backends_by_name() -> None:
    q, k, v = qkv(1, 5)
    with pytest.raises(ValueError, match="unknown backend 'tritron': want one of auto, sm90"):
        attnbench.attention(q, k, v, backend="tritron")
    for name in ("sm90", "sm90_mma"):
        with pytest.raises(Unsupported, match=f"backend '{name}' does not take this call: .*CUDA"):
            attnbench.attention(q, k, v, backend=name)
    with pytest.raises(ValueError, match="want one of auto, triton, eager"):
        attnbench.attnres_phase1(torch.randn(3, 2, 8), torch.randn(2, 8), backend="sm90")


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"max_seqlen_q": 256, "q_lengths": (0, 300)}, ValueError, "300.*256"),
        ({"q_lengths": (0, 10, 5, 20), "k_lengths": (0, 5, 10, 20)}, ValueError, "falls from 10 to 5"),
        ({"dtype": torch.int64}, TypeError, "int64.*int32"),
        ({"device": "meta"}, ValueError, "meta.*cpu"),
        ({"k_lengths": (0, 9, 21)}, ValueError, "20"),
        ({"k_lengths": (0, 5, 10, 20)}, ValueError, "one more than the number of sequences"),
    ],
)
def test_what_is_wrong_with_cu_seqlens_is_named(change: dict[str, Any], error: type[Exception], words: str) -> None:
    q_lengths, k_lengths = change.pop("q_lengths", (0, 8, 20)), change.pop("k_lengths", (0, 9, 20))
    rows = max(q_lengths[-1], 20)
    q, k, v = qkv(rows, keys=20)
    if len(q_lengths) == 2:
        k_lengths = (0, 20)
    cu_q = torch.tensor(q_lengths, dtype=change.pop("dtype", torch.int32), device=change.pop("device", "cpu"))
    with pytest.raises(error, match=words):
        attnbench.attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=offsets(*k_lengths), validate=True, **change)


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_compiles_into_one_graph(backend: str) -> None:
    q, k, v = qkv(1, 9, keys=12)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out, lse = attnbench.attention(q, k, v, causal=True, return_lse=True, backend=backend)
        return out.sum() + lse.sum()

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v), call(q, k, v))
    for a, b in zip(
        torch.autograd.grad(compiled(q, k, v), (q, k, v)), torch.autograd.grad(call(q, k, v), (q, k, v)), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_residual_phases_on_the_cpu() -> None:
    values, queries = torch.randn(3, 4, 5, 8), torch.randn(2, 8)
    out, lse = attnbench.attnres_phase1(values, queries)
    assert out.shape == (2, 4, 5, 8)
    assert lse.shape == (2, 4, 5)
    merged, merged_lse = attnbench.attnres_phase2(torch.randn(4, 5, 8), queries[0], out[0], lse[0])
    assert merged.shape == (4, 5, 8)
    assert (merged_lse >= lse[0]).all()


def test_second_derivatives_are_refused_in_words() -> None:
    q = torch.randn(1, 8, 1, 16, requires_grad=True)
    out = attnbench.attention(q, q, q, backend="triton")
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        dq.sum().backward()


def test_second_derivatives_of_eager_are_right() -> None:
    q = torch.randn(1, 5, 1, 8, dtype=torch.float32, requires_grad=True)
    k, v = torch.randn(2, 1, 5, 1, 8).unbind(0)

    def grad_norm(x: torch.Tensor) -> torch.Tensor:
        (d,) = torch.autograd.grad(attnbench.attention(x, k, v, backend="eager").square().sum(), x, create_graph=True)
        return d.square().sum()

    (second,) = torch.autograd.grad(grad_norm(q), q)
    step = 1e-2 * torch.randn_like(q)
    moved = (grad_norm((q + step).detach().requires_grad_()) - grad_norm((q - step).detach().requires_grad_())) / 2
    assert torch.isclose((second * step).sum(), moved, rtol=5e-2, atol=1e-6)


def test_a_misspelt_backend_names_the_nearest() -> None:
    q = torch.randn(1, 8, 1, 16)
    with pytest.raises(ValueError, match="Did you mean 'triton'"):
        attnbench.attention(q, q, q, backend="trton")
