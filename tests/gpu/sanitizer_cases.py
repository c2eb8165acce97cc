"""A corpus subset small enough for compute-sanitizer: every kernel of sm90_mma and sm90, tails, packing, splits.

compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 1 python tests/gpu/sanitizer_cases.py
compute-sanitizer --tool racecheck --error-exitcode 1 python tests/gpu/sanitizer_cases.py

Arguments: kernels ("sm90", "sm90_mma"; both where none is given). The kernels are built with EVERY_LANE_ARRIVES
(mbarrier.cuh), which racecheck needs. API errors are cuda-bindings' asking the driver for functions of newer versions.
"""

from __future__ import annotations

import os
import sys

import torch

import kernels_native
from attnbench.ops.attention_inputs import make_inputs
from attnbench.scenario.case import AttentionCase
from kernels_native import sm90_backward, sm90_config, sm90_forward

CASES = [
    AttentionCase(dtype, 2, 1, dim, causal, value_head_dim=value_dim, **layout)  # type: ignore[arg-type]
    for dtype in ("bf16", "fp16")
    for dim, value_dim in ((64, 64), (128, 128), (192, 128), (192, 192), (256, 256))
    for causal in (False, True)
    for layout in (
        {"batch": 1, "seqlen_q": 130, "seqlen_k": 200},
        {"layout": "varlen", "seqlens_q": (0, 65, 63, 1), "seqlens_k": (3, 65, 0, 130)},
    )
]
FEW_QUERIES = AttentionCase("bf16", 4, 2, 128, True, batch=1, seqlen_q=3, seqlen_k=1100)
LONG = AttentionCase("bf16", 2, 1, 128, False, batch=1, seqlen_q=200, seqlen_k=330)


def sizes(case: AttentionCase) -> dict[str, int]:
    names = "head_dim", "heads", "kv_heads"
    return {name: getattr(case, name) for name in names} | {"value_head_dim": case.dv}


def long_sequences() -> None:
    """The specialisations that calls take from thousands of rows on, over a few."""
    inputs = make_inputs(LONG, "cuda")
    q, k, v = (x.detach() for x in inputs.tensors.values())
    dout, dlse = inputs.cotangents["out"], inputs.cotangents["lse"]
    for causal in (False, True):
        config = sm90_config.choose(128, 128, causal, False, LONG.dtype, long=True)
        wide = sm90_backward.choose(128, 128, causal, False, LONG.dtype, wide=True)
        out, lse = sm90_forward.forward(q, k, v, causal=causal, softmax_scale=LONG.scale, config=config)
        rest = None, None, causal, LONG.scale, False
        sm90_backward.backward(dout, dlse, q, k, v, out, lse, *rest, config=wide)
    torch.cuda.synchronize()
    print(LONG.label, "in the kernels for long sequences", flush=True)


def main(kernels: list[str]) -> None:
    for case in (*CASES, FEW_QUERIES):
        inputs = make_inputs(case, "cuda")
        q, k, v = inputs.tensors.values()
        for kernel in kernels:
            if kernels_native.attention_unsupported(kernel, dtype=case.dtype, **sizes(case)):
                continue
            for deterministic in (False, True):
                out = kernels_native.attention(q, k, v, kernel=kernel, deterministic=deterministic, **inputs.extras)
                torch.autograd.grad(out, (q, k, v), inputs.cotangents["out"])
        torch.cuda.synchronize()
        print(case.label, flush=True)
    if "sm90" in kernels:
        long_sequences()


if __name__ == "__main__":
    os.environ["ATTNBENCH_NVRTC_DEFINES"] = "EVERY_LANE_ARRIVES"
    main(sys.argv[1:] or ["sm90_mma", "sm90"])
