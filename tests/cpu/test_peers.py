"""Peers: what they take, how they are called, and that they are right where their package is installed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from attnbench import scenario
from attnbench.backends import backend, judged
from attnbench.backends.base import BuildFailed
from attnbench.backends.peer import load, missing
from attnbench.measure.verify import Truth, Verdict, verify
from attnbench.ops import operation
from attnbench.ops.attention_eager import dense
from attnbench.ops.attnres_eager import phase1
from attnbench.scenario.case import AttentionCase, AttnresCase, Case, op_name

PHASE1 = AttnresCase(1, "bf16", rows=7, hidden=16, blocks=5, queries=3)
PHASE2 = AttnresCase(2, "bf16", rows=11, hidden=16)
DENSE = AttentionCase("bf16", 4, 2, 16, True, batch=2, seqlen_q=9, seqlen_k=12)
PEERS = ("fa4", "fa3", "flash_attn_res", "liger", "fla")


def verdict_of(name: str, case: Case) -> Verdict:
    op = operation(op_name(case))
    inputs = op.make_inputs(case, "cpu")  # type: ignore[arg-type]
    prepared = backend(name).prepare(case, inputs)
    truth = Truth(op, case, "cpu", inputs)
    return verify(truth if prepared.lse_grad else truth.without_lse_grad, prepared)


@contextmanager
def installed(name: str, **contents: Any) -> Iterator[None]:
    """A module of this name with these contents, its parents included, in place of what is there."""
    parts = name.split(".")
    names = [".".join(parts[: i + 1]) for i in range(len(parts))]
    before = {n: sys.modules.get(n) for n in names}
    for n in names:
        module = ModuleType(n)
        module.__path__ = []
        module.__spec__ = type(sys.__spec__)(n, None)  # find_spec asks for it
        sys.modules[n] = module
    vars(sys.modules[name]).update(contents)
    try:
        yield
    finally:
        for n, module_before in before.items():
            if module_before is None:
                del sys.modules[n]
            else:
                sys.modules[n] = module_before


@pytest.mark.parametrize("case", [PHASE1, replace(PHASE1, queries=1), replace(PHASE1, dtype="fp32", hidden=24)])
def test_liger_is_right(case: AttnresCase) -> None:
    pytest.importorskip("liger_kernel")
    verdict = verdict_of("liger", case)
    assert verdict.passed, verdict.reason
    assert "without lse" in verdict.flags


@pytest.mark.parametrize("case", [PHASE1, PHASE2, replace(PHASE2, lse_grad=False)], ids=lambda c: c.label)
def test_flash_attn_res_is_right(case: AttnresCase, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flash_attn_res")
    from flash_attn_res.kernels import phase_1, phase_2, reduce

    for module in (phase_1, phase_2, reduce):  # autotuning measures, which the interpreter cannot
        for kernel in vars(module).values():
            if hasattr(kernel, "configs"):
                monkeypatch.setattr(kernel, "configs", kernel.configs[:1])
    verdict = verdict_of("flash_attn_res", case)
    assert verdict.passed, verdict.reason


def test_fla_is_called_by_its_signature() -> None:
    def fused_attnres(
        query: torch.Tensor,
        residuals: tuple[torch.Tensor, ...],
        rms_weight: torch.Tensor,
        output_rms_weight: None = None,
        rms_eps: float = 1e-6,
        scale: float = 1.0,
    ) -> torch.Tensor:
        assert torch.equal(rms_weight, torch.ones(16))
        return phase1(torch.stack(list(residuals)), query[None], rms_eps)[0][0]

    with installed("fla.ops.attnres", fused_attnres=fused_attnres):
        assert backend("fla").supports(PHASE1, "cuda") is None
        for case in (PHASE1, replace(PHASE1, queries=1, eps=1e-3)):
            verdict = verdict_of("fla", case)
            assert verdict.passed, verdict.reason


@pytest.mark.parametrize(
    ("name", "module", "keyword"),
    [("fa4", "flash_attn.cute", "return_lse"), ("fa3", "flash_attn_interface", "return_attn_probs")],
)
def test_flash_attention_is_asked_for_lse(name: str, module: str, keyword: str) -> None:
    def function(asked: str) -> Callable[..., Any]:
        def flash_attn_func(
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            softmax_scale: float | None = None,
            causal: bool = False,
            return_lse: bool = False,
            return_attn_probs: bool = False,
        ) -> Any:
            assert {"return_lse": return_lse, "return_attn_probs": return_attn_probs}[asked]
            return dense(q, k, v, causal, softmax_scale)

        return flash_attn_func

    with installed(module, flash_attn_func=function(keyword)):
        assert backend(name).supports(DENSE, "cuda") is None
        for case in (DENSE, replace(DENSE, seqlen_q=20)):  # the first queries see no key
            verdict = verdict_of(name, case)
            assert verdict.passed, verdict.reason
            assert not verdict.flags


def test_peers_say_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PEERS:
        assert not judged(name)
    with installed("flash_attn_interface"), installed("fla"), installed("liger_kernel"), installed("flash_attn_res"):
        reasons: list[tuple[str, Case, str]] = [
            ("fa3", replace(DENSE, dtype="fp32"), "fp16 and bf16 only"),
            ("fa3", replace(DENSE, head_dim=192, value_head_dim=64), "value head dim 64"),
            ("fa3", PHASE1, "attention only"),
            ("flash_attn_res", replace(PHASE1, hidden=96), "power of two"),
            ("flash_attn_res", replace(PHASE2, dtype="fp16"), "bf16"),
            ("flash_attn_res", replace(PHASE1, rows=1 << 20, hidden=2048), "32 bits"),
            ("flash_attn_res", DENSE, "residuals only"),
            ("liger", PHASE2, "first phase"),
            ("liger", DENSE, "first phase"),
            ("liger", replace(PHASE1, rows=0), "at least one row"),
            ("liger", replace(PHASE1, rows=1 << 20, hidden=2048), "32 bits"),
            ("fla", replace(PHASE1, rows=1, hidden=9), "boundary of 16"),
            ("fla", PHASE2, "first phase"),
        ]
        for name, case, words in reasons:
            found = backend(name).supports(case, "cuda")
            assert found is not None, (name, case.label)
            assert words in found
        for name, case in (("fa3", DENSE), ("flash_attn_res", PHASE1), ("liger", PHASE1), ("fla", PHASE1)):
            assert backend(name).supports(case, "cuda") is None
            assert "CUDA GPU" in str(backend(name).supports(case, "cpu"))
        assert backend("fa3").supports(replace(DENSE, head_dim=192, value_head_dim=128), "cuda") is None


def test_a_peer_that_is_missing_or_broken_is_named() -> None:
    assert missing("no_such_package.part", "no-such") == "not installed: pip install no-such"
    assert "pip install flash-attn-3" in str(backend("fa3").supports(DENSE, "cuda"))
    with installed("fla.ops.attnres"), pytest.raises(BuildFailed, match=r"fla-core is installed.*fused_attnres"):
        load("fla.ops.attnres", "fused_attnres", "fla-core")


def test_the_scenario_of_peers_has_ours_beside_each_of_them() -> None:
    plan = scenario.load(Path(__file__).parents[2] / "scenarios" / "peers.yaml")
    met: set[str] = set()
    for planned in plan.plan():
        op = op_name(planned.case)
        assert "triton" in planned.backends
        assert any(
            name in planned.backends for name in (("sdpa_cudnn", "sdpa_flash") if op == "attention" else ("compile",))
        )
        met |= {name for name in planned.backends if name in PEERS}
    assert met == set(PEERS)
