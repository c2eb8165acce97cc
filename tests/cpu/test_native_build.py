"""`attnbench build`, and a user's own `.cu` through the same JIT."""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from attnbench.backends.custom_cuda import CudaLaunch, _argument, from_cuda
from attnbench.cli.build import build
from attnbench.errors import UserError
from attnbench.scenario.case import AttentionCase
from kernels_native import catalogue, sm90_mma
from kernels_native.jit import Specialisation

EXAMPLE = Path(__file__).parents[2] / "examples" / "my_kernel"
GOOD = sm90_mma.backward_specialisations(64, False, False, "bf16")[0]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNBENCH_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def bad(tmp_path: Path) -> Specialisation:
    (tmp_path / "bad.cu").write_text("__global__ void bad() { nonsense; }")
    return Specialisation(str(tmp_path / "bad.cu"), "bad", backend="sm90_mma")


def offer(monkeypatch: pytest.MonkeyPatch, *specialisations: Specialisation) -> None:
    monkeypatch.setattr(catalogue, "specialisations", lambda _: iter(specialisations))


def test_json_lists_what_the_compiler_made(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    offer(monkeypatch, GOOD)
    assert build(format="json", jobs=1) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert set(row) == {"name", "backend", "registers", "spill_bytes", "shared_bytes", "sass", "seconds", "cached"}
    assert row["backend"] == "sm90_mma"
    assert row["registers"] > 0
    assert row["sass"]["SHFL"] > 0
    assert row["cached"] is False
    assert build(format="json", jobs=1) == 0
    assert json.loads(capsys.readouterr().out) == [{**row, "cached": True}]


def test_a_failed_build_is_exit_code_3_and_the_others_are_still_built(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], bad: Specialisation
) -> None:
    offer(monkeypatch, bad, GOOD)
    assert build(jobs=2) == 3
    printed = capsys.readouterr()
    assert "build failed" in printed.out
    assert "preprocess<64>" in printed.out
    assert 'identifier "nonsense" is undefined' in printed.err


@pytest.mark.parametrize("format", ["csv", "md", "table"])
def test_other_formats(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], format: str) -> None:
    offer(monkeypatch, GOOD)
    assert build(format=format, jobs=1) == 0
    assert "preprocess<64>" in capsys.readouterr().out


def test_unknown_backend() -> None:
    with pytest.raises(UserError, match="no native backend 'sm9'"):
        build(backend=["sm9"])


def test_the_example_compiles_and_says_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import cuda_kernel  # type: ignore[import-not-found]

    from kernels_native.jit import build as compile_kernel

    built = compile_kernel(cuda_kernel.launch.specialisation())
    assert "row_attention" in built.symbol
    case = AttentionCase("bf16", 4, 2, 64, True, batch=1, seqlen_q=8, seqlen_k=8)
    assert cuda_kernel.backend.supports(case, "cuda") is None
    assert cuda_kernel.backend.supports(case, "cpu") == "needs a CUDA GPU"
    packed = AttentionCase("bf16", 4, 2, 64, True, layout="varlen", seqlens_q=(8,), seqlens_k=(8,))
    assert cuda_kernel.backend.supports(packed, "cuda") == "takes dense input only"
    del sys.modules["cuda_kernel"]


def test_arguments_become_c_values() -> None:
    tensor = torch.zeros(4)
    struct = (ctypes.c_int64 * 3)(1, 2, 3)
    values: list[tuple[Any, type]] = [
        (True, ctypes.c_bool),
        (7, ctypes.c_int),
        (0.5, ctypes.c_float),
        (tensor, ctypes.c_void_p),
    ]
    for value, kind in values:
        assert type(_argument(value)) is kind
    assert _argument(tensor).value == tensor.data_ptr()
    assert _argument(struct) is struct
    with pytest.raises(ValueError, match=r"ctypes\.c_int64"):
        _argument(2**31)
    with pytest.raises(TypeError, match="want a tensor"):
        _argument("text")


def test_a_backend_without_a_backward_is_forward_only(tmp_path: Path) -> None:
    launch = CudaLaunch(tmp_path / "x.cu", "x", 32, grid=lambda t: (1,), arguments=lambda t: ())
    backend = from_cuda(launch, name="mine")
    assert backend.name == "mine"
    from attnbench.ops.attention_inputs import make_inputs

    case = AttentionCase("bf16", 1, 1, 64, False, batch=1, seqlen_q=8, seqlen_k=8)
    assert backend.prepare(case, make_inputs(case, "cpu")).differentiable is False


def test_kernels_of_one_source_are_told_apart_in_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from attnbench.cli.build import _print

    monkeypatch.setenv("COLUMNS", "80")
    made = {"backend": "sm90", "registers": 168, "spill_bytes": 0, "shared_bytes": 1024, "sass": {"HGMMA": 8}}
    macros = ("HEAD_DIM=64 WARPGROUPS=3 STAGES=2 CAUSAL=0", "HEAD_DIM=64 WARPGROUPS=3 STAGES=2 CAUSAL=1")
    rows = [{"name": f"kernel.cu: sm90_forward {m}", "seconds": 0.5, "cached": False, **made} for m in macros]
    _print(rows, "table")
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert "…" not in printed
    assert printed.count("WARPGROUPS=3") == 2
    assert printed.count("CAUSAL=1") == 1
    assert "CAUSAL=0" not in printed
    assert "Macros that are 0 are left out" in printed
    _print(rows, "csv")
    assert "CAUSAL=0" in capsys.readouterr().out
