"""Attention and its gradients from explicit formulas, in pieces of bounded size: fp64 truth and same-dtype yardstick.

With P = softmax(scale q kᵀ) over the visible keys and cotangents dO, dlse (FlashAttention-2, section 2.3, extended by
the gradient of lse):

    delta = rowsum(dO * out) - dlse        dS = P * (dO vᵀ - delta)
    dq = scale dS k        dk = scale dSᵀ q        dv = Pᵀ dO
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from attnbench.ops.base import Inputs

Tensors = dict[str, torch.Tensor]
TILE_CUDA = 1 << 27  # scores in flight; about six arrays of them live at once
TILE_CPU = 1 << 21


def reference(inputs: Inputs) -> Tensors:
    """out, lse and, where there is a cotangent, dq, dk, dv in fp64, from the same rounded inputs and cotangents.

    Shapes are those of the operation. Rows beyond `cu_seqlens[-1]` get out 0, lse -inf and gradients 0.
    """
    return _evaluate(inputs, torch.float64, lambda x: x, torch.float64)


def yardstick(inputs: Inputs) -> Tensors:
    """What eager PyTorch in the inputs' dtype would give: the unit of the error budget.

    Operands of products (q, k, v, dO, P, dS) are values of that dtype and products accumulate in fp32. Scores, softmax
    and lse stay fp32; the other products (out, dO vᵀ, dq, dk, dv) are rounded to that dtype.
    """
    dtype = inputs.tensors["q"].dtype

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x.to(dtype).to(torch.float32)

    with full_fp32_matmul():
        return _evaluate(inputs, torch.float32, rounded, dtype)


@contextmanager
def full_fp32_matmul() -> Iterator[None]:
    """Keeps fp32 products from running in TF32, whatever the process has chosen."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@dataclass(frozen=True)
