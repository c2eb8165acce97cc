"""The command line: start-up, errors, exit codes, pipes and colours."""

from __future__ import annotations

import ast
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from synthetic_runs import attention_records, store

from attnbench.cli import app
from attnbench.cli.list_ import OPERATIONS, backends, scenarios
from attnbench.ops import NAMES

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = (
    "run",
    "check",
    "compare",
    "report",
    "history",
    "plot",
    "list",
    "validate",
    "schema",
    "build",
    "doctor",
    "selftest",
    "clean",
)


def attnbench(*arguments: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "attnbench", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        timeout=120,
        check=False,
    )


@pytest.fixture
def results(tmp_path: Path) -> Path:
    store(tmp_path / "results", attention_records(seqlens=(1024, 4096)), commit="a" * 40)
    store(tmp_path / "results", attention_records(seqlens=(1024, 4096), seed=1, scale=1.1), commit="b" * 40)
    return tmp_path / "results"


def test_version() -> None:
    done = attnbench("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("attnbench ")


def test_help_names_every_command_within_80_columns() -> None:
    done = attnbench("--help", COLUMNS="80")
    assert done.returncode == 0
    for command in COMMANDS:
        assert f"\n  {command} " in done.stdout
    assert "..." not in done.stdout.split("Commands:")[1]  # no description is cut
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_a_body(command: str) -> None:
    from importlib import import_module

    from typer.testing import CliRunner

    assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0
    module = "list_" if command == "list" else command
    assert callable(getattr(import_module(f"attnbench.cli.{module}"), module))


LOADED = """
import sys, runpy
sys.argv = ["attnbench", *sys.argv[1:]]
try:
    runpy.run_module("attnbench", run_name="__main__")
finally:
    heavy = {"torch", "scipy", "triton", "matplotlib", "numpy", "rich", "cuda.core", "pydantic"} & set(sys.modules)
    print("LOADED", *sorted(heavy), file=sys.stderr)
"""


def loaded(*arguments: str, cwd: Path) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", LOADED, *arguments], capture_output=True, text=True, cwd=cwd, check=False
    )
    return set(done.stderr.rpartition("LOADED")[2].split())


def test_help_list_and_compare_load_nothing_heavy(results: Path) -> None:
    # Typer itself takes pydantic to read arguments; ours is for scenario files only.
    assert loaded("--help", cwd=ROOT) == set()
    assert loaded("list", cwd=ROOT) <= {"pydantic"}
    one, two = sorted(path.name for path in results.iterdir())
    assert loaded("compare", one, one, "--results", str(results), cwd=ROOT) <= {"pydantic"}
    assert loaded("history", "4x", "--results", str(results), cwd=ROOT) <= {"pydantic"}
    assert loaded("report", one, "--format", "md", "--results", str(results), cwd=ROOT) <= {"pydantic"}
    assert "torch" not in loaded("report", one, "--results", str(results), cwd=ROOT)
    assert loaded("validate", "scenarios/smoke.yaml", cwd=ROOT) <= {"pydantic"}
    assert loaded("compare", one, two, "--results", str(results), cwd=ROOT) <= {"pydantic", "numpy"}


@pytest.mark.parametrize(
    "arguments",
    [("--help",), ("list",), ("validate", "scenarios/smoke.yaml"), ("compare", "x", "y"), ("history", "x")],
)
def test_start_up_time(arguments: tuple[str, ...]) -> None:
    # Processor seconds, not the wall's: those hardly grow while other work has the cores.
    best = 9.0
    for _ in range(8):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        attnbench(*arguments)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        if best < 0.3:
            break
    assert best < 0.45  # 0.3 s on a core of one's own; a neighbour on the same core halves its speed


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("comapre", "a", "b"), "Did you mean 'compare'"),
        (("run", "x.yaml", "--devce", "cpu"), "--device"),
        (("list", "backend"), "'backends'"),
        (("compare", "a", "b", "--threshold", "2"), "wanted a percentage"),
        (("compare", "nothing", "b"), "is no run under"),
        (("plot", "nothing"), "is no run under"),
    ],
)
def test_a_mistake_is_one_message_and_code_2(arguments: tuple[str, ...], told: str) -> None:
    done = attnbench(*arguments)
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_compare_exit_codes(results: Path) -> None:
    where = ("--results", str(results))
    assert attnbench("compare", "a" * 10, "a" * 10, *where).returncode == 0
    slower = attnbench("compare", "a" * 10, "b" * 10, *where)
    assert slower.returncode == 1
    assert "8 regressed" in slower.stdout
    assert attnbench("compare", "b" * 10, "a" * 10, *where).returncode == 0
    head = attnbench("compare", "HEAD", "b" * 10, *where)
    assert head.returncode in (2, 4)  # 4: a commit without a run; 2: these sources are in no repository
    data = json.loads(attnbench("compare", "a" * 10, "b" * 10, "--format", "json", *where).stdout)
    assert data["exit_code"] == 1


