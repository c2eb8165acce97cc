"""`attnbench list`: what there is to run, to run it with, and to compare. Loads neither torch nor a backend."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from attnbench.backends.names import BUILTIN
from attnbench.results.runs import CASES_FILE, Run, find_runs
from attnbench.results.store import to_json_text
from attnbench.results.text import Column, aligned, comma_separated, markdown, terminal_width
from attnbench.scenario.models import MODELS

Table = tuple[Sequence[str], Sequence[Sequence[str]]]

_PACKAGE = {
    "sm90_mma": "cuda-core",
    "sm90": "cuda-core",
    "triton": "triton",
    "fa4": "flash-attn-4",
    "fa3": "flash-attn-3",
    "flash_attn_res": "flash-attn-res",
    "liger": "liger-kernel",
    "fla": "fla-core",
}
_WHAT = {
    "eager": "plain PyTorch, the baseline of every plot",
    "compile": "torch.compile of eager",
    "triton": "kernels_triton",
    "sm90_mma": "CUDA C++: TMA loads + mma.sync",
    "sm90": "CUDA C++: TMA + wgmma, warp-specialised",
    "sdpa_flash": "PyTorch's FlashAttention-2",
    "sdpa_cudnn": "PyTorch's cuDNN attention",
    "flex": "PyTorch's FlexAttention",
    "fa4": "FlashAttention-4",
    "fa3": "FlashAttention-3",
    "flash_attn_res": "flash-attn-res",
    "liger": "Liger kernels",
    "fla": "flash-linear-attention",
}
_ANYWHERE = ("eager", "compile")
_DROP = {"operations": 2, "gradients": 1, "on": 1}
_SHRINK = ("what it is", "description", "source")
OPERATIONS = {
    "attention": ("q, k, v, dense or packed by cu_seqlens", "out, lse", "dq, dk, dv"),
    "attnres_phase1": ("values, queries", "out, lse", "dvalues, dqueries"),
    "attnres_phase2": (
        "partial_sum, query, inter_out, inter_lse",
        "out, lse",
        "dx, dq, dout, dlse",
    ),
}


def list_(*, what: str | None, results: Path, format: str) -> int:
    """Print one of the lists, or all of them."""
    makers: dict[str, Callable[[], Table]] = {
        "backends": backends,
        "ops": operations,
        "scenarios": scenarios,
        "models": models,
        "runs": lambda: runs(results),
    }
    names = [what] if what else list(makers)
    if format == "json":
        found: dict[str, list[dict[str, Any]]] = {}
        for name in names:
            titles, rows = makers[name]()
            found[name] = [dict(zip(titles, row, strict=True)) for row in rows]
        print(to_json_text(found[what] if what else found, indent=2))
        return 0
    for i, name in enumerate(names):
        titles, rows = makers[name]()
        if i:
            print()
        if format == "csv":
            print(comma_separated(titles, rows))
            continue
        columns = [
            Column(title, drop=_DROP.get(title, 0), shrink=title in _SHRINK, fold=title in _SHRINK) for title in titles
        ]
        if format == "md":
            print(markdown(columns, rows))
        elif rows:
            print(aligned(columns, rows, width=terminal_width()))
        else:
            print(
                f"no {name}" + (f" under {results}; `attnbench run SCENARIO.yaml` makes one" if name == "runs" else "")
            )
    return 0


def backends() -> Table:
    """Every backend, and whether this machine can run it: judged by installed packages and NVML, without loading it."""
    from attnbench.backends import available

    offered = available()
    gpu = _no_gpu()
    rows = []
    for name in offered:
        rows.append((name, _unavailable(name, gpu) or "yes", _WHAT.get(name, ""), ", ".join(BUILTIN[name])))
    rows.append(("module:object", "yes", "your own, also file.py:object", "any"))
    return ("backend", "runs here", "what it is", "operations"), rows


def _unavailable(name: str, no_gpu: str | None) -> str | None:
    for package in dict.fromkeys(("torch", _PACKAGE.get(name, "torch"))):
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return f"no: {package} is not installed"
    if no_gpu is None or name in _ANYWHERE:
        return None
    if name == "triton":
        return "checks only"
    return "no: no GPU"


def _no_gpu() -> str | None:
    from attnbench.measure.board import boards

    found, reason = boards()
    return None if found else reason or "no GPU"


def operations() -> Table:
    rows = [(name, *described) for name, described in OPERATIONS.items()]
    return ("operation", "inputs", "outputs", "gradients"), rows


def models() -> Table:
    """Shapes that a case may name with `model:`, and where their figures are published."""
    rows = []
    for name, shape in MODELS.items():
        heads = f"{shape.heads}/{shape.kv_heads}" if shape.kv_heads != shape.heads else str(shape.heads)
        dims = f"{shape.head_dim}/{shape.value_head_dim}" if shape.value_head_dim else str(shape.head_dim)
        residuals = f"N {shape.blocks} S {shape.queries}" if shape.blocks else ""
        rows.append((name, heads, dims, str(shape.hidden), residuals, shape.source))
    return ("model", "heads", "head dim", "hidden", "residual blocks", "source"), rows


def scenarios(folder: Path | None = None) -> Table:
    """The YAML files of ./scenarios; of the project's own where the working directory has none."""
    import yaml

    place = folder or Path("scenarios")
    if not place.is_dir():
        place = Path(__file__).resolve().parents[2] / "scenarios"
    rows = []
    for path in sorted([*place.glob("*.yaml"), *place.glob("*.yml")]):
        try:
            data = yaml.load(path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
            description = str(data.get("description", "")) if isinstance(data, dict) else "not a scenario"
        except (yaml.YAMLError, OSError, UnicodeDecodeError):
            description = f"cannot be read: attnbench validate {path}"
        rows.append((str(path), " ".join(description.split())))
    return ("scenario", "description"), rows


def runs(results: Path) -> Table:
    rows = []
    unreadable: list[str] = []
    for run in find_runs(results, unreadable):
        commit = f"{str(run.commit)[:10]}{' + changes' if run.dirty else ''}" if run.commit else ""
        where = str(run.gpu.get("name") or "CPU")
        rows.append((str(run.folder), run.scenario, commit, where, _count(run)))
    for message in unreadable:
        print(f"attnbench list: not listed: {message}", file=sys.stderr)
    return ("run", "scenario", "commit", "on", "rows"), rows


def _count(run: Run) -> str:
    """`48`, or `12 of 48, unfinished`."""
    path = run.folder / CASES_FILE
    lines = path.read_bytes().count(b"\n") if path.exists() else 0
    return str(lines) if run.finished else f"{lines} of {run.info.get('rows', '?')}, unfinished"
