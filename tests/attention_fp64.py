"""Attention in fp64, sequence by sequence: what the kernels' tests compare with, independent of attnbench's own."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

# Relative Frobenius error that a right kernel stays below, with room for the order of its sums.
TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


@dataclass
class Problem:
    """Inputs and cotangents of one call; `cu_q` and `cu_k` are empty for dense input."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor | None
    dlse: torch.Tensor | None
    causal: bool
    scale: float | None = None
    cu_q: tuple[int, ...] = ()
    cu_k: tuple[int, ...] = ()

    @property
    def softmax_scale(self) -> float:
        return self.q.shape[-1] ** -0.5 if self.scale is None else self.scale

    def options(self) -> dict:
        """Keyword arguments of the public function."""
        options: dict = {"causal": self.causal, "softmax_scale": self.scale}
        if self.cu_q:
            for name, cu in (("cu_seqlens_q", self.cu_q), ("cu_seqlens_k", self.cu_k)):
                options[name] = torch.tensor(cu, dtype=torch.int32, device=self.q.device)
        return options


def dense_problem(
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    heads: int = 2,
    kv_heads: int | None = None,
    head_dim: int = 16,
    value_head_dim: int | None = None,
    *,
    causal: bool = False,
    dtype: torch.dtype = torch.float32,
    scale: float | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> Problem:
    g = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, device=device)

    kv_heads = heads if kv_heads is None else kv_heads
    dv = head_dim if value_head_dim is None else value_head_dim
    return Problem(
        normal(batch, seqlen_q, heads, head_dim).to(dtype),
        normal(batch, seqlen_k, kv_heads, head_dim).to(dtype),
        normal(batch, seqlen_k, kv_heads, dv).to(dtype),
        normal(batch, seqlen_q, heads, dv).to(dtype),
        normal(batch, heads, seqlen_q),
        causal,
        scale,
    )


def packed_problem(
    lens_q: list[int],
    lens_k: list[int],
    heads: int = 2,
    kv_heads: int | None = None,
    head_dim: int = 16,
    *,
    causal: bool = False,
    dtype: torch.dtype = torch.float32,
    padding: int = 0,
    device: str = "cpu",
    seed: int = 0,
) -> Problem:
    """Packed sequences; the `padding` rows after the last one hold NaN."""
    p = dense_problem(
        1, sum(lens_q) + padding, sum(lens_k) + padding, heads, kv_heads, head_dim,
        causal=causal, dtype=dtype, device=device, seed=seed,
    )  # fmt: skip
    q, k, v, dout = (t[0] for t in (p.q, p.k, p.v, p.dout))
    dlse = p.dlse[0]
    if padding:
        for t, n in ((q, sum(lens_q)), (dout, sum(lens_q)), (k, sum(lens_k)), (v, sum(lens_k))):
            t[n:] = float("nan")
        dlse[:, sum(lens_q) :] = float("nan")
    cu_q, cu_k = (tuple(accumulate(lens, initial=0)) for lens in (lens_q, lens_k))
    return Problem(q, k, v, dout, dlse, causal, None, cu_q, cu_k)


