"""The one-pass Gluon kernels of phase 1 build for Hopper without a GPU, within its registers and shared memory."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

# Runs in a process of its own: here the interpreter is on, which knows no Gluon.
BUILD = r"""
import json, re, subprocess, sys, tempfile
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from kernels_triton import attnres_attend_one_pass

kernel = attnres_attend_one_pass._forward
blocks, queries, hidden = map(int, sys.argv[1:])
tile = attnres_attend_one_pass.choose(hidden)
constants = attnres_attend_one_pass.constants(blocks, queries, hidden, tile)
signature, attributes = {}, {}
for i, name in enumerate(kernel.arg_names):
    if name in constants:
        signature[name] = "constexpr"
    elif name.endswith("_ptr"):
        signature[name] = "*bf16" if name in ("v_ptr", "w_ptr", "out_ptr") else "*fp32"
    else:
        signature[name] = "fp32" if name == "eps" else "i32"
    if name.endswith("_ptr") or name in ("v_block_stride", "v_row_stride", "hidden"):
        attributes[(i,)] = [["tt.divisibility", 16]]
source = GluonASTSource(
    fn=kernel,
    signature=signature,
    constexprs={(kernel.arg_names.index(n),): v for n, v in constants.items()},
    attrs=attributes,
)
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": tile.warps})
ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
with tempfile.TemporaryDirectory() as folder:
    ptx = Path(folder, "kernel.ptx")
    ptx.write_text(compiled.asm["ptx"])
    command = [str(ptxas), "-v", "-arch=sm_90a", str(ptx), "-o", str(Path(folder, "kernel.cubin"))]
    log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
text = compiled.asm["ptx"]
print(json.dumps({
    "spilled": int(re.search(r"(\d+) bytes spill stores", log).group(1)),
    "shared": compiled.metadata.shared * tile.programs,
    "copies": len(re.findall(r"cp\.async\.cg\.shared\.global \[[^,]*\], \[[^,]*\], (?:0x10|16)", text)),
    "other_copies": len(re.findall(r"cp\.async\.ca", text)),
    "products": text.count("mma.sync"),
}))
"""


@pytest.mark.parametrize(("blocks", "queries", "hidden"), [(8, 8, 4096), (5, 8, 2048), (3, 6, 2304)])
def test_forward_builds_for_hopper(blocks: int, queries: int, hidden: int) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(blocks), str(queries), str(hidden)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["shared"] <= 232_448
    assert facts["copies"] > 0
    assert facts["other_copies"] == 0, "sources are copied in pieces of less than 16 bytes"
    assert facts["products"] > 0
    assert facts["spilled"] <= 256, f"spills {facts['spilled']} bytes"


LOGITS = r"""
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kernels_triton.attnres_attend_forward import _logits as kernel

constants = {"ROWS": 8, "BLOCK_N": 8, "BLOCK_S": 8, "CHUNK": 128, "SPLIT": True, "PRECISION": "tf32x3"}
types = {"v_ptr": "*bf16", "w_ptr": "*bf16", "eps": "fp32"}
signature = {
    name: "constexpr" if name in constants else types.get(name, "*fp32" if name.endswith("_ptr") else "i32")
    for name in kernel.arg_names
}
constexprs = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs={})
print(triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "num_stages": 1}).asm["ttgir"])
"""


def test_logits_of_two_passes_are_added_with_rounding() -> None:
    # Left to themselves, tensor cores add the 448 products of D 7168 with truncation: 3e-6 of the logit, all one way.
    done = subprocess.run(
        [sys.executable, "-c", LOGITS], capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "0"}
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r"(%\S+) = tt\.dot %\S+, %\S+, %cst\S*,", done.stdout)
    assert found, "the product starts from an earlier sum"
    assert re.search(rf"arith\.addf %\S+, {re.escape(found[1])} :", done.stdout)
