"""Kernels that are wrong on purpose, each in a way that has fooled a harness: `attnbench selftest` must catch them all.

They are built on the eager baseline, so that what is wrong is only what their name says. Each is a backend, loaded as
`attnbench.measure.known_bad:NAME`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from attnbench.backends.base import Prepared
from attnbench.measure.verify import autograd_call
from attnbench.ops import operation
from attnbench.ops.base import Inputs
from attnbench.scenario.case import AttentionCase, Case

Tensors = dict[str, torch.Tensor]
Forward = Callable[[], Tensors]

DENSE = AttentionCase(dtype="bf16", heads=4, kv_heads=2, head_dim=64, causal=True, batch=1, seqlen_q=96, seqlen_k=160)
LARGE = AttentionCase(
    dtype="bf16", heads=64, kv_heads=64, head_dim=128, causal=False, batch=1, seqlen_q=128, seqlen_k=32
)
PACKED = AttentionCase(
    dtype="bf16",
    heads=2,
    kv_heads=2,
    head_dim=64,
    causal=True,
    layout="varlen",
    seqlens_q=(65, 63, 40),
    seqlens_k=(65, 63, 40),
)


@dataclass(frozen=True)
class KnownBad:
    """One wrong kernel: `wrong(case, inputs, forward)` makes its forward of a right one, `spoil` edits gradients."""

    name: str
    what: str
    case: AttentionCase = DENSE
    wrong: Callable[[Any, Inputs, Forward], Forward] | None = None
    spoil: Callable[[Tensors], None] | None = None
    gpu_only: str = ""
    """Why it has no meaning on the CPU."""

    def supports(self, case: Case, device: str) -> str | None:
        return None

    def prepare(self, case: Case, inputs: Inputs) -> Prepared:
        op = operation("attention")
        right: Forward = lambda: op.eager(case, inputs)  # noqa: E731
        forward = self.wrong(case, inputs, right) if self.wrong else right
        spoil = self.spoil
        if spoil is None:
            return Prepared(forward=forward)

        def backward(outputs: Tensors) -> Tensors:
            grads = {name: grad.clone() for name, grad in autograd_call(op, inputs, outputs)().items()}
            spoil(grads)
            return grads

        return Prepared(forward=forward, backward=backward)


def _edited(edit: Callable[[torch.Tensor, AttentionCase], torch.Tensor]) -> Callable[..., Forward]:
    """A forward whose out is edited on its way, with the right gradient."""

    def wrong(case: AttentionCase, inputs: Inputs, right: Forward) -> Forward:
        def forward() -> Tensors:
            outputs = right()
            return {**outputs, "out": edit(outputs["out"].clone(), case)}

        return forward

    return wrong


def _one_element(out: torch.Tensor, case: AttentionCase) -> torch.Tensor:
    out[0, 77, 41, 5] += 0.5  # the budget is some hundredths here
    return out


def _last_tile(out: torch.Tensor, case: AttentionCase) -> torch.Tensor:
    out[..., -16:, -1, :] *= 1.2
    return out


def _past_its_end(out: torch.Tensor, case: AttentionCase) -> torch.Tensor:
    end = case.seqlens_q[0]
    out[end] = out[end - 1]
    return out


def _masked(shift: Callable[[AttentionCase], int]) -> Callable[..., Forward]:
    """Eager attention whose causal mask lies `shift` keys beside where it should."""

    def wrong(case: AttentionCase, inputs: Inputs, right: Forward) -> Forward:
        def forward() -> Tensors:
            q, k, v = (inputs.tensors[name].transpose(1, 2) for name in ("q", "k", "v"))
            ratio = case.heads // case.kv_heads
            k, v = k.repeat_interleave(ratio, dim=1), v.repeat_interleave(ratio, dim=1)
            scores = (q.float() @ k.float().mT) * case.scale
            diagonal = case.seqlen_k - case.seqlen_q + 1 + shift(case)
            hidden = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(diagonal)
            scores = scores.masked_fill(hidden, -torch.inf)
            out = scores.softmax(-1).to(v.dtype) @ v
            return {"out": out.transpose(1, 2), "lse": scores.logsumexp(-1)}

        return forward

    return wrong


def _edits_inputs(case: AttentionCase, inputs: Inputs, right: Forward) -> Forward:
    def forward() -> Tensors:
        outputs = {name: tensor.clone() for name, tensor in right().items()}
        inputs.tensors["k"].data[0, -1, 0, 3] *= 2
        return outputs

    return forward


def _caches_by_pointer(case: AttentionCase, inputs: Inputs, right: Forward) -> Forward:
    seen: dict[tuple[int, ...], Tensors] = {}

    def forward() -> Tensors:
        key = tuple(tensor.data_ptr() for tensor in inputs.tensors.values())
        if key not in seen:
            seen[key] = right()
        return dict(seen[key])

    return forward


def _other_stream(case: AttentionCase, inputs: Inputs, right: Forward) -> Forward:
    side = torch.cuda.Stream()

    def forward() -> Tensors:
        with torch.cuda.stream(side):
            torch.cuda._sleep(2_000_000)  # a real kernel takes a while, too
            return right()

    return forward


def _uninitialised(case: AttentionCase, inputs: Inputs, right: Forward) -> Forward:
    def forward() -> Tensors:
        outputs = right()
        fresh = torch.empty_like(outputs["out"])
        fresh[:, :-1] = outputs["out"].detach()[:, :-1]
        return {**outputs, "out": outputs["out"] + (fresh - outputs["out"].detach())}

    return forward


def _lazy(case: AttentionCase, inputs: Inputs, right: Forward) -> Forward:
    """Works in its first calls, which are the checks, and hands out what it had later."""
    state: dict[str, Any] = {"calls": 0}

    def forward() -> Tensors:
        state["calls"] += 1
        if state["calls"] <= 6 or "kept" not in state:
            state["kept"] = right()
        return dict(state["kept"])

    return forward


def _nan_once(grads: Tensors) -> None:
    grads["dk"][0, -1, 0, 3] = torch.nan


def _doubled(grads: Tensors) -> None:
    grads["dk"] *= 2


ZEROS = KnownBad("zeros", "returns zeros", wrong=_edited(lambda out, case: out * 0))
NAN_GRADIENT = KnownBad("nan-gradient", "NaN in one element of one gradient", spoil=_nan_once)
ONE_ELEMENT = KnownBad("one-element", "one wrong element in a million", LARGE, _edited(_one_element))
LAST_TILE = KnownBad("last-tile", "last tile of the last head wrong", wrong=_edited(_last_tile))
DK_DOUBLED = KnownBad("dk-doubled", "dK doubled", spoil=_doubled)
OFF_BY_ONE = KnownBad("off-by-one", "causal mask off by one", wrong=_masked(lambda case: 1))
TOP_LEFT = KnownBad(
    "top-left", "causal mask aligned top-left", wrong=_masked(lambda case: case.seqlen_q - case.seqlen_k)
)
PAST_ITS_END = KnownBad("past-its-end", "writes one row past its sequence", PACKED, _edited(_past_its_end))
EDITS_INPUTS = KnownBad("edits-inputs", "edits its inputs", wrong=_edits_inputs)
CACHES = KnownBad("caches", "caches by pointer", wrong=_caches_by_pointer)
OTHER_STREAM = KnownBad(
    "other-stream", "runs on another stream", wrong=_other_stream, gpu_only="a CPU has no streams to confuse"
)
UNINITIALISED = KnownBad("uninitialised", "reads memory that was never written", wrong=_uninitialised)
LAZY = KnownBad("lazy", "skips its work when timed", wrong=_lazy)
GOOD = KnownBad("good", "the control: a right kernel, which must pass")

KNOWN_BAD: dict[str, KnownBad] = {
    name: value for name, value in globals().items() if isinstance(value, KnownBad) and name != "GOOD"
}
