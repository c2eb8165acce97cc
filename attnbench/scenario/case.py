"""A case: one frozen point of a benchmark, and its identity.

A case says *what* is computed (operation, shapes, dtype, mask, seed) and nothing about who computes it or how it is
timed. Its `case_id` hashes exactly these semantic fields, so renaming a scenario, reordering its YAML or adding a field
with a default keeps a case's history.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar, Literal

DTYPES = ("fp32", "fp16", "bf16")
Pass = Literal["forward", "backward", "forward_backward"]
PASSES: tuple[Pass, ...] = ("forward", "backward", "forward_backward")


@dataclass(frozen=True)
class _Case:
    """What attention and residual cases share: the identity."""

    op: ClassVar[str]

    def semantic(self) -> dict[str, Any]:
        """The semantic fields as JSON-ready values; fields that hold their default are left out.

        Leaving defaults out lets a later version add a field without changing the identity of existing cases.
        """
        out: dict[str, Any] = {"op": self.op}
        for f in fields(self):
            value = getattr(self, f.name)
            if value != f.default:
                out[f.name] = list(value) if isinstance(value, tuple) else value
        return out

    @cached_property
    def case_id(self) -> str:
        """16 hex digits of the SHA-256 of the semantic fields (sorted JSON)."""
        text = json.dumps(self.semantic(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class AttentionCase(_Case):
    """One attention problem, dense or packed.

    Dense: q is `[batch, seqlen_q, heads, head_dim]`, k `[batch, seqlen_k, kv_heads, head_dim]`, v with
    `value_head_dim`. Varlen: `seqlens_q`/`seqlens_k` give the length of each sequence (zero allowed); the tensors are
    packed `[tokens, heads, head_dim]`; `batch`, `seqlen_q` and `seqlen_k` are then 0.

    `value_head_dim` 0 means "the same as head_dim"; `softmax_scale` None means `head_dim ** -0.5`.
    """

    op: ClassVar[str] = "attention"

    dtype: str
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    layout: Literal["dense", "varlen"] = "dense"
    batch: int = 0
    seqlen_q: int = 0
    seqlen_k: int = 0
    seqlens_q: tuple[int, ...] = ()
    seqlens_k: tuple[int, ...] = ()
    value_head_dim: int = 0
    softmax_scale: float | None = None
    seed: int = 0

    @property
    def dv(self) -> int:
        """Head dim of the values (and of the output)."""
        return self.value_head_dim or self.head_dim

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale

    @property
    def lengths(self) -> tuple[tuple[int, int], ...]:
        """(query length, key length) of every sequence, dense batches included."""
        if self.layout == "varlen":
            return tuple(zip(self.seqlens_q, self.seqlens_k, strict=True))
        return ((self.seqlen_q, self.seqlen_k),) * self.batch

    @property
    def label(self) -> str:
        """A short name for tables: `bf16 4x4096 h16 d128 causal`."""
        if self.layout == "varlen":
            tokens_q, tokens_k = sum(self.seqlens_q), sum(self.seqlens_k)
            tokens = f"{tokens_q}" if self.seqlens_q == self.seqlens_k else f"{tokens_q}q{tokens_k}k"
            shape = f"varlen {len(self.seqlens_q)} seqs {tokens} tok"
        elif self.seqlen_q == self.seqlen_k:
            shape = f"{self.batch}x{self.seqlen_q}"
        else:
            shape = f"{self.batch}x{self.seqlen_q}q{self.seqlen_k}k"
        heads = f"h{self.heads}" if self.heads == self.kv_heads else f"h{self.heads}/{self.kv_heads}"
        dim = f"d{self.head_dim}" if self.dv == self.head_dim else f"d{self.head_dim}/{self.dv}"
        return f"{self.dtype} {shape} {heads} {dim} {'causal' if self.causal else 'full'}"


@dataclass(frozen=True)
class AttnresCase(_Case):
    """One phase of block attention residuals over `rows` positions of width `hidden`.

    Phase 1 attends `queries` pseudo-queries to `blocks` block representations; phase 2 merges one intra-block partial
    sum (so `blocks` and `queries` are 0 there). `lse_grad` says whether the loss depends on the LSE output;
    `logit_scale` multiplies the pseudo-queries (30 makes a saturated softmax).
    """

    op: ClassVar[str] = "attnres"

    phase: Literal[1, 2]
    dtype: str
    rows: int
    hidden: int
    blocks: int = 0
    queries: int = 0
    eps: float | None = None
    lse_grad: bool = True
    logit_scale: float = 1.0
    seed: int = 0

    def semantic(self) -> dict[str, Any]:
        out = super().semantic()
        del out["phase"]
        out["op"] = f"attnres_phase{self.phase}"
        return out

    @property
    def label(self) -> str:
        extra = f" n{self.blocks} s{self.queries}" if self.phase == 1 else ""
        if not self.lse_grad:
            extra += " no-dlse"
        if self.logit_scale != 1.0:
            extra += f" logits x{self.logit_scale:g}"
        return f"{self.dtype} {self.rows}x{self.hidden}{extra}"


Case = AttentionCase | AttnresCase


def op_name(case: Case) -> str:
    """The operation's public name: `attention`, `attnres_phase1` or `attnres_phase2`."""
    return f"{case.op}_phase{case.phase}" if isinstance(case, AttnresCase) else case.op


def case_from_semantic(semantic: dict[str, Any]) -> Case:
    """Rebuild a case from a record's `case` field; the inverse of `Case.semantic`.

    Raises:
        ValueError: the operation is unknown or a field does not belong to it.
    """
    data: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in semantic.items()}
    op = data.pop("op", None)
    try:
        if op == "attention":
            return AttentionCase(**data)
        if op in ("attnres_phase1", "attnres_phase2"):
            return AttnresCase(phase=1 if op.endswith("1") else 2, **data)
    except TypeError as error:
        raise ValueError(f"not a case of {op}: {error}") from None
    raise ValueError(f"unknown operation {op!r}: expected attention, attnres_phase1 or attnres_phase2")
