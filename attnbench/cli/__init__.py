"""The command line: one module a subcommand, imported when that command runs, so that `--help` loads next to nothing.

Each body is a plain function with keyword arguments that returns the exit code:
0 all good · 1 a check failed or something regressed · 2 usage or configuration · 3 some cases could not be run ·
4 nothing comparable, no baseline, or cases missing on one side.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer

from attnbench.errors import UserError

Format = Literal["table", "json", "csv", "md"]
Device = Literal["cuda", "cpu"]
Executor = Literal["local", "ray"]

app = typer.Typer(
    name="attnbench",
    help="Benchmark and validate attention kernels: right or wrong, how fast, how close to the limit, better or worse.",
    epilog="Exit codes: 0 good, 1 check failed or regressed, 2 usage, 3 cases could not run, 4 nothing to compare.",
    no_args_is_help=True,
    rich_markup_mode=None,  # rich would add 60 ms to every start
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

BackendOption = Annotated[
    list[str],
    typer.Option("--backend", "-b", metavar="B", help="Backend, or module:object / file.py:object; repeatable."),
]
FormatOption = Annotated[Format, typer.Option("--format", "-f", help="How to print.")]
ResultsOption = Annotated[
    Path, typer.Option("--results", metavar="DIR", envvar="ATTNBENCH_RESULTS", help="Folder that holds the runs.")
]
RESULTS = Path("results")


def main() -> None:
    """Entry point of the `attnbench` script."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without `±` gets `?`, not a traceback
    app(prog_name="attnbench")


def _call(command: str, **arguments: Any) -> NoReturn:
    """Import a subcommand's module, run its body and exit with the code that it returns."""
    name = command.rstrip("_")
    try:
        body = getattr(importlib.import_module(f"attnbench.cli.{command}"), command)
        code = int(body(**arguments))
        sys.stdout.flush()
    except UserError as error:
        print(f"attnbench {name}: {error}", file=sys.stderr)
        code = error.exit_code
    except BrokenPipeError:
        # The reader has gone (`| head`). Without the redirection Python would complain once more while shutting down.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    raise typer.Exit(code)


def _version(value: bool) -> None:
    if value:
        from attnbench._version import __version__

        print(f"attnbench {__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command("run")
def _run(
    scenario: Annotated[Path, typer.Argument(metavar="SCENARIO.yaml", help="What to measure.")],
    backend: BackendOption = [],  # noqa: B006
    only: Annotated[
        list[str], typer.Option("--only", metavar="GLOB", help="Cases whose label or id matches; repeatable.")
    ] = [],  # noqa: B006
    out: Annotated[
        Path,
        typer.Option(
            "--out", metavar="DIR", envvar="ATTNBENCH_RESULTS", help="Folder in which the run's folder is made."
        ),
    ] = RESULTS,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with this scenario's newest unfinished run.")] = False,
    only_failed: Annotated[
        bool, typer.Option("--only-failed", help="Only what went wrong in this scenario's newest run, of any commit.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the planned cases, their memory and time; run none.")
    ] = False,
    gpus: Annotated[
        str | None, typer.Option("--gpus", metavar="all|N", help="Spread cases over several boards, one worker each.")
    ] = None,
    executor: Annotated[
        Executor, typer.Option("--executor", help="Boards of this machine, or of a Ray cluster.")
    ] = "local",
    address: Annotated[str | None, typer.Option("--address", help="Ray's address: auto, host:port or ray://…")] = None,
    accelerator: Annotated[
        str | None,
        typer.Option(
            "--accelerator", metavar="TYPE", help="Ray's accelerator type, such as H200, where it has several."
        ),
    ] = None,
    device: Annotated[
        Device | None, typer.Option("--device", help="Where to run; default: cuda where there is one.")
    ] = None,
    format: FormatOption = "table",
    detail: Annotated[
        bool, typer.Option("--detail", help="Also show where each row's time goes: parts on the device, host time.")
    ] = False,
) -> None:
    """Check and time the cases of a scenario; store the run."""
    _call(
        "run",
        scenario=scenario,
        backend=backend,
        only=only,
        out=out,
        resume=resume,
        only_failed=only_failed,
        dry_run=dry_run,
        gpus=gpus,
        executor=executor,
        address=address,
        accelerator=accelerator,
        device=device,
        format=format,
        detail=detail,
    )


@app.command("check")
def _check(
    op: Annotated[list[str], typer.Option("--op", metavar="OP", help="Operation; default: all; repeatable.")] = [],  # noqa: B006
    dtype: Annotated[
        list[str], typer.Option("--dtype", metavar="DTYPE", help="fp32, fp16 or bf16; default: all; repeatable.")
    ] = [],  # noqa: B006
    backend: BackendOption = [],  # noqa: B006
    scenario: Annotated[
        Path | None,
        typer.Option("--scenario", metavar="F", help="Check this scenario's cases, not the built-in corpus."),
    ] = None,
    device: Annotated[
        Device | None, typer.Option("--device", help="Where to run; default: cuda where there is one.")
    ] = None,
    format: FormatOption = "table",
) -> None:
    """Check outputs and gradients against an fp64 reference."""
    _call("check", op=op, dtype=dtype, backend=backend, scenario=scenario, device=device, format=format)


@app.command("compare")
def _compare(
    base: Annotated[str, typer.Argument(metavar="BASE", help="A run's folder or name, or a git commit.")],
    new: Annotated[str, typer.Argument(metavar="NEW", help="The same, for the other side.")],
    threshold: Annotated[
        str, typer.Option("--threshold", metavar="PERCENT", help="Smallest change that counts.")
    ] = "2%",
    format: Annotated[Literal["table", "md", "json"], typer.Option("--format", "-f", help="How to print.")] = "table",
    allow_missing: Annotated[bool, typer.Option("--allow-missing", help="Cases on one side only are fine.")] = False,
    rerun: Annotated[
        Path | None,
        typer.Option(
            "--rerun", metavar="SCENARIO", help="Measure both commits (or checkouts) now, in turns on this machine."
        ),
    ] = None,
    backend: BackendOption = [],  # noqa: B006
    only: Annotated[
        list[str], typer.Option("--only", metavar="GLOB", help="With --rerun: only these cases; repeatable.")
    ] = [],  # noqa: B006
    device: Annotated[Device | None, typer.Option("--device", help="With --rerun: where to run.")] = None,
    results: ResultsOption = RESULTS,
) -> None:
    """Say per case whether NEW is faster or slower than BASE."""
    _call(
        "compare",
        base=base,
        new=new,
        threshold=threshold,
        format=format,
        allow_missing=allow_missing,
        rerun=rerun,
        backend=backend,
        only=only,
        device=device,
        results=results,
    )


@app.command("plot")
def _plot(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder or name, or a git commit.")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder for the plots; default: the run's own `plots`.")
    ] = None,
    format: Annotated[Literal["png", "svg"], typer.Option("--format", "-f", help="File type.")] = "png",
    results: ResultsOption = RESULTS,
) -> None:
    """Draw throughput over sequence length, and speed-ups."""
    _call("plot", run=run, out=out, format=format, results=results)


