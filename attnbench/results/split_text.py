"""Where each row's time goes, as lines for people: device time by part, and host time."""

from __future__ import annotations

from collections.abc import Iterable

from attnbench.results.compare_view import milliseconds
from attnbench.results.record import Record
from attnbench.results.text import PASSES, Column, aligned, backend_name, terminal_width

DEVICE = ("zero_fill", "preprocess", "main", "postprocess", "copy")
HOST = (("call", "call_ms"), ("no grad", "call_no_grad"), ("autograd", "autograd_host"))


def split_table(records: Iterable[Record]) -> str:
    """One line a timed row that was split: parts of the device time, then host time; "" where none was. In ms."""
    rows = [record for record in records if record.split_ms and any(part in record.split_ms for part in DEVICE)]
    if not rows:
        return ""
    parts = [part for part in DEVICE if any(part in (r.split_ms or {}) for r in rows)]
    columns = [Column("case"), Column("backend"), Column("pass")]
    columns += [Column(part.replace("_", " "), ">") for part in parts]
    columns += [Column(f"host: {title}", ">") for title, _ in HOST] + [Column("kernels")]
    return aligned(columns, [_cells(record, parts) for record in rows], width=terminal_width())


def _cells(record: Record, parts: list[str]) -> list[str]:
    split = {**(record.split_ms or {}), **({"call_ms": record.call_ms} if record.call_ms is not None else {})}
    cells = [record.label, backend_name(record.backend), PASSES.get(record.pass_, record.pass_)]
    cells += [milliseconds(split[name]) if name in split else "" for name in (*parts, *(name for _, name in HOST))]
    return [*cells, ", ".join(record.telemetry.get("kernels_ms", {}))]
