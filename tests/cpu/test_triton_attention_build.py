"""The Gluon kernels build for Hopper without a GPU, and the assembler keeps their products asynchronous."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

# Runs in a process of its own: here the interpreter is on, which knows no Gluon.
BUILD = r"""
import json, re, subprocess, sys, tempfile
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from kernels_triton import attention_hopper

def build(kernel, rows, constants):
    def descriptor(name):
        d = constants["DV"] if name in ("v_desc", "do_desc") else constants["D"]
        layout = gl.NVMMASharedLayout.get_default_for([1, 1, rows[name], d], gl.bfloat16)
        return f"tensordesc<bf16[1, 1, {rows[name]}, {d}],{layout!r}>"

    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_desc"):
            signature[name] = descriptor(name)
        elif name.startswith("cu_"):
            signature[name] = "*i32"
        elif name.endswith("_ptr"):
            signature[name] = "*bf16" if name in ("out_ptr", "dq_ptr", "dk_ptr", "dv_ptr") else "*fp32"
        else:
            signature[name] = "fp32" if name.startswith("scale") else "i32"
    attributes = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(kernel.arg_names) if signature[n][0] == "*"}
    source = GluonASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(kernel.arg_names.index(n),): v for n, v in constants.items()},
        attrs=attributes,
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder, "kernel.ptx")
        ptx.write_text(compiled.asm["ptx"])
        command = [str(ptxas), "-v", "-arch=sm_90a", str(ptx), "-o", str(Path(folder, "kernel.cubin"))]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return {
        "serialized": "serialized" in log,
        "spilled": int(re.search(r"(\d+) bytes spill stores", log).group(1)),
        "shared": compiled.metadata.shared,
        "wgmma": compiled.asm["ptx"].count("wgmma.mma_async"),
    }

d, packed = int(sys.argv[1]), sys.argv[2] == "packed"
common = {"GROUP_SIZE": 4 if packed else 1, "D": d, "DV": d, "CAUSAL": packed, "VARLEN": packed, "HEAD_DIM_V": d}
if not packed:
    common |= {"cu_q_ptr": None, "cu_k_ptr": None}
block, stages = (128 if d == 128 else 64), 2
n, ahead = (64, 3) if d == 128 else (32, 2)
kernels = {
    "forward": build(
        attention_hopper.forward, {"q_desc": 64, "k_desc": block, "v_desc": block},
        common | {"BLOCK_N": block, "NEGATIVE_SCALE": False, "ALL_LIVE": not packed, "STAGES": stages}),
    "dq": build(
        attention_hopper.dq, {"q_desc": 64, "do_desc": 64, "k_desc": n, "v_desc": n},
        common | {"BLOCK_N": n, "HEAD_DIM": d, "ALL_LIVE": not packed, "STAGES": ahead, "AHEAD": ahead > 2,
                  "HAS_DLSE": False, "COMPUTE_DQ": True, "dlse_ptr": None}),
}
if d == 128:
    kernels["dkv"] = build(
        attention_hopper.dkv, {"q_desc": 64, "do_desc": 64, "k_desc": 64, "v_desc": 64},
        common | {"BLOCK_M": 64, "HEAD_DIM": d, "STAGES": 2})
print(json.dumps(kernels))
"""


@pytest.mark.parametrize(("head_dim", "kind"), [(128, "packed"), (256, "dense")])
def test_builds_for_hopper(head_dim: int, kind: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(head_dim), kind], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    built = json.loads(done.stdout)
    assert set(built) == {"forward", "dq"} | ({"dkv"} if head_dim == 128 else set())
    for kernel, facts in built.items():
        assert not facts["serialized"], f"{kernel}: ptxas serialises its wgmma, which costs most of its speed"
        assert facts["wgmma"] > 0, f"{kernel} does not multiply with wgmma"
        assert facts["shared"] <= 232_448, f"{kernel} takes {facts['shared']} bytes of shared memory"
        assert facts["spilled"] <= 256, f"{kernel} spills {facts['spilled']} bytes"
