"""Made-up runs in the shape of real ones, for tests of everything that reads records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from attnbench.measure.stats import median_interval
from attnbench.results.record import Record, TensorCheck
from attnbench.results.runs import Run, read_run
from attnbench.results.store import RunWriter
from attnbench.scenario.case import AttentionCase, AttnresCase, Case, op_name

H200 = {"name": "NVIDIA H200", "uuid": "GPU-1", "power_cap_w": 700.0, "driver": "580.159"}
INFO: dict[str, Any] = {
    "scenario": "h100",
    "scenario_file": "scenarios/h100.yaml",
    "scenario_text": "cases: []",
    "commit": "a" * 40,
    "dirty": False,
    "device": "cuda",
    "gpu": H200,
    "packages": {"torch": "2.11.0", "triton": "3.6.0"},
    "ceilings": {"matmul_bf16": 671.0, "copy": 4.28},
    "rows": 10,
}

# Forward TFLOP/s, full mask, at S = 4096; shorter sequences and the causal mask reach less, the backward 0.85 of it.
SPEED = {"sdpa_flash": 341.0, "sdpa_cudnn": 600.0, "flex": 460.0, "triton": 520.0, "eager": 99.0}
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)


def attention_case(seqlen: int, *, causal: bool = False, **fields: Any) -> AttentionCase:
    values: dict[str, Any] = {"dtype": "bf16", "heads": 16, "kv_heads": 16, "head_dim": 128, "batch": 16384 // seqlen}
    return AttentionCase(**(values | fields), causal=causal, seqlen_q=seqlen, seqlen_k=seqlen)


def timed(case: Case, backend: str, which: str, ms: float, *, rng: np.random.Generator, **fields: Any) -> Record:
    """A record whose 40 samples scatter by 1 % around `ms`."""
    samples = (ms * rng.lognormal(0, 0.01, 40)).tolist()
    values: dict[str, Any] = {
        "outcome": "ok",
        "median_ms": float(np.median(samples)),
        "ci_ms": list(median_interval(samples)),
        "samples_ms": samples,
        "timer": "graph",
        "check": {"out": TensorCheck(1e-3, 2e-3, 0.3, True)},
        "telemetry": {"sm_mhz": 1650.0, "watts": 680.0},
    }
    return Record(case.case_id, op_name(case), case.semantic(), case.label, backend, which, **(values | fields))


def attention_records(*, seed: int = 0, scale: float = 1.0, seqlens: tuple[int, ...] = SEQLENS) -> list[Record]:
    """A sweep over lengths, both masks, both passes, five backends; `scale` multiplies the times of `triton`."""
    rng = np.random.default_rng(seed)
    records = []
    for causal in (False, True):
        for seqlen in seqlens:
            case = attention_case(seqlen, causal=causal)
            flops = 4 * case.batch * case.heads * seqlen**2 * case.head_dim / (2 if causal else 1)
            for which, work in (("forward", 1.0), ("backward", 2.5)):
                cudnn = None
                for backend in sorted(SPEED, key=lambda name: name != "sdpa_cudnn"):
                    reach = SPEED[backend] * seqlen / (seqlen + 500) * (0.85 if which == "backward" else 1)
                    reach *= (seqlen / (seqlen + 600) if causal else 1) * (0.4 if causal and backend == "eager" else 1)
                    ms = flops * work / reach / 1e9
                    record = timed(case, backend, which, ms * (scale if backend == "triton" else 1), rng=rng)
                    record.tflops = flops * work / (record.median_ms or 1) / 1e9
                    record.tb_s = 0.3
                    record.flops, record.bytes = int(flops * work), 10**9
                    record.peak_share = {"matmul": record.tflops / 671, "copy": 0.1}
                    if cudnn is not None:
                        record.baseline, record.baseline_median_ms = "sdpa_cudnn", cudnn
                    cudnn = record.median_ms if backend == "sdpa_cudnn" else cudnn
                    records.append(record)
    return records


def attnres_records(*, seed: int = 0) -> list[Record]:
    """Both phases at three widths, four backends, both passes; flash_attn_res misses the odd width."""
    rng = np.random.default_rng(seed)
    speeds = {"eager": 0.23, "compile": 2.4, "triton": 3.7, "flash_attn_res": 3.0}
    records = []
    for phase in (1, 2):
        for rows, hidden in ((16384, 2048), (16384, 4096), (8192, 7168)):
            extra = {"blocks": 8, "queries": 8} if phase == 1 else {}
            case = AttnresCase(phase=phase, dtype="bf16", rows=rows, hidden=hidden, **extra)  # type: ignore[arg-type]
            for which, share in (("forward", 1.0), ("backward", 0.6)):
                for backend, speed in speeds.items():
                    if backend == "flash_attn_res" and hidden == 7168:
                        gone = Record(
                            case.case_id, op_name(case), case.semantic(), case.label, backend, which, "unsupported"
                        )
                        gone.reason = "hidden 7168 is no power of two"
                        records.append(gone)
                        continue
                    count = rows * hidden * 2 * (16 if phase == 1 else 4)
                    record = timed(case, backend, which, count / (speed * share) / 1e9, rng=rng)
                    record.tb_s = count / (record.median_ms or 1) / 1e9
                    record.bytes, record.peak_share = count, {"copy": record.tb_s / 4.28}
                    records.append(record)
    return records


def store(results: Path, records: list[Record], **info: Any) -> Run:
    """The records as a stored run, read back."""
    with RunWriter(results, INFO | info) as writer:
        path = writer.folder / "cases.jsonl"
        from attnbench.results.store import to_json_text

        path.write_text("".join(to_json_text(r.to_json()) + "\n" for r in records), encoding="utf-8")
    return read_run(writer.folder)
