"""The mma.sync kernels' own source, run on the CPU by tests/cpu/emulator through the real host code, against fp64.

What it cannot see: the hardware's memory model and instruction latencies; tests/gpu has those.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from attnbench.ops.attention_inputs import make_inputs
from attnbench.ops.attention_reference import reference, yardstick
from attnbench.scenario.case import AttentionCase
from kernels_native import sm90_mma, tensor_map
from kernels_native.jit import ROOT, Specialisation

EMULATOR = Path(__file__).parent / "emulator"
REPLACED = ("mbarrier", "tma", "mma", "swizzle", "named_barrier", "memory")
FORWARD = [sm90_mma.forward_specialisation(dim, causal, "bf16") for dim in (64, 128) for causal in (False, True)]
BACKWARD = [
    one
    for dim, causal, deterministic in ((64, False, False), (64, True, True), (128, True, False))
    for one in sm90_mma.backward_specialisations(dim, causal, deterministic, "bf16")
]

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def compiled(folder: Path, specialisations: list[Specialisation]) -> ctypes.CDLL:
    """A library whose `run(expression, params, blocks, threads)` runs a specialisation; all are of one source."""
    source = specialisations[0].path
    folder.mkdir()
    for name in REPLACED:
        (folder / f"{name}.cuh").write_text('#pragma once\n#include "device.h"\n')
    shutil.copy(ROOT / "include" / "seqlen.cuh", folder)
    text = source.read_text().replace("extern __shared__", "extern")
    cases = ""
    for expression, entry in {one.expression: one.entry for one in specialisations}.items():
        kind = re.search(rf"\b{entry}\(const __grid_constant__ (\w+) p\)", text)
        assert kind is not None
        cases += f"""
  if (!strcmp(expression, "{expression}")) {{
    static {kind[1]} copy;
    memcpy(&copy, params, sizeof copy);
    for (int i = 0; i < blocks; ++i) run_block(threads, i, [] {{ {expression}(copy); }});
    return 0;
  }}"""
    text += f"""
void run_block(int threads, int block, void (*body)());
extern "C" int run(const char* expression, const void* params, int blocks, int threads) {{{cases}
  return 1;
}}"""
    (folder / "kernel.cpp").write_text(text)
    library = folder / "kernel.so"
    command = ["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", f"-I{folder}", f"-I{EMULATOR}", "-o", library]
    subprocess.run([*command, folder / "kernel.cpp", EMULATOR / "device.cpp"], check=True)
    return ctypes.CDLL(str(library))


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ctypes.CDLL]:
    folder = tmp_path_factory.mktemp("emulated")
    sources = {one[0].source: one for one in (FORWARD, BACKWARD)}
    return {source: compiled(folder / Path(source).stem, every) for source, every in sources.items()}


class Emulated:
    """Stands in for a loaded kernel."""

    def __init__(self, library: ctypes.CDLL, specialisation: Specialisation) -> None:
        self.library, self.specialisation = library, specialisation

    def launch(self, grid: tuple[int, int, int], params: bytes, stream: int) -> None:
        expression = self.specialisation.expression.encode()
        assert self.library.run(expression, params, grid[0], self.specialisation.threads) == 0


@pytest.fixture(autouse=True)
def emulated(libraries: dict[str, ctypes.CDLL], monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(_: str, address: int, shape: Any, strides: Any, box: Any, swizzle: int) -> bytes:
        assert swizzle == 128
        return struct.pack("<Q4Q3Q4I48x", address, *shape, *strides, *box)

    monkeypatch.setattr(tensor_map, "_encode", encode)
    monkeypatch.setattr(tensor_map, "_maps", {})
    monkeypatch.setattr(sm90_mma, "_plans", {})
    monkeypatch.setattr(sm90_mma, "current_stream", lambda _: 0)
    monkeypatch.setattr(sm90_mma, "kernel", lambda one, _: Emulated(libraries[one.source], one))
    sm90_mma._backward_kernels.cache_clear()


def case(**changes: Any) -> AttentionCase:
    fields: dict[str, Any] = {"dtype": "bf16", "heads": 2, "kv_heads": 1, "head_dim": 64, "causal": True}
    if "seqlens_q" in changes:
        fields["layout"] = "varlen"
    else:
        fields |= {"batch": 1, "seqlen_q": 130, "seqlen_k": 200}
    return AttentionCase(**{**fields, **changes})


def judged(results: dict[str, torch.Tensor], inputs: Any) -> None:
    truth, unit = reference(inputs), yardstick(inputs)
    for name, value in results.items():
        exact, eager = truth[name], unit[name].double()
        assert torch.equal(torch.isfinite(value), torch.isfinite(exact)), name
        finite = torch.isfinite(exact)
        error, budget = (
            ((x.double() - exact)[finite]).abs().max().item() if finite.any() else 0.0 for x in (value, eager)
        )
        assert error <= 2 * budget + 5e-3, (name, error, budget)


CASES = [
    (case(causal=False), False),
    (case(), True),
    (case(seqlen_q=150, seqlen_k=70, kv_heads=2), True),
    (case(head_dim=128, heads=1, seqlen_k=130), False),
    (case(head_dim=104, value_head_dim=72, heads=1, batch=2, seqlen_q=65), False),
    (case(seqlens_q=(0, 65, 63, 0, 129), seqlens_k=(3, 65, 0, 5, 200), softmax_scale=-0.2), True),
    (case(seqlens_q=(1, 70), seqlens_k=(90, 40), causal=False), False),
]


@pytest.mark.parametrize(("one", "deterministic"), CASES, ids=lambda x: x.label if isinstance(x, AttentionCase) else "")
def test_forward_and_backward_against_fp64(one: AttentionCase, deterministic: bool) -> None:
    extra = 30 if one.layout == "varlen" else 0
    inputs = make_inputs(one, "cpu", extra_rows=extra)
    q, k, v = (x.detach() for x in inputs.tensors.values())
    dout, dlse = inputs.cotangents["out"], inputs.cotangents["lse"]
    cu = inputs.extras.get("cu_seqlens_q"), inputs.extras.get("cu_seqlens_k")
    scale = one.head_dim**-0.5 if one.softmax_scale is None else one.softmax_scale
    if extra:
        for x, offsets in ((q, cu[0]), (k, cu[1]), (v, cu[1]), (dout, cu[0])):
            assert offsets is not None
            x[int(offsets[-1]) :] = torch.nan
    out, lse = sm90_mma.forward(q, k, v, *cu, one.causal, scale)
    results = {"out": out, "lse": lse}
    specialisation = sm90_mma.backward_specialisations(
        128 if one.head_dim > 64 else 64, one.causal, deterministic, "bf16"
    )
    if specialisation[1] in BACKWARD:
        grads = sm90_mma.backward(dout, dlse, q, k, v, out, lse, *cu, one.causal, scale, deterministic)
        results |= dict(zip(("dq", "dk", "dv"), grads, strict=True))
    if extra:
        assert all(not x[-extra:].any() for name, x in results.items() if name != "lse")
        assert torch.equal(lse[:, -extra:], torch.full_like(lse[:, -extra:], -torch.inf))
        with torch.no_grad():
            for x in (q, k, v, dout):
                x[-extra:] = 0
    judged(results, inputs)
