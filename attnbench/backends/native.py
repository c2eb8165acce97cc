"""Our CUDA C++ kernels for Hopper."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from attnbench.backends.attention_call import attention_call, needs_gpu, not_attention
from attnbench.backends.base import BuildFailed, Prepared
from attnbench.ops.base import Inputs
from attnbench.scenario.case import AttentionCase, Case

if TYPE_CHECKING:
    import torch


class Native:
    """One of `kernels_native`'s attention kernels, by its name there; forward only where it has no gradients."""

    def __init__(self, name: str) -> None:
        self.name = name

    def supports(self, case: Case, device: str) -> str | None:
        if not isinstance(case, AttentionCase):
            return not_attention(case)
        return needs_gpu(device) or self._unsupported(case, requires_grad=False)

    def _unsupported(self, case: AttentionCase, *, requires_grad: bool) -> str | None:
        import kernels_native

        reason: str | None = kernels_native.attention_unsupported(
            self.name,
            dtype=case.dtype,
            head_dim=case.head_dim,
            value_head_dim=case.dv,
            heads=case.heads,
            kv_heads=case.kv_heads,
            causal=case.causal,
            varlen=case.layout == "varlen",
            requires_grad=requires_grad,
        )
        return reason

    def prepare(self, case: Case, inputs: Inputs) -> Prepared:
        import kernels_native

        assert isinstance(case, AttentionCase)
        call = attention_call(inputs)
        differentiable = self._unsupported(case, requires_grad=True) is None
        tensors = (call.q, call.k, call.v) if differentiable else call.detached
        name, extras = self.name, call.extras

        def forward() -> dict[str, torch.Tensor]:
            with build_failures():
                out, lse = kernels_native.attention(*tensors, return_lse=True, kernel=name, **extras)
            return {"out": out, "lse": lse}

        def kernel_forward() -> Any:
            return kernels_native.attention_forward(*call.detached, kernel=name, **extras)

        @cache
        def saved() -> Any:
            return kernel_forward()

        def kernel_backward() -> Any:
            return kernels_native.attention_backward(call.d_out, None, *call.detached, *saved(), kernel=name, **extras)

        return Prepared(
            forward=forward,
            kernel_forward=kernel_forward,
            kernel_backward=kernel_backward if differentiable and call.d_out is not None else None,
            differentiable=differentiable,
        )


@contextmanager
def build_failures() -> Iterator[None]:
    """Turns the kernel package's build error into the one that a run reports as `build-failed`."""
    import kernels_native

    try:
        yield
    except kernels_native.BuildFailed as error:
        raise BuildFailed(str(error)) from error


SM90 = Native("sm90")
SM90_MMA = Native("sm90_mma")
