"""Writing a run: a folder of its own, `run.json` replaced atomically, one fsynced line in `cases.jsonl` a record.

What a killed process, a full disk or a second run beside this one can do: cost the line being written, never one that
was finished.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from attnbench.errors import UserError
from attnbench.results.record import FORMAT_VERSION, Record
from attnbench.results.runs import CASES_FILE, RUN_FILE, Run, find_resumable, find_run, find_runs, read_run

__all__ = ["RunWriter", "find_resumable", "find_run", "find_runs", "read_run", "utc_now"]

FILE_NAMES = sys.getfilesystemencoding()


def utc_now() -> str:
    """Now in UTC, ISO 8601 with seconds: `2026-12-01T02:30:00Z`."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def safe_name(text: str) -> str:
    """`text` as one harmless path component: word characters of any script, dots and dashes, at most 100 bytes."""
    # Under an ASCII locale (PYTHONUTF8=0) no folder can have a name of other letters.
    encodable = text.encode(FILE_NAMES, errors="replace").decode(FILE_NAMES)
    name = re.sub(r"[^\w.-]+", "-", encodable).strip("-.")
    return name.encode()[:100].decode(errors="ignore") or "run"


def _text(value: str) -> str:
    """`value` without the surrogates that stand for bytes of a path which are no UTF-8 (PEP 383)."""
    try:
        return value.encode(errors="surrogateescape").decode(errors="replace")
    except UnicodeEncodeError:  # a surrogate that no byte stands for
        return value.encode(errors="replace").decode()


def _plain(value: Any) -> Any:
    """JSON-ready: numpy scalars unwrapped, and NaN and infinities as strings, for which JSON has no number."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item") and not isinstance(value, bytes):
        return _plain(value.item())
    return value


def to_json_text(value: Any, *, indent: int | None = None) -> str:
    """Strict JSON (no NaN tokens), non-ASCII text kept readable."""
    return json.dumps(_plain(value), ensure_ascii=False, allow_nan=False, indent=indent)


class RunWriter:
    """Owns one run's folder, `<results>/<UTC stamp>-<scenario>-<short commit>/`, while the run goes on.

    `run_info` becomes `run.json`; see docs/records.md for its fields. With `resume`, records are appended to that run
    instead (`run_info` then only adds `resumed_at`).

    Raises:
        UserError: the folder cannot be made or written, or another process is writing this run.
    """

    def __init__(self, results: Path | str | None, run_info: dict[str, Any], *, resume: Run | None = None) -> None:
        now = utc_now()
        if resume is None:
            self.info: dict[str, Any] = {"version": FORMAT_VERSION, "started_at": now, **run_info, "finished_at": None}
            self.folder = _make_folder(Path(results or "results"), self.info)
        else:
            resumed = [*resume.info.get("resumed_at", []), now]
            self.info = {**resume.info, "resumed_at": resumed, "finished_at": None}
            self.folder = resume.folder
        try:
            self._file = _open_locked(self.folder / CASES_FILE)
            self._mend()
            self._write_info()
            _sync_folder(self.folder)
        except OSError as error:
            raise _write_error(self.folder, error) from None

    def append(self, record: Record) -> None:
        """Store one finished record; when this returns, it survives a kill and a power cut.

        Raises:
            UserError: the disk is full or the file cannot be written; earlier records are whole.
        """
        line = (to_json_text(record.to_json()) + "\n").encode()
        size = os.fstat(self._file).st_size
        try:
            written = 0
            while written < len(line):
                written += os.write(self._file, line[written:])
            os.fsync(self._file)
        except OSError as error:
            os.ftruncate(self._file, size)
            raise _write_error(self.folder / CASES_FILE, error) from None

    def update(self, **info: Any) -> None:
        """Add fields to `run.json`."""
        self.info.update(info)
        try:
            self._write_info()
        except OSError as error:
            raise _write_error(self.folder / RUN_FILE, error) from None

    def close(self, *, finished: bool) -> None:
        """Let go of the folder; `finished` says that every planned case has its record. Idempotent."""
        if self._file < 0:
            return
        try:
            if finished:
                self.update(finished_at=utc_now())
        finally:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close(finished=kind is None)

    def _write_info(self) -> None:
        text = to_json_text(self.info, indent=2) + "\n"
        temporary = self.folder / f".{RUN_FILE}.{os.getpid()}"
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.folder / RUN_FILE)
        finally:
            temporary.unlink(missing_ok=True)

    def _mend(self) -> None:
        """Cut off a last line that a kill left half-written, so that the next record starts on a line of its own."""
        path = self.folder / CASES_FILE
        data = path.read_bytes()
        if not data or data.endswith(b"\n"):
            return
        whole, _, tail = data.rpartition(b"\n")
        try:
            json.loads(tail)
        except ValueError:
            os.ftruncate(self._file, len(whole) + 1 if whole else 0)
        else:
            os.write(self._file, b"\n")


def _make_folder(results: Path, info: dict[str, Any]) -> Path:
    stamp = re.sub(r"[-:]", "", str(info["started_at"])).replace("T", "-")
    commit = safe_name(str(info.get("commit") or "nogit"))[:8]
    name = f"{safe_name(stamp)}-{safe_name(str(info.get('scenario') or 'run'))}-{commit}"
    try:
        results.mkdir(parents=True, exist_ok=True)
        for again in range(1, 1000):
            folder = results / (name if again == 1 else f"{name}-{again}")
            try:
                folder.mkdir()  # atomic: of two runs that start in one second each gets its own
                return folder
            except FileExistsError:
                continue
    except OSError as error:
        raise _write_error(results, error) from None
    raise UserError(f"{results} already holds a thousand runs named {name}; move some away")


def _open_locked(path: Path) -> int:
    """Append-only descriptor with an exclusive lock, which the kernel drops when the process ends in any way."""
    import fcntl

    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise UserError(
            f"{path.parent} is being written by another process; wait for it, or start a run of its own"
        ) from None
    except OSError as error:
        # Some network file systems have no locks; a folder of one's own is then the only protection.
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            os.close(file)
            raise
    return file


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_error(path: Path, error: OSError) -> UserError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(
            f"the disk is full: {path} cannot grow. Finished cases are stored; make room, then go on with --resume."
        )
    return UserError(f"cannot write {path}: {error.strerror}. Choose another results folder with --out.")