class _Group:
    """Packed sequences of equal lengths, computed as one batch."""

    seqlen_q: int
    seqlen_k: int
    starts: list[tuple[int, int]]  # first query row and first key row of each

    def rows(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Row numbers `[G, seqlen_q]` and `[G, seqlen_k]`."""
        first = torch.tensor(self.starts, device=device)
        rows_q = first[:, 0, None] + torch.arange(self.seqlen_q, device=device)
        return rows_q, first[:, 1, None] + torch.arange(self.seqlen_k, device=device)


def _groups(cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor) -> list[_Group]:
    starts: dict[tuple[int, int], list[tuple[int, int]]] = {}
    bounds_q, bounds_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for i in range(len(bounds_q) - 1):
        lengths = (bounds_q[i + 1] - bounds_q[i], bounds_k[i + 1] - bounds_k[i])
        starts.setdefault(lengths, []).append((bounds_q[i], bounds_k[i]))
    return [_Group(seqlen_q, seqlen_k, at) for (seqlen_q, seqlen_k), at in starts.items()]


@torch.no_grad()
def _evaluate(
    inputs: Inputs, compute: torch.dtype, rounded: Callable[[torch.Tensor], torch.Tensor], store: torch.dtype
) -> Tensors:
    q, k, v = (inputs.tensors[name].detach() for name in ("q", "k", "v"))
    d_out, d_lse = inputs.cotangents.get("out"), inputs.cotangents.get("lse")
    scale = inputs.extras.get("softmax_scale")
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    lse_dtype = torch.float64 if store == torch.float64 else torch.float32
    rows = q.shape[:-1]  # [..., heads]
    result = {
        "out": torch.zeros(*rows, v.shape[-1], dtype=store, device=q.device),
        "lse": torch.full(rows, -torch.inf, dtype=lse_dtype, device=q.device),  # heads last until the end
    }
    if d_out is not None or d_lse is not None:
        for name, tensor in (("dq", q), ("dk", k), ("dv", v)):
            result[name] = torch.zeros(tensor.shape, dtype=store, device=q.device)
    tile = _Tile(compute, rounded, scale, bool(inputs.extras.get("causal", False)))
    given: Tensors = {"q": q, "k": k, "v": v}
    if d_out is not None:
        given["d_out"] = d_out
    if d_lse is not None:
        given["d_lse"] = d_lse.transpose(-1, -2)  # heads last, as the rows are
    cu_q, cu_k = inputs.extras.get("cu_seqlens_q"), inputs.extras.get("cu_seqlens_k")
    if cu_q is None or cu_k is None:
        _evaluate_batch(tile, q.shape[1], k.shape[1], None, given, result)
    else:
        for group in _groups(cu_q, cu_k):
            if len(group.starts) == 1:
                _evaluate_one(tile, group, given, result)
            else:
                _evaluate_batch(tile, group.seqlen_q, group.seqlen_k, group.rows(q.device), given, result)
    result["lse"] = result["lse"].transpose(-1, -2)
    return result


def _evaluate_one(tile: _Tile, group: _Group, given: Tensors, result: Tensors) -> None:
    """A sequence of its own is a slice, so that a very long one is never gathered."""
    start_q, start_k = group.starts[0]
    rows = {"k": slice(start_k, start_k + group.seqlen_k)}
    rows["v"] = rows["dk"] = rows["dv"] = rows["k"]
    queries = slice(start_q, start_q + group.seqlen_q)

    def cut(tensors: Tensors) -> Tensors:
        return {name: tensor[None, rows.get(name, queries)] for name, tensor in tensors.items()}

    _evaluate_batch(tile, group.seqlen_q, group.seqlen_k, None, cut(given), cut(result))


def _evaluate_batch(
    tile: _Tile,
    seqlen_q: int,
    seqlen_k: int,
    rows: tuple[torch.Tensor, torch.Tensor] | None,
    given: Tensors,
    result: Tensors,
) -> None:
    """Sequences of one length: the batch of a dense call, or the `rows` of a packed one. Writes into `result`."""
    q, k, v = given["q"], given["k"], given["v"]
    d_out, d_lse = given.get("d_out"), given.get("d_lse")
    if seqlen_q == 0 or seqlen_k == 0:
        return
    rows_q, rows_k = (None, None) if rows is None else rows
    batch = q.shape[0] if rows_q is None else rows_q.shape[0]
    kv_heads = k.shape[-2]
    ratio = q.shape[-2] // kv_heads
    budget = TILE_CUDA if q.is_cuda else TILE_CPU
    first = max(0, seqlen_q - seqlen_k) if tile.causal else 0  # earlier queries see no key
    unit = ratio * (seqlen_q - first) * seqlen_k
    block_q = max(1, min(seqlen_q - first, budget // (ratio * seqlen_k)))
    step_h = max(1, min(kv_heads, budget // unit))
    step_b = max(1, min(batch, budget // (unit * kv_heads)))
    for b in range(0, batch, step_b):
        at_q, at_k = _rows(rows_q, b, step_b), _rows(rows_k, b, step_b)
        for h in range(0, kv_heads, step_h):
            heads_k = slice(h, h + step_h)
            heads_q = slice(h * ratio, (h + step_h) * ratio)
            keys = _take(k, at_k, heads_k, tile.compute)
            values = _take(v, at_k, heads_k, tile.compute)
            d_keys = torch.zeros_like(keys)
            d_values = torch.zeros_like(values)
            for start in range(first, seqlen_q, block_q):
                span = slice(start, min(start + block_q, seqlen_q))
                at = (at_q[0], span) if isinstance(at_q, tuple) else at_q[:, span]
                seen = min(seqlen_k, span.stop + seqlen_k - seqlen_q)
                seen = seen if tile.causal else seqlen_k
                piece = tile.run(
                    _fold(_take(q, at, heads_q, tile.compute), ratio),
                    keys[:, :, :seen],
                    values[:, :, :seen],
                    None if d_out is None else _fold(_take(d_out, at, heads_q, tile.compute), ratio),
                    None if d_lse is None else _fold(_take(d_lse[..., None], at, heads_q, tile.compute), ratio),
                    offset=start + seqlen_k - seqlen_q,
                    rows=span.stop - span.start,
                )
                _put(result["out"], at, heads_q, _unfold(piece["out"], ratio))
                _put(result["lse"][..., None], at, heads_q, _unfold(piece["lse"], ratio))
                if "dq" in piece:
                    _put(result["dq"], at, heads_q, _unfold(piece["dq"], ratio))
                    d_keys[:, :, :seen] += piece["dk"]
                    d_values[:, :, :seen] += piece["dv"]
            if "dk" in result:
                _put(result["dk"], at_k, heads_k, d_keys)
                _put(result["dv"], at_k, heads_k, d_values)


@dataclass(frozen=True)
class _Tile:
    """The formulas on one block of queries; every query sees at least one key."""

    compute: torch.dtype
    rounded: Callable[[torch.Tensor], torch.Tensor]
    scale: float
    causal: bool

    def run(
        self,
        q: torch.Tensor,  # [B, H, ratio * rows, D]
        k: torch.Tensor,  # [B, H, keys, D]
        v: torch.Tensor,  # [B, H, keys, Dv]
        d_out: torch.Tensor | None,  # [B, H, ratio * rows, Dv]
        d_lse: torch.Tensor | None,  # [B, H, ratio * rows, 1]
        *,
        offset: int,  # query i of the block sees keys up to i + offset
        rows: int,
    ) -> Tensors:
        scores = (q @ k.mT).mul_(self.scale)
        if self.causal:
            last = torch.arange(rows, device=q.device)[:, None] + offset
            hidden = torch.arange(k.shape[-2], device=q.device) > last
            scores.unflatten(2, (-1, rows)).masked_fill_(hidden, -torch.inf)
        top = scores.amax(-1, keepdim=True)
        p = scores.sub_(top).exp_()
        total = p.sum(-1, keepdim=True)
        p.div_(total)
        p_operand = self.rounded(p)
        out = self.rounded(p_operand @ v)
        result = {"out": out, "lse": top + total.log()}
        if d_out is not None:
            delta = (d_out * out).sum(-1, keepdim=True)
            if d_lse is not None:
                delta -= d_lse
            result["dv"] = p_operand.mT @ d_out
            ds = self.rounded(d_out @ v.mT).sub_(delta).mul_(p)
        elif d_lse is not None:
            result["dv"] = torch.zeros_like(v)
            ds = p * d_lse
        else:
            return result
        ds = self.rounded(ds)
        result["dq"] = (ds @ k).mul_(self.scale)
        result["dk"] = (ds.mT @ q).mul_(self.scale)
        return result


_Index = torch.Tensor | tuple[slice, slice]


def _rows(rows: torch.Tensor | None, start: int, count: int) -> _Index:
    return (slice(start, start + count), slice(None)) if rows is None else rows[start : start + count]


def _take(tensor: torch.Tensor, at: _Index, heads: slice, dtype: torch.dtype) -> torch.Tensor:
    """The rows as `[B, heads, rows, width]`."""
    picked = tensor[..., heads, :][at]
    return picked.to(dtype).transpose(1, 2)


def _put(tensor: torch.Tensor, at: _Index, heads: slice, values: torch.Tensor) -> None:
    tensor[..., heads, :][at] = values.transpose(1, 2).to(tensor.dtype)


def _fold(tensor: torch.Tensor, ratio: int) -> torch.Tensor:
    """`[B, kv_heads * ratio, rows, W]` to `[B, kv_heads, ratio * rows, W]`: query heads stacked by key head."""
    batch, heads, rows, width = tensor.shape
    return tensor.reshape(batch, heads // ratio, ratio * rows, width)


def _unfold(tensor: torch.Tensor, ratio: int) -> torch.Tensor:
    batch, heads, rows, width = tensor.shape
    return tensor.reshape(batch, heads * ratio, rows // ratio, width)
