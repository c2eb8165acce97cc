"""A corpus subset small enough for compute-sanitizer: every kernel of sm90_mma and sm90, tails, packing.

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

CASES = [
    AttentionCase(dtype, 2, 1, dim, causal, **layout)  # type: ignore[arg-type]
    for dtype in ("bf16", "fp16")
    for dim in (64, 128)
    for causal in (False, True)
    for layout in (
        {"batch": 1, "seqlen_q": 130, "seqlen_k": 200},
        {"layout": "varlen", "seqlens_q": (0, 65, 63, 1), "seqlens_k": (3, 65, 0, 130)},
    )
]


def main(kernels: list[str]) -> None:
    for case in CASES:
        inputs = make_inputs(case, "cuda")
        q, k, v = inputs.tensors.values()
        for kernel in kernels:
            for deterministic in (False, True):
                out = kernels_native.attention(q, k, v, kernel=kernel, deterministic=deterministic, **inputs.extras)
                torch.autograd.grad(out, (q, k, v), inputs.cotangents["out"])
        torch.cuda.synchronize()
        print(case.label, flush=True)


if __name__ == "__main__":
    os.environ["ATTNBENCH_NVRTC_DEFINES"] = "EVERY_LANE_ARRIVES"
    main(sys.argv[1:] or ["sm90_mma", "sm90"])
