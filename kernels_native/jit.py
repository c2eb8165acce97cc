"""Compile CUDA C++ for sm_90a with NVRTC, once per specialisation, and judge what the compiler said.

No CUDA toolkit, no host compiler and no GPU are needed: `cuda.core` brings NVRTC.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernels_native.cache import cache_dir, read_entry, write_entry

ROOT = Path(__file__).parent
INCLUDE = ROOT / "include"
ARCH = "sm_90a"
SHARED_LIMIT = 232_448
"""Most shared memory that one block can have on sm_90, in bytes."""
# NVRTC's own cache would answer a second build without the log that is judged here.
FLAGS = ("-std=c++17", f"-arch={ARCH}", "-default-device", "-lineinfo", "--no-cache")


class BuildFailed(RuntimeError):
    """A kernel did not compile, spilled registers, had its wgmma serialised, or did not load."""


@dataclass(frozen=True)
class Specialisation:
    """One kernel with its template arguments.

    Attributes:
        source: file in `kernels_native`, or an absolute path. A `.cubin` is taken as it is; `entry` is then the symbol.
        entry: name of the `__global__` function (template) in that file.
        arguments: template arguments, written as in C++ (`"128"`, `"true"`, `"bf16"`).
        threads: threads per block.
        shared_bytes: dynamic shared memory per block.
        backend: the backend that it belongs to, for listings.
        options: further NVRTC options.
        may_spill: register spills are reported, but do not fail the build (a user's own kernel).
    """

    source: str
    entry: str
    arguments: tuple[str, ...] = ()
    threads: int = 128
    shared_bytes: int = 0
    backend: str = ""
    options: tuple[str, ...] = ()
    may_spill: bool = False

    @property
    def path(self) -> Path:
        return ROOT / self.source

    @property
    def expression(self) -> str:
        """The C++ expression that names the instance."""
        return f"{self.entry}<{', '.join(self.arguments)}>" if self.arguments else self.entry

    @property
    def name(self) -> str:
        """For people: `sm90_mma_forward.cu: attention_forward<128, true> ATTN_FP16`."""
        macros = "".join(f" {option.removeprefix('-D')}" for option in self.options)
        return f"{self.path.name}: {self.expression}{macros}"


@dataclass(frozen=True)
class Built:
    """A compiled specialisation. `shared_bytes` is static plus dynamic; `log` is the compiler's, whole."""

    specialisation: Specialisation
    key: str
    cubin: bytes = field(repr=False)
    symbol: str
    log: str = field(repr=False)
    registers: int
    spill_bytes: int
    shared_bytes: int
    seconds: float
    cached: bool

    @property
    def path(self) -> Path:
        """Where the cubin lies; the log is in the `.json` beside it."""
        return cache_dir() / f"{self.key}.cubin"


@functools.cache
def compiler_version() -> str:
    """NVRTC's version, such as `"13.0"`."""
    from cuda.bindings import nvrtc

    error, major, minor = nvrtc.nvrtcVersion()
    if int(error) != 0:
        raise BuildFailed(f"NVRTC does not answer ({error}): reinstall it with `pip install 'cuda-core[cu13]'`")
    return f"{major}.{minor}"


@functools.cache
def _header_digest() -> bytes:
    digest = hashlib.sha256()
    for path in sorted(INCLUDE.glob("*.cuh")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.digest()


def extra_defines() -> tuple[str, ...]:
    """NVRTC options of the macros in `$ATTNBENCH_NVRTC_DEFINES`, such as `NAME OTHER=2`: for every kernel built.

    Raises:
        BuildFailed: a word is not `NAME` or `NAME=VALUE`.
    """
    words = os.environ.get("ATTNBENCH_NVRTC_DEFINES", "").split()
    for word in words:
        if not re.fullmatch(r"[A-Za-z_]\w*(=\S*)?", word):
            raise BuildFailed(f"ATTNBENCH_NVRTC_DEFINES has {word!r}: want NAME or NAME=VALUE, apart by spaces")
    return tuple(f"-D{word}" for word in words)


def cache_key(specialisation: Specialisation) -> str:
    """Hash of the source, every shared header, the template arguments, the options and the compiler's version.

    Raises:
        BuildFailed: the source file cannot be read, or `extra_defines` refuses.
    """
    digest = hashlib.sha256(_header_digest())
    try:
        digest.update(specialisation.path.read_bytes())
    except OSError as error:
        raise BuildFailed(f"{specialisation.path}: {error.strerror}: the kernel's source cannot be read") from None
    for text in (specialisation.expression, *FLAGS, *specialisation.options, *extra_defines(), compiler_version()):
        digest.update(b"\0" + text.encode())
    return f"{specialisation.path.stem}-{digest.hexdigest()[:24]}"


def build(specialisation: Specialisation, *, force: bool = False) -> Built:
    """The compiled specialisation, from the cache where it is there.

    Raises:
        BuildFailed: the compiler refused it, or its log shows a spill or serialised wgmma (also on a cache hit).
    """
    key = cache_key(specialisation)
    if specialisation.path.suffix == ".cubin":
        cubin = specialisation.path.read_bytes()
        return Built(specialisation, key, cubin, specialisation.entry, "", 0, 0, specialisation.shared_bytes, 0.0, True)
    entry = None if force else read_entry(key)
    if entry is not None:
        return _judged(specialisation, key, *entry, cached=True)

    from filelock import FileLock

    cache_dir().mkdir(parents=True, exist_ok=True)
    with FileLock(cache_dir() / f"{key}.lock"):
        entry = None if force else read_entry(key)  # another process may have built it while this one waited
        if entry is not None:
            return _judged(specialisation, key, *entry, cached=True)
        start = time.perf_counter()
        cubin, symbol, log = _compile(specialisation)
        description = {
            "name": specialisation.name,
            "symbol": symbol,
            "seconds": round(time.perf_counter() - start, 3),
            "compiler": compiler_version(),
            "defines": list(extra_defines()),
            "log": log,
        }
        # Stored even where it will be judged a failure: the log must be there to be read.
        write_entry(key, cubin, description)
    return _judged(specialisation, key, cubin, description, cached=False)


def _compile(specialisation: Specialisation) -> tuple[bytes, str, str]:
    """Cubin, mangled symbol and log."""
    from cuda.bindings import nvrtc

    def words(result: Any, program: Any) -> str:
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        text = b" " * size
        nvrtc.nvrtcGetProgramLog(program, text)
        return text.rstrip(b"\0 ").decode(errors="replace")

    source = specialisation.path
    include = (f"-I{INCLUDE}", f"-I{source.parent}")
    options = [*FLAGS, *include, "--ptxas-options=-v", *specialisation.options, *extra_defines()]
    error, program = nvrtc.nvrtcCreateProgram(source.read_bytes(), source.name.encode(), 0, [], [])
    if int(error) != 0:
        raise BuildFailed(f"{specialisation.name}: NVRTC made no program ({error})")
    try:
        expression = specialisation.expression.encode()
        nvrtc.nvrtcAddNameExpression(program, expression)
        (error,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = words(error, program)
        if int(error) != 0:
            raise BuildFailed(f"{specialisation.name} does not compile ({error}):\n{log}")
        error, symbol = nvrtc.nvrtcGetLoweredName(program, expression)
        if int(error) != 0:
            raise BuildFailed(f"{specialisation.name}: no such kernel in {source} ({error})")
        _, size = nvrtc.nvrtcGetCUBINSize(program)
        cubin = b" " * size
        nvrtc.nvrtcGetCUBIN(program, cubin)
        return cubin, symbol.decode(), log
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _judged(
    specialisation: Specialisation, key: str, cubin: bytes, description: dict[str, Any], *, cached: bool
) -> Built:
    log = str(description["log"])
    registers, spill_bytes, static_shared = resources(log, str(description["symbol"]))
    where = f"the compiler's log is in {cache_dir() / key}.json"
    if "C7511" in log or re.search(r"wgmma.*serialized", log):
        raise BuildFailed(f"{specialisation.name}: the compiler serialised its wgmma instructions; {where}")
    if spill_bytes and not specialisation.may_spill:
        raise BuildFailed(f"{specialisation.name}: {spill_bytes} bytes of register spills; {where}")
    shared_bytes = static_shared + specialisation.shared_bytes
    if shared_bytes > SHARED_LIMIT:
        raise BuildFailed(
            f"{specialisation.name}: wants {shared_bytes} bytes of shared memory a block, {ARCH} has {SHARED_LIMIT}"
        )
    return Built(
        specialisation,
        key,
        cubin,
        str(description["symbol"]),
        log,
        registers,
        spill_bytes,
        shared_bytes,
        float(description["seconds"]),
        cached,
    )


def resources(log: str, symbol: str) -> tuple[int, int, int]:
    """Registers per thread, spilled bytes (stores + loads) and static shared bytes that `ptxas -v` reported.

    Raises:
        BuildFailed: the log does not speak of the kernel, so nothing can be vouched for.
    """
    found = re.search(
        rf"Function properties for {re.escape(symbol)}\n.*?(\d+) bytes spill stores, (\d+) bytes spill loads"
        r".*?Used (\d+) registers([^\n]*)",
        log,
        re.DOTALL,
    )
    if found is None:
        raise BuildFailed(f"the compiler's log says nothing about {symbol}:\n{log}")
    shared = re.search(r"(\d+) bytes smem", found[4])
    return int(found[3]), int(found[1]) + int(found[2]), int(shared[1]) if shared else 0