def test_a_closed_pipe_is_quiet(results: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "attnbench", "compare", "a" * 10, "b" * 10, "--results", str(results), "-f", "json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 141


def test_a_terminal_without_unicode_is_no_error(results: Path) -> None:
    done = attnbench("compare", "a" * 10, "b" * 10, "--results", str(results), PYTHONIOENCODING="ascii")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr


def in_terminal(*arguments: str, **environment: str) -> str:
    """What a command prints to a terminal of 80 columns."""
    import pty

    parent, child = pty.openpty()
    env = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS")}
    command = [sys.executable, "-m", "attnbench", *arguments]
    with subprocess.Popen(command, stdout=child, stdin=child, cwd=ROOT, env={**env, "TERM": "xterm", **environment}):
        os.close(child)
        text = b""
        while True:
            try:
                more = os.read(parent, 65536)
            except OSError:
                break
            if not more:
                break
            text += more
    os.close(parent)
    return text.decode()


def test_colour_on_a_terminal_only_and_not_under_no_color(results: Path) -> None:
    arguments = ("compare", "a" * 10, "b" * 10, "--results", str(results))
    assert "\x1b[31m" in in_terminal(*arguments)
    assert "\x1b" not in in_terminal(*arguments, NO_COLOR="1")
    assert "\x1b" not in attnbench(*arguments).stdout


def test_plot_prints_its_files(results: Path, tmp_path: Path) -> None:
    done = attnbench("plot", "a" * 10, "--results", str(results), "--out", str(tmp_path / "plots"))
    assert done.returncode == 0
    assert {Path(line).name for line in done.stdout.splitlines()} == {
        path.name for path in (tmp_path / "plots").iterdir()
    }


def test_list_says_what_can_run_here_and_why_not(results: Path) -> None:
    titles, rows = backends()
    assert titles[:2] == ("backend", "runs here")
    by_name = {row[0]: row[1] for row in rows}
    assert by_name["eager"] == "yes"
    assert by_name["sm90"].startswith(("yes", "no: "))
    assert set(OPERATIONS) == set(NAMES)
    assert any(row[0].endswith("smoke.yaml") for row in scenarios(ROOT / "scenarios")[1])
    data = json.loads(attnbench("list", "runs", "--results", str(results), "--format", "json").stdout)
    assert [row["rows"] for row in data] == ["40", "40"]
    assert "no runs" in attnbench("list", "runs", "--results", str(results / "none")).stdout


def test_list_of_a_broken_scenario_points_to_validate(tmp_path: Path) -> None:
    (tmp_path / "broken.yaml").write_text("a: [1\n")
    assert "attnbench validate" in scenarios(tmp_path)[1][0][1]


def test_a_run_of_a_newer_attnbench_is_named_where_runs_are_listed(results: Path) -> None:
    newest = max(results.glob("*/run.json"))
    newest.write_text(json.dumps(json.loads(newest.read_text()) | {"version": 99}))
    done = attnbench("list", "runs", "--results", str(results), "--format", "json")
    assert done.returncode == 0
    assert newest.parent.name not in done.stdout
    assert "not listed" in done.stderr
    assert "format 99 is newer" in done.stderr
    assert len(json.loads(done.stdout)) == len(list(results.glob("*/run.json"))) - 1
    refused = attnbench("compare", str(newest.parent), str(newest.parent))
    assert refused.returncode == 2
    assert "format 99 is newer" in refused.stderr


def test_clean_empties_its_own_caches_only(tmp_path: Path) -> None:
    native, other = tmp_path / "cache" / "native", tmp_path / "cache" / "precious"
    for folder in (native, other, tmp_path / "triton"):
        folder.mkdir(parents=True)
        (folder / "file").write_bytes(b"x" * 1000)
    (native / "link").symlink_to(other)
    environment = {"ATTNBENCH_CACHE": str(tmp_path / "cache"), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    assert "would free 0.0 MB" in attnbench("clean", "--dry-run", **environment).stdout
    assert (native / "file").exists()
    assert attnbench("clean", **environment).returncode == 0
    assert list(native.iterdir()) == []
    assert (other / "file").exists()
    assert (tmp_path / "triton" / "file").exists()
    attnbench("clean", "--triton", **environment)
    assert list((tmp_path / "triton").iterdir()) == []


def test_lists_cut_no_words_in_80_columns() -> None:
    for what in ("backends", "scenarios"):
        done = attnbench("list", what, COLUMNS="80")
        assert done.returncode == 0
        assert "…" not in done.stdout
        assert max(map(len, done.stdout.splitlines())) <= 80


def test_a_backend_that_refuses_the_cpu_is_not_listed_as_running_there(monkeypatch: pytest.MonkeyPatch) -> None:
    from attnbench.backends import backend as loaded_backend
    from attnbench.scenario.case import AttentionCase

    monkeypatch.setattr("attnbench.cli.list_._no_gpu", lambda: "no GPU")
    case = AttentionCase(
        dtype="bf16", heads=2, kv_heads=2, head_dim=64, causal=False, batch=1, seqlen_q=64, seqlen_k=64
    )
    for name, here, *_ in backends()[1]:
        if here == "yes" and name != "module:object":
            assert loaded_backend(name).supports(case, "cpu") is None


def test_options_name_themselves() -> None:
    """Left to typer, the name of `op` with the metavar OP is `--OP` in typer 0.27.0."""
    tree = ast.parse((ROOT / "attnbench" / "cli" / "__init__.py").read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "typer.Option"]
    assert len(calls) > 30
    for call in calls:
        assert call.args, ast.unparse(call)
        assert ast.unparse(call.args[0]).startswith("'--"), ast.unparse(call)
