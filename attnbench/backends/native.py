"""Our CUDA C++ kernels for Hopper."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnbench.backends.attention_call import attention_call, first_reason, needs_gpu, not_attention
from attnbench.backends.base import BuildFailed, Prepared
from attnbench.ops.base import Inputs
from attnbench.scenario.case import AttentionCase, Case

if TYPE_CHECKING:
    import torch


class Native:
    """One of `kernels_native`'s attention kernels, by its name there."""

    def __init__(self, name: str) -> None:
        self.name = name

    def supports(self, case: Case, device: str) -> str | None:
        if not isinstance(case, AttentionCase):
            return not_attention(case)
        import kernels_native

        return first_reason(
            needs_gpu(device),
            kernels_native.attention_unsupported(
                self.name,
                dtype=case.dtype,
                head_dim=case.head_dim,
                value_head_dim=case.dv,
                heads=case.heads,
                kv_heads=case.kv_heads,
                causal=case.causal,
                varlen=case.layout == "varlen",
            ),
        )

    def prepare(self, case: Case, inputs: Inputs) -> Prepared:
        import kernels_native

        call = attention_call(inputs)
        name = self.name

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            try:
                return kernels_native.attention(q, k, v, return_lse=True, kernel=name, **call.extras)
            except kernels_native.BuildFailed as error:
                raise BuildFailed(str(error)) from error

        def forward() -> dict[str, torch.Tensor]:
            out, lse = run(call.q, call.k, call.v)
            return {"out": out, "lse": lse}

        return Prepared(forward=forward, kernel_forward=lambda: run(*call.detached))


SM90 = Native("sm90")
SM90_MMA = Native("sm90_mma")
