"""Our Triton kernels; on the CPU under Triton's interpreter, to be checked and never timed."""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING, Any

from attnbench.backends.attention_call import attention_call
from attnbench.backends.base import Prepared
from attnbench.ops.base import Inputs
from attnbench.scenario.case import AttentionCase, Case, op_name

if TYPE_CHECKING:
    import torch


class Triton:
    """`kernels_triton`, every operation."""

    name = "triton"

    def supports(self, case: Case, device: str) -> str | None:
        if not isinstance(case, AttentionCase):
            return None
        for name, dim in (("head dim", case.head_dim), ("value head dim", case.dv)):
            if dim % 8 or not 8 <= dim <= 256:
                return f"{name} {dim}: wants a multiple of 8 from 8 to 256"
        return None

    def prepare(self, case: Case, inputs: Inputs) -> Prepared:
        if all(tensor.device.type == "cpu" for tensor in inputs.tensors.values()):
            os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is decorated
        return _attention(inputs) if isinstance(case, AttentionCase) else _residual(case, inputs)


def _attention(inputs: Inputs) -> Prepared:
    import kernels_triton

    call = attention_call(inputs)

    def forward() -> dict[str, torch.Tensor]:
        out, lse = kernels_triton.attention(call.q, call.k, call.v, return_lse=True, **call.extras)
        return {"out": out, "lse": lse}

    @cache
    def saved() -> Any:
        return kernels_triton.attention_forward(*call.detached, **call.extras)

    def kernel_backward() -> Any:
        return kernels_triton.attention_backward(call.d_out, None, *call.detached, *saved(), **call.extras)

    def tune() -> dict[str, Any]:
        chosen: dict[str, Any] = kernels_triton.tune(call.q, call.k, call.v, **call.extras)
        return chosen

    return Prepared(
        forward=forward,
        kernel_forward=lambda: kernels_triton.attention_forward(*call.detached, **call.extras),
        kernel_backward=None if call.d_out is None else kernel_backward,
        tune=tune,
        deterministic=True,
    )


def _residual(case: Case, inputs: Inputs) -> Prepared:
    import kernels_triton

    function = getattr(kernels_triton, op_name(case))
    kernel_forward = getattr(kernels_triton, f"{op_name(case)}_forward")
    kernel_backward = getattr(kernels_triton, f"{op_name(case)}_backward")
    detached = {name: tensor.detach() for name, tensor in inputs.tensors.items()}
    d_out, d_lse = inputs.cotangents.get("out"), inputs.cotangents.get("lse")

    def forward() -> dict[str, torch.Tensor]:
        out, lse = function(**inputs.tensors, **inputs.extras)
        return {"out": out, "lse": lse}

    @cache
    def saved() -> Any:
        """lse, logits and rstd of phase 1; phase 2 saves nothing but its inputs."""
        return kernel_forward(**detached, **inputs.extras)[1:]

    def backward() -> Any:
        if op_name(case) == "attnres_phase1":
            return kernel_backward(d_out, d_lse, *detached.values(), *saved())
        return kernel_backward(d_out, d_lse, **detached, **inputs.extras)

    return Prepared(
        forward=forward,
        kernel_forward=lambda: kernel_forward(**detached, **inputs.extras),
        kernel_backward=None if d_out is None else backward,
        deterministic=True,
    )


TRITON = Triton()