def reference(p: Problem) -> dict[str, torch.Tensor]:
    """out, lse, dq, dk and dv in fp64. Rows that see no key, or belong to no sequence: out 0, lse -inf, gradients 0."""
    q, k, v = (t.detach().double().requires_grad_() for t in (p.q, p.k, p.v))
    group = p.q.shape[-2] // p.k.shape[-2]
    out = torch.zeros(*p.q.shape[:-1], p.v.shape[-1], dtype=torch.float64, device=p.q.device)
    packed = bool(p.cu_q)
    rows = (p.q.shape[1], p.q.shape[0]) if packed else (p.q.shape[0], p.q.shape[2], p.q.shape[1])
    lse = torch.full(rows, float("-inf"), dtype=torch.float64, device=p.q.device)
    grads = [torch.zeros_like(t) for t in (q, k, v)]
    sequences = (
        [(slice(a, b), slice(c, d), None) for (a, b), (c, d) in zip(pairwise(p.cu_q), pairwise(p.cu_k), strict=True)]
        if packed
        else [(slice(None), slice(None), i) for i in range(p.q.shape[0])]
    )
    for of_q, of_k, i in sequences:
        at_q, at_k, at_row = (
            (of_q, of_k, (slice(None), of_q)) if i is None else ((i, of_q), (i, of_k), (i, slice(None), of_q))
        )
        qs = q[at_q]
        ks, vs = (t[at_k].repeat_interleave(group, 1) for t in (k, v))
        if qs.shape[0] == 0 or ks.shape[0] == 0:
            continue
        scores = torch.einsum("qhd,khd->hqk", qs, ks) * p.softmax_scale
        live = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        if p.causal:
            live = live.tril(ks.shape[0] - qs.shape[0])
        dead = ~live.any(-1)
        scores = scores.masked_fill(~live & ~dead[:, None], float("-inf"))
        row_lse = torch.logsumexp(scores, -1)
        probabilities = torch.softmax(scores, -1).masked_fill(dead[:, None], 0)
        row_out = torch.einsum("hqk,khd->qhd", probabilities, vs)
        out[at_q] = row_out.detach()
        lse[at_row] = row_lse.detach().masked_fill(dead, float("-inf"))
        loss = row_lse.sum() * 0
        if p.dout is not None:
            loss = loss + (row_out[~dead] * p.dout[at_q].double()[~dead]).sum()
        if p.dlse is not None:
            loss = loss + (row_lse[:, ~dead] * p.dlse[at_row].double()[:, ~dead]).sum()
        for total, part in zip(grads, torch.autograd.grad(loss, (q, k, v), allow_unused=True), strict=True):
            if part is not None:
                # Rows of other sequences get 0 * nothing here, never a NaN: autograd scatters into zeros.
                total += part
    return {"out": out, "lse": lse, **dict(zip(("dq", "dk", "dv"), grads, strict=True))}


def compute(function, p: Problem, **more) -> dict[str, torch.Tensor]:
    """out, lse and the gradients of `function`, an attention with the public signature, through autograd."""
    q, k, v = (t.detach().requires_grad_() for t in (p.q, p.k, p.v))
    out, lse = function(q, k, v, return_lse=True, **p.options(), **more)
    pairs = [(y, dy) for y, dy in ((out, p.dout), (lse, p.dlse)) if dy is not None]
    grads = torch.autograd.grad([y for y, _ in pairs], (q, k, v), [dy for _, dy in pairs])
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(("dq", "dk", "dv"), grads, strict=True))}


def assert_close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Same shape, same pattern of NaN and infinity, and a small relative Frobenius and maximal error."""
    for name, y in want.items():
        x = got[name].double()
        assert x.shape == y.shape, f"{name}: shape {tuple(x.shape)}, want {tuple(y.shape)}"
        finite = torch.isfinite(y)
        assert torch.equal(torch.where(finite, 0.0, x), torch.where(finite, 0.0, y)), (
            f"{name}: not -inf where it should"
        )
        assert bool(torch.isfinite(x[finite]).all()), f"{name}: NaN or infinity where the reference is finite"
        if not bool(finite.any()):
            continue
        tolerance = 1e-5 if name == "lse" else TOLERANCE[dtype]
        error = x[finite] - y[finite]
        norm = y[finite].norm().clamp_min(1e-2)
        assert error.norm() <= tolerance * norm, f"{name}: relative Frobenius error {error.norm() / norm:.2e}"
        worst, largest = error.abs().max(), y[finite].abs().max().clamp_min(1e-1)
        assert worst <= 4 * tolerance * largest, f"{name}: max abs error {worst:.2e} where values reach {largest:.2e}"
