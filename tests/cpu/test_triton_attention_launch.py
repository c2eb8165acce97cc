"""Prepared launches: calls of one kind are looked at once, and each call still passes its own tensors."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels_triton import attention_config, attention_launch, attention_prepared, attention_runtime
from kernels_triton.arguments import attention_arguments

TILE = attention_config.TileConfig(32, 32, 4, 1)


class Kernel:
    """Counts slow launches, and keeps what the quick ones pass."""

    def __init__(self, names: str) -> None:
        self.arg_names = names.split()
        self.slow = 0
        self.quick: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*arguments: Any, **constants: Any) -> Any:
            self.slow += 1
            return {grid: lambda *arguments: self.quick.append(arguments)}

        return run


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    names = attention_launch.attention_forward_kernel.arg_names
    found = Kernel(" ".join(names))
    monkeypatch.setattr(attention_runtime, "INTERPRETED", False)
    monkeypatch.setattr(attention_launch, "attention_forward_kernel", found)
    monkeypatch.setattr(attention_launch, "config_for", lambda key: TILE)
    monkeypatch.setattr(attention_launch, "prepared", {})
    monkeypatch.setattr(attention_prepared, "prepared", attention_launch.prepared)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    return found


def tensors(rows: int = 40, *, packed: bool = False) -> list[torch.Tensor]:
    shape = (rows, 2, 16) if packed else (1, rows, 2, 16)
    return [torch.randn(shape).bfloat16() for _ in range(3)]


def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return attention_launch.forward(attention_arguments(q, k, v, **options))


def test_a_second_call_of_a_kind_passes_its_own_tensors(kernel: Kernel) -> None:
    call(*tensors())
    q, k, v = tensors()
    out, lse = call(q, k, v)
    assert kernel.slow == 1
    ((q_desc, k_desc, v_desc, *rest),) = kernel.quick
    assert [d.base is t for d, t in zip((q_desc, k_desc, v_desc), (q, k, v), strict=True)] == [True] * 3
    assert q_desc.shape == [1, 2, 40, 16]
    assert q_desc.block_shape == [1, 1, 32, 16]
    assert rest[0] is out
    assert rest[1] is lse
    assert len(kernel.quick[0]) == len(kernel.arg_names)


def test_what_changes_the_launch_is_looked_at_again(kernel: Kernel) -> None:
    q, k, v = tensors()
    options = [
        {},
        {"causal": True},
        {"softmax_scale": 0.5},
    ]
    for option in options:
        for _ in range(2):
            call(q, k, v, **option)
    assert kernel.slow == 3
    call(*tensors(48))
    assert kernel.slow == 4
    wide = torch.randn(1, 40, 2, 32).bfloat16()[..., :16]
    call(wide, k, v)
    assert kernel.slow == 5
    attention_config.forget()  # another tile may have been chosen
    call(q, k, v)
    assert kernel.slow == 6


def test_tensors_that_must_be_copied_are_copied_in_every_call(kernel: Kernel) -> None:
    _, k, v = tensors()
    odd = torch.randn(1, 40, 2, 17).bfloat16()[..., 1:]
    for _ in range(2):
        call(odd, k, v)
    assert kernel.slow == 2


def test_packed_offsets_are_passed_as_they_are(kernel: Kernel) -> None:
    q, k, v = tensors(packed=True)
    for last in (40, 30):
        cu = torch.tensor([0, 10, last], dtype=torch.int32)
        call(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=30, max_seqlen_k=30)
    assert kernel.slow == 1
    assert kernel.quick[0][5] is cu
    assert kernel.quick[0][6] is cu
    more = torch.tensor([0, 10, 20, 40], dtype=torch.int32)
    call(q, k, v, cu_seqlens_q=more, cu_seqlens_k=more, max_seqlen_q=30, max_seqlen_k=30)
    assert kernel.slow == 2


def test_nothing_keeps_the_tensors_alive(kernel: Kernel) -> None:
    q, k, v = tensors()
    call(q, k, v)
    gone = weakref.ref(q)
    del q
    gc.collect()
    assert gone() is None


def test_under_the_interpreter_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_runtime, "INTERPRETED", True)
    ran: list[Any] = []
    kernel = SimpleNamespace(arg_names=[])
    made = type("K", (), {"__getitem__": lambda self, grid: lambda *a, **c: ran.append(a)})()
    made.arg_names = kernel.arg_names
    assert attention_runtime.launch(made, 1, (None,), (2,), {}) is None
    assert ran == [(None, 2)]
