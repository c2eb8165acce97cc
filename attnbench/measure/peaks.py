"""Datasheet peaks by exact NVML board name; a board that is not listed has no known peak."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Peak:
    """Dense peaks of one board: 16-bit tensor TFLOP/s (fp32 accumulation), fp32 TFLOP/s outside the tensor cores,
    memory TB/s, and 16-bit tensor FLOPs per SM and clock."""

    tensor16: float
    fp32: float
    tb_s: float
    flops_per_sm_clock: int


_HOPPER, _AMPERE = 4096, 2048
_H100_SXM = Peak(989.4, 66.9, 3.35, _HOPPER)
_H200 = Peak(989.4, 66.9, 4.8, _HOPPER)

PEAKS: dict[str, Peak] = {
    "NVIDIA H200": _H200,
    "NVIDIA H200 NVL": Peak(835.5, 60.0, 4.8, _HOPPER),
    "NVIDIA H100 80GB HBM3": _H100_SXM,
    "NVIDIA H100 PCIe": Peak(756.0, 51.2, 2.0, _HOPPER),
    "NVIDIA H100 NVL": Peak(835.5, 60.0, 3.9, _HOPPER),
    "NVIDIA GH200 480GB": Peak(989.4, 66.9, 4.0, _HOPPER),
    "NVIDIA GH200 144G HBM3e": Peak(989.4, 66.9, 4.9, _HOPPER),
    "NVIDIA A100-SXM4-40GB": Peak(312.0, 19.5, 1.555, _AMPERE),
    "NVIDIA A100-SXM4-80GB": Peak(312.0, 19.5, 2.039, _AMPERE),
    "NVIDIA A100-PCIE-40GB": Peak(312.0, 19.5, 1.555, _AMPERE),
    "NVIDIA A100 80GB PCIe": Peak(312.0, 19.5, 1.935, _AMPERE),
}


def peak_of(board: str | None) -> Peak | None:
    """The board's peaks; None means "peak unknown"."""
    return PEAKS.get(board or "")
