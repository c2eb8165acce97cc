"""Every command of the README works as printed; what needs a GPU or a long run is run as its dry form."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()

DRY = {  # what stands in for a command that needs a GPU, a history or minutes
    "attnbench run scenarios/h100.yaml": "attnbench run scenarios/h100.yaml --dry-run",
    "attnbench run scenarios/peers.yaml": "attnbench run scenarios/peers.yaml --dry-run",
    "attnbench run FILE --gpus all": "attnbench run scenarios/smoke.yaml --gpus 2 --dry-run",
    "attnbench check --dtype bf16": "attnbench check --scenario scenarios/smoke.yaml --dtype fp16 --device cpu",
    "attnbench compare main HEAD": None,  # needs runs of two commits: tests/cpu/test_compare.py
    "attnbench compare main HEAD --rerun scenarios/h100.yaml": None,  # tests/cpu/test_rerun.py
    'attnbench history "4x4096*causal"': 'attnbench history "4x4096" --results results/reference',
    "attnbench report RUN": None,  # tests/cpu/test_report.py
    "attnbench run FILE": None,
    "attnbench validate FILE": "attnbench validate scenarios/smoke.yaml",
    "attnbench plot RUN": None,  # tests/cpu/test_plot.py
    "attnbench clean": None,  # would empty this machine's caches; tests/cpu/test_cli.py
    "attnbench build": "attnbench build --help",  # tests/cpu/test_native_kernels.py compiles each
}


def commands(text: str) -> list[str]:
    fenced = re.findall(r"```sh\n(.*?)```", text, re.S)
    lines = [line.split("#")[0].strip() for block in fenced for line in block.splitlines()]
    inline = [f"attnbench {c}" for c in re.findall(r"`attnbench ([^`]+)`", text)]
    inline += [f"attnbench {c}" for c in re.findall(r"`(list [^`]+)`", text)]
    return sorted({c for c in lines + inline if c})


def test_the_readme_names_commands() -> None:
    assert len([c for c in commands(README) if c.startswith("attnbench")]) >= 10


@pytest.mark.parametrize("command", [c for c in commands(README) if c.startswith("attnbench")])
def test_command(command: str) -> None:
    dry = DRY.get(command, command)
    if "--only" in command:
        dry = f"{command} --dry-run"
    if dry is None:
        name = command.split()[1]
        dry = f"attnbench {name} --help"
    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(dry)], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"make ([a-z-]+)", README)) <= targets


def test_links_lead_somewhere() -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        if not link.startswith("http"):
            assert (ROOT / link).exists(), link


def test_python_example() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.S)
    names: dict[str, object] = {}
    exec(example.replace("1024", "64"), names)
    assert names["q"].grad is not None  # type: ignore[attr-defined]
