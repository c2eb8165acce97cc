"""The error budget: is a tensor as right as its dtype allows?

`reference` is fp64 truth on the same rounded inputs, `yardstick` what eager PyTorch gives in the same dtype, `got` what
is judged. A tensor passes when, over its finite elements,

* `max|got - reference| <= 2 max|yardstick - reference| + floor`. The floor is twice `(r + 0.3 - 0.3) - r` evaluated in
  the tensor's own dtype (r the reference rounded to it; FlashAttention's own tests use the same rule), plus the
  rounding of an exponent at the largest reference: a fused kernel recomputes probabilities from an lse stored in fp32,
  which makes them wrong by 2^-23 of the largest |lse| (at least 4), where eager subtracts the maximum first;
* `norm(got - reference) <= 2 norm(yardstick - reference)`, plus the norm of one rounding to the dtype and that of the
  exponent: a maximum alone cannot see a small error that is everywhere;
* NaN and infinities of each sign stand where the reference has them.

Some gradients are zero by cancellation (dq of a query with one key). Such a tensor has room for fp32 rounding at the
size of its companions, since both terms that cancel have that size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnbench.results.record import TensorCheck

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]

FACTOR = 2.0
EXPONENT_ROUNDING = 2.0**-23
SMALLEST_EXPONENT = 4.0
CANCELLED = 1e-6  # a reference this small beside its companions is zero by cancellation
CANCELLATION_ROUNDING = 2.0**-16
CHUNK = 1 << 26  # elements compared at once


def check_tensors(reference: Tensors, yardstick: Tensors, got: Tensors) -> dict[str, TensorCheck]:
    """Judges every tensor of `reference` by the error budget above.

    A tensor that `got` lacks, or has in another shape, fails. So does one whose budget is so wide that zeros would pass
    for it: such a check says nothing.
    """
    companions = max((_largest(t) for t in reference.values()), default=0.0)
    exponent = max(SMALLEST_EXPONENT, _largest(reference["lse"])) if "lse" in reference else SMALLEST_EXPONENT
    room = _Room(companions, EXPONENT_ROUNDING * exponent)
    lse_room = _Room(companions, EXPONENT_ROUNDING * SMALLEST_EXPONENT)
    return {
        name: _judge(name, reference[name], yardstick[name], got.get(name), lse_room if name == "lse" else room)
        for name in reference
    }


@dataclass(frozen=True)
class _Room:
    """What one call allows each of its tensors beyond the yardstick."""

    companions: float  # largest finite element of any reference
    exponent: float  # relative error of a probability


def check_fixed(reference: Tensors, got: Tensors, *, rtol: float, atol: float) -> dict[str, TensorCheck]:
    """Judges by `|got - reference| <= atol + rtol |reference|` elementwise, NaN and infinities as in the budget.

    `budget_ratio` is the largest error over its own tolerance; `message` holds the largest relative error.
    """
    results = {}
    for name, want in reference.items():
        have = got.get(name)
        wrong = _wrong_form(name, want, have)
        if wrong is not None or have is None:
            results[name] = wrong or _failed(f"{name} is missing")
            continue
        scan = _Scan(want, have)
        ratio = relative = 0.0
        for piece_want, piece_have in _pieces(want, have):
            error, size = (piece_have - piece_want).abs(), piece_want.abs()
            ratio = max(ratio, _finite(piece_want, error / (atol + rtol * size)))
            relative = max(relative, _finite(piece_want, error / size.clamp_min(1e-8)))
        results[name] = _result(scan, math.inf if scan.pattern else ratio, f"max_rel {relative:.6e}")
    return results


class _Scan:
    """One pass over a tensor: largest error and where, squared norms, and the NaN/inf pattern."""

    def __init__(self, reference: torch.Tensor, got: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        import torch

        self.max_error = self.error2 = self.reference2 = self.rounding2 = self.floor = self.largest = 0.0
        self.worst_flat = 0
        self.pattern = ""
        self.shape = tuple(reference.shape)
        start = 0
        for want, have, rounded in _pieces(reference, got, reference):
            finite = want.isfinite()
            if not self.pattern:
                self.pattern = _pattern(want, have, start, self.shape)
            error = torch.where(finite, (have - want).abs(), 0.0)
            error = torch.where(error.isnan(), math.inf, error)
            if error.numel():
                top, at = error.flatten().max(0)
                if float(top) > self.max_error:
                    self.max_error, self.worst_flat = float(top), start + int(at)
            kept = torch.where(finite, want, 0.0)
            self.error2 += float(error.square().sum())
            self.reference2 += float(kept.square().sum())
            self.largest = max(self.largest, _top(kept.abs()))
            if dtype is not None:
                rounded = kept.to(dtype)
                self.floor = max(self.floor, _top(((rounded + 0.3 - 0.3) - rounded).abs().double()))
                self.rounding2 += float((rounded.double() - kept).square().sum())
            start += want.numel()

    @property
    def worst(self) -> list[int]:
        return _coordinate(self.worst_flat, self.shape)

    @property
    def rel_fro(self) -> float:
        return math.sqrt(self.error2 / self.reference2) if self.reference2 else math.sqrt(self.error2)


def _judge(
    name: str, reference: torch.Tensor, yardstick: torch.Tensor, got: torch.Tensor | None, room: _Room
) -> TensorCheck:
    wrong = _wrong_form(name, reference, got)
    if wrong is not None or got is None:
        return wrong or _failed(f"{name} is missing")
    if _has_nan(reference):
        return _failed(f"the reference of {name} has NaN: nothing can be checked against it")
    scan = _Scan(reference, got, yardstick.dtype)
    unit = _Scan(reference, yardstick)
    cancelled = scan.largest <= CANCELLED * room.companions
    cancelling = CANCELLATION_ROUNDING * room.companions if cancelled else 0.0
    budget = FACTOR * unit.max_error + 2 * scan.floor + room.exponent * scan.largest + cancelling
    norm = math.sqrt(scan.reference2)
    norm_budget = FACTOR * math.sqrt(unit.error2) + math.sqrt(scan.rounding2) + room.exponent * norm
    norm_budget += cancelling * math.sqrt(max(1, reference.numel()))
    if unit.pattern:
        return _failed(f"eager has {unit.pattern} in {name}: nothing can be checked against it")
    if not cancelled and scan.largest <= budget and norm <= norm_budget:
        return _failed(f"{name} cannot be judged: zeros would pass, since eager itself is off by {unit.max_error:.3g}")
    ratio = max(_ratio(scan.max_error, budget), _ratio(math.sqrt(scan.error2), norm_budget))
    if scan.pattern:
        ratio = math.inf
    note = ""
    if ratio > 1 and scan.max_error <= budget and not scan.pattern:
        note = f"relative norm {scan.rel_fro:.3g}, want at most {norm_budget / norm if norm else norm_budget:.3g}"
    elif ratio > 1 and not scan.pattern:
        note = f"off by {scan.max_error:.3g} at {scan.worst}, want at most {budget:.3g}"
    return _result(scan, ratio, note)


def _result(scan: _Scan, ratio: float, note: str) -> TensorCheck:
    return TensorCheck(
        max_abs=scan.max_error,
        rel_fro=scan.rel_fro,
        budget_ratio=ratio,
        passed=ratio <= 1.0,
        worst=scan.worst,
        message=scan.pattern or note,
    )


def _failed(message: str) -> TensorCheck:
    return TensorCheck(math.inf, math.inf, math.inf, False, [], message)


def _wrong_form(name: str, reference: torch.Tensor, got: torch.Tensor | None) -> TensorCheck | None:
    if got is None:
        return _failed(f"{name} is missing")
    if tuple(got.shape) != tuple(reference.shape):
        return _failed(f"{name} has shape {list(got.shape)}, want {list(reference.shape)}")
    return None


def _pattern(want: torch.Tensor, have: torch.Tensor, start: int, shape: tuple[int, ...]) -> str:
    for what, here, there in (
        ("NaN", have.isnan(), want.isnan()),
        ("+inf", have.isposinf(), want.isposinf()),
        ("-inf", have.isneginf(), want.isneginf()),
    ):
        differs = (here != there).flatten()
        count = int(differs.sum())
        if count:
            at = int(differs.int().argmax())
            verb = "has" if bool(here.flatten()[at]) else "lacks"
            return f"{verb} {what} at {_coordinate(start + at, shape)} ({count} elements)"
    return ""


def _pieces(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """The tensors in fp64, a slice of the flattened order at a time, so that huge ones need no full copies."""
    if tensors[0].numel() <= CHUNK:
        yield tuple(t.detach().double().flatten() for t in tensors)
        return
    if tensors[0].dim() == 1:
        for at in range(0, tensors[0].shape[0], CHUNK):
            yield tuple(t.detach()[at : at + CHUNK].double() for t in tensors)
        return
    row = tensors[0][0].numel()
    if row > CHUNK:
        for i in range(tensors[0].shape[0]):
            yield from _pieces(*(t[i] for t in tensors))
        return
    step = CHUNK // row
    for at in range(0, tensors[0].shape[0], step):
        yield tuple(t.detach()[at : at + step].double().flatten() for t in tensors)


def _coordinate(flat: int, shape: tuple[int, ...]) -> list[int]:
    at = []
    for size in reversed(shape):
        flat, index = divmod(flat, size) if size else (0, 0)
        at.append(index)
    return at[::-1]


def _ratio(error: float, budget: float) -> float:
    if error == 0.0:
        return 0.0
    return error / budget if budget > 0.0 else math.inf


def _top(values: torch.Tensor) -> float:
    return float(values.max()) if values.numel() else 0.0


def _finite(want: torch.Tensor, values: torch.Tensor) -> float:
    kept = values[want.isfinite()]
    return math.inf if bool(kept.isnan().any()) else _top(kept)


def _largest(tensor: torch.Tensor) -> float:
    largest = 0.0
    for (piece,) in _pieces(tensor):
        finite = piece[piece.isfinite()]
        largest = max(largest, _top(finite.abs()))
    return largest


def _has_nan(tensor: torch.Tensor) -> bool:
    return any(bool(piece.isnan().any()) for (piece,) in _pieces(tensor))
