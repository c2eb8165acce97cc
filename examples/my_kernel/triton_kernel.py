"""A kernel in Triton: FlashAttention in three launches, as short as it gets; dense input, power-of-two head dims.

Forward keeps a running maximum and sum (online softmax). Backward recomputes P = exp(S - lse); its first launch gives
dQ and delta = rowsum(dO * out) - dlse, its second dK and dV.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from attnbench.backends.custom import Launch, from_triton
from attnbench.scenario.case import AttentionCase, Case

BLOCK = 32


@triton.jit
def _load(ptr, batch, head, rows, length, stride_b, stride_s, stride_h, D: tl.constexpr):
    dims = tl.arange(0, D)
    at = ptr + batch * stride_b + rows[:, None].to(tl.int64) * stride_s + head * stride_h + dims[None, :]
    return tl.load(at, mask=rows[:, None] < length, other=0.0)


@triton.jit
def _store(ptr, tile, batch, head, rows, length, stride_b, stride_s, stride_h, D: tl.constexpr):
    dims = tl.arange(0, D)
    at = ptr + batch * stride_b + rows[:, None].to(tl.int64) * stride_s + head * stride_h + dims[None, :]
    tl.store(at, tile.to(ptr.dtype.element_ty), mask=rows[:, None] < length)


@triton.jit
def _scores(q, k, rows, cols, sq, sk, scale, CAUSAL: tl.constexpr):
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    visible = (rows[:, None] < sq) & (cols[None, :] < sk)
    if CAUSAL:
        visible = visible & (cols[None, :] <= rows[:, None] + sk - sq)
    return tl.where(visible, scores, float("-inf"))


@triton.jit
def forward_kernel(
    q, k, v, out, lse, scale, sq, sk,
    q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, o_b, o_s, o_h,
    HEADS: tl.constexpr, RATIO: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    batch, head = (tl.program_id(1) // HEADS).to(tl.int64), tl.program_id(1) % HEADS
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    queries = _load(q, batch, head, rows, sq, q_b, q_s, q_h, D)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, D], tl.float32)
    for start in range(0, sk, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        keys = _load(k, batch, head // RATIO, cols, sk, k_b, k_s, k_h, D)
        values = _load(v, batch, head // RATIO, cols, sk, v_b, v_s, v_h, D)
        scores = _scores(queries, keys, rows, cols, sq, sk, scale, CAUSAL)
        new_top = tl.maximum(top, tl.max(scores, 1))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row that has seen nothing yet
        p = tl.exp(scores - shift[:, None])
        decay = tl.exp(top - shift)
        total = total * decay + tl.sum(p, 1)
        acc = acc * decay[:, None] + tl.dot(p.to(values.dtype), values, input_precision="ieee")
        top = new_top
    seen = total > 0.0
    acc = acc / tl.where(seen, total, 1.0)[:, None]
    _store(out, acc, batch, head, rows, sq, o_b, o_s, o_h, D)
    row_lse = tl.where(seen, top + tl.log(tl.where(seen, total, 1.0)), float("-inf"))
    tl.store(lse + (batch * HEADS + head) * sq + rows, row_lse, mask=rows < sq)


@triton.jit
def _p_and_ds(queries, keys, values, d_out, row_lse, delta, rows, cols, sq, sk, scale, CAUSAL: tl.constexpr):
    scores = _scores(queries, keys, rows, cols, sq, sk, scale, CAUSAL)
    p = tl.exp(scores - tl.where(row_lse == float("-inf"), 0.0, row_lse)[:, None])
    dp = tl.dot(d_out, tl.trans(values), input_precision="ieee")
    return p, p * (dp - delta[:, None]) * scale


@triton.jit
def dq_kernel(
    q, k, v, out, d_out, lse, d_lse, delta, dq, scale, sq, sk,
    q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, o_b, o_s, o_h, do_b, do_s, do_h, dq_b, dq_s, dq_h,
    HEADS: tl.constexpr, RATIO: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    batch, head = (tl.program_id(1) // HEADS).to(tl.int64), tl.program_id(1) % HEADS
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    queries = _load(q, batch, head, rows, sq, q_b, q_s, q_h, D)
    upstream = _load(d_out, batch, head, rows, sq, do_b, do_s, do_h, D)
    row_out = _load(out, batch, head, rows, sq, o_b, o_s, o_h, D)
    at = (batch * HEADS + head) * sq + rows
    row_lse = tl.load(lse + at, mask=rows < sq, other=0.0)
    row_delta = tl.sum(upstream.to(tl.float32) * row_out.to(tl.float32), 1)
    row_delta -= tl.load(d_lse + at, mask=rows < sq, other=0.0)
    tl.store(delta + at, row_delta, mask=rows < sq)
    acc = tl.zeros([BLOCK, D], tl.float32)
    for start in range(0, sk, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        keys = _load(k, batch, head // RATIO, cols, sk, k_b, k_s, k_h, D)
        values = _load(v, batch, head // RATIO, cols, sk, v_b, v_s, v_h, D)
        _, ds = _p_and_ds(queries, keys, values, upstream, row_lse, row_delta, rows, cols, sq, sk, scale, CAUSAL)
        acc += tl.dot(ds.to(keys.dtype), keys, input_precision="ieee")
    _store(dq, acc, batch, head, rows, sq, dq_b, dq_s, dq_h, D)


@triton.jit
def dkv_kernel(
    q, k, v, d_out, lse, delta, dk, dv, scale, sq, sk,
    q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, do_b, do_s, do_h, dk_b, dk_s, dk_h, dv_b, dv_s, dv_h,
    HEADS: tl.constexpr, RATIO: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    kv_heads: tl.constexpr = HEADS // RATIO
    batch, kv_head = (tl.program_id(1) // kv_heads).to(tl.int64), tl.program_id(1) % kv_heads
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keys = _load(k, batch, kv_head, cols, sk, k_b, k_s, k_h, D)
    values = _load(v, batch, kv_head, cols, sk, v_b, v_s, v_h, D)
    dk_acc = tl.zeros([BLOCK, D], tl.float32)
    dv_acc = tl.zeros([BLOCK, D], tl.float32)
    for member in range(RATIO):
        head = kv_head * RATIO + member
        for start in range(0, sq, BLOCK):
            rows = start + tl.arange(0, BLOCK)
            queries = _load(q, batch, head, rows, sq, q_b, q_s, q_h, D)
            upstream = _load(d_out, batch, head, rows, sq, do_b, do_s, do_h, D)
            at = (batch * HEADS + head) * sq + rows
            row_lse = tl.load(lse + at, mask=rows < sq, other=0.0)
            row_delta = tl.load(delta + at, mask=rows < sq, other=0.0)
            p, ds = _p_and_ds(queries, keys, values, upstream, row_lse, row_delta, rows, cols, sq, sk, scale, CAUSAL)
            dv_acc += tl.dot(tl.trans(p.to(upstream.dtype)), upstream, input_precision="ieee")
            dk_acc += tl.dot(tl.trans(ds.to(queries.dtype)), queries, input_precision="ieee")
    _store(dk, dk_acc, batch, kv_head, cols, sk, dk_b, dk_s, dk_h, D)
    _store(dv, dv_acc, batch, kv_head, cols, sk, dv_b, dv_s, dv_h, D)


def _strides(**tensors: torch.Tensor) -> dict[str, int]:
    """Batch, token and head strides of each tensor: nobody promises that they are contiguous."""
    return {f"{name}_{axis}": tensor.stride(i) for name, tensor in tensors.items() for i, axis in enumerate("bsh")}


def _shape(t: Any) -> dict[str, Any]:
    heads, head_dim = t.q.shape[2:]
    return {
        "scale": head_dim**-0.5 if t.softmax_scale is None else t.softmax_scale,
        "sq": t.q.shape[1],
        "sk": t.k.shape[1],
        "HEADS": heads,
        "RATIO": heads // t.k.shape[2],
        "D": head_dim,
        "CAUSAL": t.causal,
        "BLOCK": BLOCK,
    }


def _inputs(t: Any) -> dict[str, Any]:
    return {"q": t.q, "k": t.k, "v": t.v, "lse": t.lse, **_shape(t), **_strides(q=t.q, k=t.k, v=t.v)}


def _upstream(t: Any) -> dict[str, torch.Tensor]:
    """Gradients that the kernels read: zeros where the loss does not depend on an output, last axis contiguous."""
    d_out = torch.zeros_like(t.out) if t.grad_out is None else t.grad_out
    d_lse = torch.zeros_like(t.lse) if t.grad_lse is None else t.grad_lse
    return {
        "d_out": d_out if d_out.stride(-1) == 1 else d_out.contiguous(),
        "d_lse": d_lse.contiguous(),
        "delta": torch.empty_like(t.lse),
    }


def _query_grid(t: Any) -> tuple[int, ...]:
    return triton.cdiv(t.q.shape[1], BLOCK), t.q.shape[0] * t.q.shape[2]


def _key_grid(t: Any) -> tuple[int, ...]:
    return triton.cdiv(t.k.shape[1], BLOCK), t.k.shape[0] * t.k.shape[2]


FORWARD = Launch(
    forward_kernel,
    grid=_query_grid,
    arguments=lambda t: {**_inputs(t), "out": t.out, **_strides(o=t.out)},
)
DQ = Launch(
    dq_kernel,
    grid=_query_grid,
    scratch=_upstream,
    arguments=lambda t: {
        **_inputs(t),
        "out": t.out,
        "d_out": t.d_out,
        "d_lse": t.d_lse,
        "delta": t.delta,
        "dq": t.dq,
        **_strides(o=t.out, do=t.d_out, dq=t.dq),
    },
)
DKV = Launch(
    dkv_kernel,
    grid=_key_grid,
    arguments=lambda t: {
        **_inputs(t),
        "d_out": t.d_out,
        "delta": t.delta,
        "dk": t.dk,
        "dv": t.dv,
        **_strides(do=t.d_out, dk=t.dk, dv=t.dv),
    },
)


def unsupported(case: Case, device: str) -> str | None:
    """Why a case does not fit, None where it does."""
    assert isinstance(case, AttentionCase)
    if case.layout == "varlen":
        return "dense input only"
    if case.head_dim not in (16, 32, 64, 128) or case.dv != case.head_dim:
        return f"head dim {case.head_dim}/{case.dv}: takes 16, 32, 64 and 128"
    if not case.seqlen_q or not case.seqlen_k:
        return "takes at least one query and one key"
    if case.dtype == "bf16" and device == "cpu":
        return "Triton's interpreter does bf16 arithmetic wrongly"
    return None


backend = from_triton(FORWARD, [DQ, DKV], name="short_flash", supports=unsupported, deterministic=True)
