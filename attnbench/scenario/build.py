"""One combination of fields → one case. What depends on several fields is judged here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attnbench.scenario.case import AttentionCase, AttnresCase, Case
from attnbench.scenario.lengths import BadLengths, draw
from attnbench.scenario.model import MAX_SEQUENCES, MAX_TOKENS

DENSE = ("seqlen", "seqlen_q", "seqlen_k")
PACKED = ("lens", "lens_q", "lens_k", "lengths")
SIZE = ("batch", "tokens")
_COMMON = ("op", "model", "dtype", "seed")
_ATTENTION = ("heads", "kv_heads", "head_dim", "value_head_dim", "causal", "softmax_scale")
_PHASE2 = ("rows", "hidden", "eps", "lse_grad", "logit_scale")
FIELDS: dict[str, tuple[str, ...]] = {
    "attention": (*_COMMON, *_ATTENTION, *SIZE, *DENSE, *PACKED),
    "attnres_phase1": (*_COMMON, *_PHASE2, "blocks", "queries"),
    "attnres_phase2": (*_COMMON, *_PHASE2),
}
DEFAULTS: dict[str, Any] = {
    "op": "attention",
    "dtype": "bf16",
    "seed": 0,
    "causal": False,
    "lse_grad": True,
    "logit_scale": 1.0,
}
FP32_EPS = 2.0**-23


class BadCase(ValueError):
    """Fields that contradict each other. `field` is the one to point at, None for the entry as a whole."""

    def __init__(self, field: str | None, message: str) -> None:
        super().__init__(message)
        self.field = field


def build(fields: Mapping[str, Any]) -> Case:
    """The case of a complete set of fields (already of the right types and within bounds).

    Raises:
        BadCase: a field is missing, or fields contradict each other.
    """
    point = {**DEFAULTS, **fields}
    return _attention(point) if point["op"] == "attention" else _attnres(point)


def _need(point: Mapping[str, Any], *names: str) -> None:
    missing = [name for name in names if name not in point]
    if missing:
        raise BadCase(None, f"{point['op']} wants {_and(names)}; missing: {_and(missing)}")


def _and(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _attention(point: Mapping[str, Any]) -> AttentionCase:
    _need(point, "heads", "head_dim")
    heads, dim = point["heads"], point["head_dim"]
    kv_heads = point.get("kv_heads", heads)
    if heads % kv_heads:
        raise BadCase(
            "kv_heads" if "kv_heads" in point else "heads",
            f"kv_heads {kv_heads} does not divide heads {heads}; wanted one of "
            + ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0),
        )
    value_dim = point.get("value_head_dim", dim)
    scale = point.get("softmax_scale")
    common: dict[str, Any] = {
        "dtype": point["dtype"],
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": dim,
        "value_head_dim": 0 if value_dim == dim else value_dim,
        "causal": point["causal"],
        "softmax_scale": None if scale == dim**-0.5 else scale,
        "seed": point["seed"],
    }
    packed = [name for name in PACKED if name in point]
    dense = [name for name in DENSE if name in point]
    if packed and dense:
        raise BadCase(packed[0], f"{_and(packed)} with {_and(dense)}; wanted a packed batch or a dense one, not both")
    if packed:
        lens_q, lens_k = _packed(point, packed)
        return AttentionCase(layout="varlen", seqlens_q=lens_q, seqlens_k=lens_k, **common)
    if not dense:
        raise BadCase(None, "attention wants `seqlen`, `seqlen_q` and `seqlen_k`, `lens`, or `lengths`; none is given")
    batch, seqlen_q, seqlen_k = _dense(point, dense)
    return AttentionCase(batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, **common)


def _dense(point: Mapping[str, Any], given: list[str]) -> tuple[int, int, int]:
    if given not in (["seqlen"], ["seqlen_q", "seqlen_k"]):
        raise BadCase(given[-1], f"{_and(given)} alone; wanted `seqlen`, or `seqlen_q` and `seqlen_k`")
    seqlen_q = point.get("seqlen") or point["seqlen_q"]
    seqlen_k = point.get("seqlen") or point["seqlen_k"]
    if "tokens" in point:
        tokens = point["tokens"]
        if "batch" in point:
            raise BadCase("tokens", "both `tokens` and `batch`; wanted one: batch = tokens / seqlen")
        if tokens % seqlen_q:
            raise BadCase(
                "tokens", f"tokens {tokens} is not a multiple of seqlen {seqlen_q}; wanted tokens = batch * seqlen"
            )
        batch = tokens // seqlen_q
    else:
        batch = point.get("batch", 1)
    most = batch * max(seqlen_q, seqlen_k)
    if most > MAX_TOKENS:
        raise BadCase(
            given[0],
            f"{batch} sequences of {max(seqlen_q, seqlen_k):,} make {most:,} tokens; wanted at most {MAX_TOKENS:,}",
        )
    return batch, seqlen_q, seqlen_k


def _packed(point: Mapping[str, Any], given: list[str]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    for name in SIZE:
        if name in point:
            raise BadCase(
                name, f"`{name}` belongs to dense batches; a packed batch's lengths say how many tokens it has"
            )
    if given == ["lengths"]:
        lens_q = lens_k = _drawn(point["lengths"])
    elif given == ["lens"]:
        lens_q = lens_k = tuple(point["lens"])
    elif given == ["lens_q", "lens_k"]:
        lens_q, lens_k = tuple(point["lens_q"]), tuple(point["lens_k"])
        if len(lens_q) != len(lens_k):
            raise BadCase(
                "lens_k", f"{len(lens_q)} query lengths but {len(lens_k)} key lengths; wanted as many of each"
            )
    else:
        raise BadCase(given[-1], f"{_and(given)}; wanted `lens`, or `lens_q` and `lens_k`, or `lengths`")
    for name, lens in (("lens_q", lens_q), ("lens_k", lens_k)):
        if sum(lens) > MAX_TOKENS:
            where = name if name in point else given[0]
            raise BadCase(where, f"the lengths sum to {sum(lens):,} tokens; wanted at most {MAX_TOKENS:,}")
    return lens_q, lens_k


def _drawn(spec: Any) -> tuple[int, ...]:
    try:
        return draw(
            spec.distribution,
            shortest=spec.min,
            longest=spec.max,
            mean=spec.mean,
            sigma=spec.sigma,
            tokens=spec.tokens,
            sequences=spec.sequences,
            seed=spec.seed,
            most=MAX_SEQUENCES,
        )
    except BadLengths as error:
        raise BadCase("lengths", str(error)) from None


def _attnres(point: Mapping[str, Any]) -> AttnresCase:
    phase1 = point["op"] == "attnres_phase1"
    _need(point, "rows", "hidden", *(("blocks", "queries") if phase1 else ()))
    eps = point.get("eps")
    rows = point["rows"] * (max(point["blocks"], point["queries"]) if phase1 else 1)
    if rows * point["hidden"] > MAX_TOKENS * 8192:
        raise BadCase("rows", f"{rows:,} rows of {point['hidden']:,} do not fit any GPU; wanted fewer")
    return AttnresCase(
        phase=1 if phase1 else 2,
        dtype=point["dtype"],
        rows=point["rows"],
        hidden=point["hidden"],
        blocks=point["blocks"] if phase1 else 0,
        queries=point["queries"] if phase1 else 0,
        eps=None if eps == FP32_EPS else eps,
        lse_grad=point["lse_grad"],
        logit_scale=point["logit_scale"],
        seed=point["seed"],
    )
