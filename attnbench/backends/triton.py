"""Our Triton kernels."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from attnbench.backends.base import Prepared
from attnbench.ops.base import Inputs
from attnbench.scenario.case import AttentionCase, Case

if TYPE_CHECKING:
    import torch


class Triton:
    """`kernels_triton`; on the CPU under Triton's interpreter, to be checked and never timed."""

    name = "triton"

    def supports(self, case: Case, device: str) -> str | None:
        if not isinstance(case, AttentionCase):
            from attnbench.backends import attnres_triton

            return attnres_triton.unsupported(case, device)
        return _head_dims(case)

    def prepare(self, case: Case, inputs: Inputs) -> Prepared:
        if next(iter(inputs.tensors.values())).device.type == "cpu":
            os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is decorated
        if isinstance(case, AttentionCase):
            return _attention(inputs)
        from attnbench.backends import attnres_triton

        return attnres_triton.prepare(case, inputs)


def _head_dims(case: AttentionCase) -> str | None:
    for name, dim in (("head dim", case.head_dim), ("value head dim", case.dv)):
        if dim % 8 or not 8 <= dim <= 256:
            return f"{name} {dim}: wants a multiple of 8 from 8 to 256"
    return None


def _attention(inputs: Inputs) -> Prepared:
    import kernels_triton

    q, k, v = (inputs.tensors[name] for name in ("q", "k", "v"))
    d_out, d_lse = inputs.cotangents.get("out"), inputs.cotangents.get("lse")
    extras = inputs.extras

    def forward() -> dict[str, torch.Tensor]:
        out, lse = kernels_triton.attention(q, k, v, return_lse=True, **extras)
        return {"out": out, "lse": lse}

    return Prepared(forward=forward, deterministic=True)


TRITON = Triton()
