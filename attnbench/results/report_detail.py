"""All that one row of a report holds, folded below it."""

from __future__ import annotations

import html

import numpy as np

from attnbench.results.record import Record
from attnbench.results.report_data import reproduction
from attnbench.results.runs import Run
from attnbench.results.store import to_json_text

LEAST_FOR_P99 = 100
WIDTH, HEIGHT = 460, 74


def detail(run: Run, r: Record, *, whole: bool = True) -> str:
    """Times, work, errors and build in parts, samples as a picture, and the command; without `whole` this alone."""
    parts = [
        ("Times, ms", _times(r)),
        ("Work", _work(r)),
        ("Built", _built(r)),
        ("Errors, share of budget", _errors(r)),
    ]
    if not whole:
        parts = []
    boxes = "".join(
        f"<div><h3>{title}</h3>{''.join(f'<div>{html.escape(line)}</div>' for line in lines)}</div>"
        for title, lines in parts
        if lines
    )
    picture = (
        f"<div><h3>{len(r.samples_ms)} samples, ms</h3>{_samples(r)}</div>" if whole and len(r.samples_ms) > 1 else ""
    )
    said = "".join(f"<p>{html.escape(text)}</p>" for text in (r.reason, _fallback(r)) if text)
    tail = f"<pre>{html.escape(chr(10).join(r.stderr_tail))}</pre>" if r.stderr_tail else ""
    command = html.escape(reproduction(run, r))
    return (
        f'{said}{tail}<div class="parts">{boxes}{picture}</div>'
        f'<div class="command"><pre>{command}</pre><button class="copy" type="button">copy</button></div>'
    )


def _fallback(r: Record) -> str:
    return f"ran by {r.ran_by}" if r.ran_by and r.ran_by != r.backend else ""


def _times(r: Record) -> list[str]:
    lines = []
    if r.median_ms is not None:
        lines.append(
            f"median {r.median_ms:.5g} ({r.timer}, cold L2)" if r.timer != "host" else f"median {r.median_ms:.5g}"
        )
    if r.ci_ms:
        lines.append(f"95 % interval {r.ci_ms[0]:.5g} to {r.ci_ms[1]:.5g}")
    if len(r.samples_ms) > 1:
        low, high = np.percentile(r.samples_ms, [10, 90])
        lines.append(f"p10 {low:.5g}, p90 {high:.5g}; {min(r.samples_ms):.5g} to {max(r.samples_ms):.5g}")
        if len(r.samples_ms) >= LEAST_FOR_P99:
            lines.append(f"p99 {np.percentile(r.samples_ms, 99):.5g}")
    if r.baseline_median_ms and r.baseline:
        lines.append(f"{r.baseline}, in turns with it: {r.baseline_median_ms:.5g}")
    named = (("kernel alone", r.kernel_ms), ("warm L2", r.warm_ms), ("host, the call", r.call_ms))
    lines += [f"{name} {value:.5g}" for name, value in named if value is not None]
    return lines + [f"{name.replace('_', ' ')} {value:.5g}" for name, value in (r.split_ms or {}).items()]


def _work(r: Record) -> list[str]:
    lines = []
    if r.flops and r.bytes:
        lines.append(
            f"{r.flops / 1e9:,.4g} GFLOP, {r.bytes / 1e6:,.4g} MB at least, {r.flops / r.bytes:,.4g} FLOP/byte"
        )
    if r.tflops and r.tb_s:
        lines.append(f"{r.tflops:.4g} TFLOP/s, {r.tb_s:.3g} TB/s")
    words = {
        "matmul": "measured matmul",
        "copy": "measured copy",
        "datasheet": "datasheet peak",
        "at_clock": "peak at this clock",
    }
    lines += [f"{100 * share:.1f} % of {words.get(name, name)}" for name, share in (r.peak_share or {}).items()]
    if r.energy_j:
        lines.append(f"{1e3 * r.energy_j:.3g} mJ a call")
    if r.peak_bytes is not None:
        lines.append(
            f"{r.peak_bytes / 2**20:,.1f} MiB at the peak, {(r.workspace_bytes or 0) / 2**20:,.1f} MiB scratch"
        )
    return lines


def _built(r: Record) -> list[str]:
    lines = [f"built in {r.build_s:.2f} s"] if r.build_s is not None else []
    lines += [f"tuned in {r.tune_s:.2f} s"] if r.tune_s is not None else []
    for name, choice in (r.tuned or {}).items():
        text = " ".join(f"{k}={v}" for k, v in choice.items()) if isinstance(choice, dict) else to_json_text(choice)
        lines.append(f"{name}: {text}")
    return lines


def _errors(r: Record) -> list[str]:
    return [
        f"{name} {check.budget_ratio:.3f}: max {check.max_abs:.3g} at {check.worst}, Frobenius {check.rel_fro:.3g}"
        + (f"; {check.message}" if check.message else "")
        for name, check in r.check.items()
    ]


def _samples(r: Record) -> str:
    """Samples in the order in which they were taken: a dot each, the median as a line, the interval as a band."""
    low, high = min(r.samples_ms), max(r.samples_ms)
    pad = (high - low) * 0.08 or high * 0.01
    low, high = low - pad, high + pad
    left, right, top, bottom = 4, WIDTH - 70, 4, HEIGHT - 14

    def y(ms: float) -> float:
        return bottom - (ms - low) / (high - low) * (bottom - top)

    step = (right - left) / max(1, len(r.samples_ms) - 1)
    dots = "".join(f"M{left + i * step:.1f} {y(ms):.1f}h.01" for i, ms in enumerate(r.samples_ms))
    median = r.median_ms or 0.0
    band = ""
    if r.ci_ms:
        upper, lower = y(min(r.ci_ms[1], high)), y(max(r.ci_ms[0], low))
        band = f'<rect x="{left}" y="{upper:.1f}" width="{right - left}" height="{max(1.0, lower - upper):.1f}"/>'
    labels = "".join(
        f'<text x="{right + 6}" y="{at:.1f}">{ms:.4g}</text>' for ms, at in ((high - pad, top + 9), (low + pad, bottom))
    )
    return (
        f'<svg class="samples" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">{band}'
        f'<path class="line" d="M{left} {y(median):.1f}H{right}"/><path class="dots" d="{dots}"/>{labels}'
        f'<text x="{left}" y="{HEIGHT - 2}">first</text>'
        f'<text x="{right}" y="{HEIGHT - 2}" text-anchor="end">last</text></svg>'
    )