@app.command("report")
def _report(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder or name, or a git commit.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Default: report.html in the run's folder; md goes to stdout."),
    ] = None,
    format: Annotated[Literal["html", "md"], typer.Option("--format", "-f", help="A page, or Markdown.")] = "html",
    results: ResultsOption = RESULTS,
) -> None:
    """Write a run as one page, or as Markdown for a pull request."""
    _call("report", run=run, out=out, format=format, results=results)


@app.command("history")
def _history(
    case: Annotated[str, typer.Argument(metavar="CASE-GLOB", help="Cases whose label or id matches.")],
    backend: BackendOption = [],  # noqa: B006
    pass_: Annotated[
        list[str],
        typer.Option("--pass", "-p", metavar="P", help="forward, backward or forward_backward; repeatable."),
    ] = [],  # noqa: B006
    threshold: Annotated[str, typer.Option("--threshold", metavar="PERCENT", help="Smallest step that counts.")] = "2%",
    dirty: Annotated[bool, typer.Option("--dirty", help="Runs with uncommitted changes too.")] = False,
    format: FormatOption = "table",
    results: ResultsOption = RESULTS,
) -> None:
    """Show a case's medians over commits, and where they stepped."""
    _call(
        "history",
        case=case,
        backend=backend,
        pass_=pass_,
        threshold=threshold,
        dirty=dirty,
        format=format,
        results=results,
    )


@app.command("list")
def _list(
    what: Annotated[
        Literal["backends", "ops", "scenarios", "models", "runs"] | None, typer.Argument(help="Default: all.")
    ] = None,
    results: ResultsOption = RESULTS,
    format: FormatOption = "table",
) -> None:
    """List backends, operations, scenarios, models and runs."""
    _call("list_", what=what, results=results, format=format)


@app.command("validate")
def _validate(
    scenario: Annotated[list[Path], typer.Argument(metavar="SCENARIO.yaml...", help="Scenario files.")],
) -> None:
    """Check scenario files and print their cases."""
    _call("validate", scenario=scenario)


@app.command("schema")
def _schema(
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write there; default: stdout.")] = None,
) -> None:
    """Print the JSON Schema of scenario files."""
    _call("schema", out=out)


@app.command("build")
def _build(
    backend: BackendOption = [],  # noqa: B006
    force: Annotated[bool, typer.Option("--force", help="Build even what the cache holds.")] = False,
    format: FormatOption = "table",
) -> None:
    """Compile every native kernel ahead of time; needs no GPU."""
    _call("build", backend=backend, force=force, format=format)


@app.command("doctor")
def _doctor(format: Annotated[Literal["table", "json"], typer.Option("--format", "-f")] = "table") -> None:
    """Show what on this machine affects the numbers, and how."""
    _call("doctor", format=format)


@app.command("selftest")
def _selftest(
    device: Annotated[
        Device | None, typer.Option("--device", help="Where to run; default: cuda where there is one.")
    ] = None,
    format: Annotated[Literal["table", "json"], typer.Option("--format", "-f")] = "table",
) -> None:
    """Run kernels that are known to be wrong: each must be caught."""
    _call("selftest", device=device, format=format)


@app.command("clean")
def _clean(
    triton: Annotated[
        bool, typer.Option("--triton", help="Triton's own cache too, which other projects share.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would go; delete nothing.")] = False,
) -> None:
    """Empty the caches of kernels and tuning; runs stay."""
    _call("clean", triton=triton, dry_run=dry_run)
