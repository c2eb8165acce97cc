"""What a report says of a run in any format: verdict, provenance, failures, checks, and how to run a row again."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from attnbench.backends import judged
from attnbench.results.record import COULD_NOT_RUN, OUTCOMES, Record, TensorCheck
from attnbench.results.runs import Run

BAD = frozenset({"check-failed", *COULD_NOT_RUN})


@dataclass(frozen=True)
class Verdict:
    """`good` None: nothing failed, but some rows could not be run."""

    good: bool | None
    text: str


def verdict(run: Run) -> Verdict:
    """Whether the run is good, in one sentence; as the exit code of `attnbench run`, peers that failed do not count."""
    records = list(run.records.values())
    failed = [r for r in records if r.outcome == "check-failed" and judged(r.backend)]
    gone = [r for r in records if r.outcome in COULD_NOT_RUN]
    planned = int(run.info.get("rows") or len(records))
    unfinished = f" The run is unfinished: {len(records)} of {planned} rows." if not run.finished else ""
    if failed:
        return Verdict(False, f"{_rows(len(failed))} of judged backends failed the check.{unfinished}")
    if gone:
        return Verdict(None, f"Nothing was found wrong, but {_rows(len(gone))} could not be run.{unfinished}")
    if unfinished:
        return Verdict(None, f"Nothing was found wrong so far.{unfinished}")
    return Verdict(True, f"All good: {_rows(len(records))}, none of a judged backend failed.")


def _rows(count: int) -> str:
    return f"{count} row{'' if count == 1 else 's'}"


def outcome_counts(records: Iterable[Record]) -> list[tuple[str, int]]:
    """Outcomes that occur, in the order of `OUTCOMES`."""
    counts = Counter(r.outcome for r in records)
    return [(outcome, counts[outcome]) for outcome in OUTCOMES if counts[outcome]]


def failures(records: Iterable[Record]) -> list[Record]:
    """What failed its check or could not be run: judged backends first."""
    return sorted((r for r in records if r.outcome in BAD), key=lambda r: not judged(r.backend))


def reproduction(run: Run, record: Record, *more: Record) -> str:
    """The command that runs this row's case and backend again (and `more` of the case), from the project's root."""
    scenario = shlex.quote(str(run.info.get("scenario_file") or f"scenarios/{run.scenario}.yaml"))
    device = " --device cpu" if run.info.get("device") == "cpu" else ""
    names = dict.fromkeys(r.backend for r in (record, *more))
    backends = "".join(f" --backend {shlex.quote(name)}" for name in names)
    if record.pass_ == "check":
        return f"attnbench check --scenario {scenario}{backends}{device}"
    return f"attnbench run {scenario} --only {record.case_id}{backends}{device}"


def anchor(record: Record) -> str:
    """A name for links to this row: letters, digits and dashes."""
    return re.sub(r"[^0-9A-Za-z]+", "-", f"{record.case_id}-{record.backend}-{record.pass_}")


def facts(run: Run) -> list[tuple[str, str]]:
    """Provenance and machine as (name, value), those that the run has."""
    info, gpu = run.info, run.gpu
    packages = info.get("packages") or {}
    found: list[tuple[str, Any]] = [
        ("Scenario", f"{run.scenario} ({info['scenario_file']})" if info.get("scenario_file") else run.scenario),
        ("Command", shlex.join(map(str, info.get("command") or []))),
        ("Commit", _commit(info)),
        ("Kernels", f"sources {info['kernel_hash']}" if info.get("kernel_hash") else ""),
        ("Device", _device(run)),
        ("Clocks and driver", _clocks(gpu)),
        ("Versions", ", ".join(f"{name} {version}" for name, version in packages.items())),
        ("Measured ceilings", ", ".join(_ceilings(info.get("ceilings") or {}))),
        ("Datasheet peaks", _peaks(gpu.get("peak") or {})),
        ("Clocks compared", _crosscheck(info.get("crosscheck") or {})),
        ("Policy", _policy(info.get("measure") or {})),
        ("Started", str(info.get("started_at") or "")),
        ("Finished", str(info.get("finished_at") or "not finished")),
        ("Folder", str(run.folder)),
    ]
    return [(name, str(value)) for name, value in found if value]


def _commit(info: dict[str, Any]) -> str:
    if not info.get("commit"):
        return "none: not in a git repository"
    text = str(info["commit"])
    text += f" on {info['branch']}" if info.get("branch") else ""
    text += f", {info['commit_time']}" if info.get("commit_time") else ""
    return text + (f", with uncommitted changes ({info.get('diff_hash')})" if info.get("dirty") else "")


def _device(run: Run) -> str:
    gpu, platform = run.gpu, run.info.get("platform") or {}
    if not gpu:
        return (
            f"CPU: {platform.get('machine', '?')}, {platform.get('cpus', '?')} processors, {platform.get('system', '')}"
        )
    parts = [str(gpu.get("name")), str(gpu.get("uuid") or "")]
    parts += [f"power cap {gpu['power_cap_w']:.0f} W"] if gpu.get("power_cap_w") else []
    parts += [f"{gpu['sms']} SMs"] if gpu.get("sms") else []
    parts += [f"{gpu['memory_bytes'] / 2**30:.0f} GiB"] if gpu.get("memory_bytes") else []
    return ", ".join(part for part in parts if part)


def _clocks(gpu: dict[str, Any]) -> str:
    parts = [f"SM up to {gpu['sm_mhz_max']} MHz"] if gpu.get("sm_mhz_max") else []
    parts += [f"memory {gpu['mem_mhz']} MHz"] if gpu.get("mem_mhz") else []
    parts += [f"driver {gpu['driver']}"] if gpu.get("driver") else []
    parts += [f"CUDA {gpu['cuda_driver']}"] if gpu.get("cuda_driver") else []
    parts += [f"{name} {'on' if gpu[key] else 'off'}" for name, key in (("ECC", "ecc"), ("MIG", "mig")) if key in gpu]
    return ", ".join(parts)


def _ceilings(ceilings: dict[str, float]) -> list[str]:
    found = []
    for name, value in ceilings.items():
        if name.endswith(("_sm_mhz", "_watts")):
            continue
        unit = "TB/s" if name == "copy" else "TFLOP/s"
        mhz, watts = ceilings.get(f"{name}_sm_mhz"), ceilings.get(f"{name}_watts")
        at = [f"{mhz:.0f} MHz"] if mhz else []
        at += [f"{watts:.0f} W"] if watts else []
        text = f"{name.replace('_', ' ')} {value:.3g} {unit}"
        found.append(f"{text} at {' and '.join(at)}" if at else text)
    return found


def _peaks(peak: dict[str, Any]) -> str:
    words = {"tensor16": "16-bit tensor {:g} TFLOP/s", "fp32": "fp32 {:g} TFLOP/s", "tb_s": "memory {:g} TB/s"}
    return ", ".join(text.format(peak[name]) for name, text in words.items() if peak.get(name))


def _crosscheck(found: dict[str, Any]) -> str:
    if "noise_floor_percent" not in found:
        return ""
    return (
        f"graph, events and wall clock within {found.get('timer_gap_percent', 0):.2f} %; "
        f"noise floor {found['noise_floor_percent']:.2f} %"
    )


def _policy(measure: dict[str, Any]) -> str:
    if not measure:
        return ""
    return (
        f"at least {measure.get('samples')} samples, {measure.get('duty')} duty, until ± "
        f"{measure.get('half_width_percent')} % or {measure.get('max_seconds')} s"
    )


@dataclass(frozen=True)
class Checked:
    """The tensors of one case and backend, the worst of its passes each."""

    record: Record
    tensors: dict[str, TensorCheck]


def checks(records: Sequence[Record]) -> list[Checked]:
    """One entry a (case, backend) that was checked, in the order of the records."""
    found: dict[tuple[str, str], Checked] = {}
    for r in records:
        if not r.check:
            continue
        entry = found.setdefault((r.case_id, r.backend), Checked(r, {}))
        for name, check in r.check.items():
            known = entry.tensors.get(name)
            if known is None or not check.budget_ratio <= known.budget_ratio:  # NaN is the worst
                entry.tensors[name] = check
    return list(found.values())


def tensor_names(entries: Iterable[Checked]) -> list[str]:
    return list(dict.fromkeys(name for entry in entries for name in entry.tensors))
