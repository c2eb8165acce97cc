"""`attnbench doctor`: what on this machine decides or disturbs the numbers, and what to do about it."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from attnbench.measure.board import Board, boards, visible_uuids
from attnbench.measure.peaks import peak_of
from attnbench.measure.provenance import git_state, versions
from attnbench.measure.telemetry import SLOWDOWNS
from attnbench.results.text import Column, aligned, terminal_width


@dataclass(frozen=True)
class Finding:
    """One thing looked at. `state` is "ok", "note" (changes what the numbers mean) or "bad" (spoils them)."""

    topic: str
    state: str
    value: str
    meaning: str = ""


def doctor(*, format: str = "table") -> int:
    """Print the findings; 0 whatever they are, since a machine as it is found is no error."""
    found, reason = boards()
    findings = [*_software(), *_gpus(found, reason), *_host(), *_project()]
    if format == "json":
        data = {"findings": [asdict(f) for f in findings], "boards": [asdict(b) for b in found], "reason": reason}
        print(json.dumps(data, indent=2))
        return 0
    columns = [Column(""), Column(""), Column("")]
    rows = [[f.topic, "" if f.state == "ok" else f.state, f.value] for f in findings]
    print("\n".join(line.rstrip() for line in aligned(columns, rows, width=terminal_width()).splitlines()[1:]))
    for f in findings:
        if f.meaning and f.state != "ok":
            print(f"\n{f.topic}: {f.meaning}")
    return 0


def _software() -> Iterator[Finding]:
    have = versions()
    for name in ("attnbench", "python", "torch", "triton", "cuda-core"):
        if name in have:
            yield Finding(name, "ok", have[name])
        else:
            yield Finding(name, "bad", "not installed", f"install it: pip install {name}")
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    cuda = torch.version.cuda
    if cuda is None:
        yield Finding(
            "torch's CUDA",
            "note",
            "none: a CPU build",
            "kernels can only be checked, under Triton's interpreter; for a GPU install torch from its CUDA index",
        )
    else:
        yield Finding("torch's CUDA", "ok", cuda)
        usable = torch.cuda.is_available()
        yield Finding(
            "CUDA device",
            "ok" if usable else "bad",
            torch.cuda.get_device_name(0) if usable else "not usable",
            "" if usable else "torch cannot use a GPU: compare its CUDA with the driver's, and CUDA_VISIBLE_DEVICES",
        )


def _gpus(found: list[Board], reason: str | None) -> Iterator[Finding]:
    if reason is not None:
        yield Finding(
            "GPU", "note", f"none ({reason})", "kernels are checked on small shapes and never timed; eager is timed"
        )
        return
    hidden = visible_uuids()
    if hidden is not None:
        yield Finding(
            "CUDA_VISIBLE_DEVICES",
            "note",
            ",".join(hidden) or "empty",
            "runs use the first of these; records name the board by UUID, so results stay comparable",
        )
    for index, board in enumerate(found):
        yield from _gpu(f"GPU {index}" if len(found) > 1 else "GPU", board)


def _gpu(topic: str, board: Board) -> Iterator[Finding]:
    def unknown(value: Any, unit: str = "") -> str:
        return "unknown" if value is None else f"{value}{unit}"

    yield Finding(topic, "ok", f"{board.name}  {board.uuid}")
    yield Finding(f"{topic} driver", "ok", f"{unknown(board.driver)} (CUDA up to {unknown(board.cuda_driver)})")
    if peak_of(board.name) is None:
        yield Finding(
            f"{topic} peak",
            "note",
            "unknown",
            "no datasheet peak is listed for this board: shares are of the measured ceilings only",
        )
    clocks = f"SM {unknown(board.sm_mhz)} of {unknown(board.sm_mhz_max)} MHz, memory {unknown(board.mem_mhz)} MHz"
    yield Finding(f"{topic} clocks", "ok", clocks)
    cap = f"{unknown(board.power_cap_w, ' W')} (now {unknown(board.power_w, ' W')}, {unknown(board.celsius, ' C')})"
    lowered = (
        board.power_cap_w is not None
        and board.power_cap_default_w is not None
        and board.power_cap_w < board.power_cap_default_w
    )
    yield Finding(
        f"{topic} power cap",
        "note" if lowered else "ok",
        cap + (f", default {board.power_cap_default_w} W" if lowered else ""),
        "the cap is below the board's default: large kernels clock down earlier than on other boards of this model"
        if lowered
        else "",
    )
    if board.persistence is False:
        yield Finding(
            f"{topic} persistence",
            "note",
            "off",
            "the driver may unload between runs: the first call of a run takes longer; timing itself is not affected",
        )
    if board.mig:
        yield Finding(
            f"{topic} MIG", "bad", "on", "a slice has part of the SMs and the L2: shares of the board's peaks mislead"
        )
    if board.ecc is False:
        yield Finding(f"{topic} ECC", "note", "off", "memory bandwidth can differ from boards that have it on")
    if board.compute_mode not in (None, 0):
        yield Finding(
            f"{topic} compute mode",
            "note",
            f"exclusive ({board.compute_mode})",
            "only one process at a time gets a context: end others before a run",
        )
    if board.other_processes:
        yield Finding(
            f"{topic} other processes",
            "bad",
            ", ".join(map(str, board.other_processes)),
            "they share the board: times are not repeatable; end them, or take another GPU by CUDA_VISIBLE_DEVICES",
        )
    slow = [reason for reason in board.clock_reasons if reason in SLOWDOWNS]
    if slow:
        yield Finding(f"{topic} slowdown", "bad", ", ".join(slow), "the board is held back: look to cooling and supply")


def _host() -> Iterator[Finding]:
    cpus = os.cpu_count() or 1
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    busy = load > 0.5 * cpus
    yield Finding(
        "host",
        "note" if busy else "ok",
        f"{platform.system()} {platform.machine()}, {cpus} CPUs, load {load:.1f}",
        "a busy host lengthens call_ms and CPU times; device times are not affected" if busy else "",
    )
    if shutil.which("ncu"):
        yield Finding("ncu", "ok", "found: hardware counters can be read where the driver permits it")


def _project() -> Iterator[Finding]:
    state = git_state()
    if state["commit"] is None:
        yield Finding(
            "git", "note", "no repository", "runs are stored without a commit: compare them by folder or name"
        )
    elif state["dirty"]:
        yield Finding(
            "git",
            "note",
            f"{state['commit'][:10]}, uncommitted changes",
            "runs are stored as dirty with a hash of the changes: compare finds clean runs by commit only",
        )
    else:
        yield Finding("git", "ok", state["commit"][:10])
