"""The JIT: cache, keys, judgement. NVRTC needs no GPU."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kernels_native import cache, jit
from kernels_native.jit import BuildFailed, Specialisation, build

SOURCE = """
template <int N>
__global__ void fill(int* out) { out[threadIdx.x] = N; }
"""
LOG = """ptxas info    : Compiling entry function '_Z1kv' for 'sm_90a'
ptxas info    : Function properties for _Z1kv
ptxas         .     64 bytes stack frame, {stores} bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 2048 bytes smem
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ATTNBENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "native"


@pytest.fixture
def fill(tmp_path: Path) -> Specialisation:
    path = tmp_path / "fill.cu"
    path.write_text(SOURCE)
    return Specialisation(str(path), "fill", ("7",), threads=32)


def test_builds_once_then_reads_the_cache(fill: Specialisation, own_cache: Path) -> None:
    first = build(fill)
    second = build(fill)
    assert (first.cached, second.cached) == (False, True)
    assert first.cubin == second.cubin
    assert first.symbol == "_Z4fillILi7EEvPi"
    assert 0 < first.registers < 32
    assert first.log == second.log
    assert sorted(path.suffix for path in own_cache.iterdir()) == [".cubin", ".json", ".lock"]


def test_cold_build_and_warm_read_are_quick(fill: Specialisation) -> None:
    build(dataclasses.replace(fill, arguments=("1",)))  # NVRTC's own start
    start = time.perf_counter()
    build(fill)
    cold = time.perf_counter() - start
    start = time.perf_counter()
    build(fill)
    warm = time.perf_counter() - start
    assert cold < 5
    assert warm < 0.05


def test_force_builds_again(fill: Specialisation) -> None:
    build(fill)
    assert not build(fill, force=True).cached


@pytest.mark.parametrize(
    "change",
    [{"arguments": ("8",)}, {"options": ("-DX",)}, {"entry": "fill2"}],
    ids=["arguments", "options", "entry"],
)
def test_key_depends_on_the_specialisation(fill: Specialisation, change: dict[str, object]) -> None:
    assert jit.cache_key(dataclasses.replace(fill, **change)) != jit.cache_key(fill)  # type: ignore[arg-type]


def test_key_depends_on_source_headers_and_compiler(fill: Specialisation, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {jit.cache_key(fill)}
    monkeypatch.setattr(jit, "compiler_version", lambda: "99.9")
    keys.add(jit.cache_key(fill))
    monkeypatch.setattr(jit, "_header_digest", lambda: b"another header")
    keys.add(jit.cache_key(fill))
    fill.path.write_text(SOURCE + "// changed\n")
    keys.add(jit.cache_key(fill))
    assert len(keys) == 4


def test_macros_of_the_environment_are_built_in_and_enter_the_key(
    fill: Specialisation, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill.path.write_text(SOURCE.replace("= N", "= N + ADDED"))
    with pytest.raises(BuildFailed, match="ADDED"):
        build(fill)
    keys = set()
    for words in ("ADDED=1", " ADDED=2  OTHER "):
        monkeypatch.setenv("ATTNBENCH_NVRTC_DEFINES", words)
        keys.add(build(fill).key)
    assert len(keys) == 2
    monkeypatch.setenv("ATTNBENCH_NVRTC_DEFINES", "-DADDED=1")
    with pytest.raises(BuildFailed, match=r"'-DADDED=1': want NAME or NAME=VALUE"):
        build(fill)


def test_every_header_enters_the_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(jit, "INCLUDE", tmp_path)
    (tmp_path / "a.cuh").write_text("1")
    before = jit._header_digest.__wrapped__()
    (tmp_path / "a.cuh").write_text("2")
    assert jit._header_digest.__wrapped__() != before


def test_compile_error_carries_the_compilers_words(fill: Specialisation) -> None:
    fill.path.write_text("template <int N> __global__ void fill(int* out) { out[0] = nonsense; }")
    with pytest.raises(BuildFailed, match=r'identifier "nonsense" is undefined'):
        build(fill)


def test_missing_kernel_and_missing_file_are_named(fill: Specialisation) -> None:
    with pytest.raises(BuildFailed, match="other"):
        build(dataclasses.replace(fill, entry="other"))
    with pytest.raises(BuildFailed, match=r"absent\.cu"):
        build(dataclasses.replace(fill, source="/absent.cu"))


def test_damaged_entry_is_built_again(fill: Specialisation, own_cache: Path) -> None:
    built = build(fill)
    built.path.write_bytes(built.cubin[:100])
    again = build(fill)
    assert not again.cached
    assert again.cubin == built.cubin
    (own_cache / f"{built.key}.json").write_text("{half")
    assert not build(fill).cached


def test_spill_fails_the_build_on_a_cache_hit_too(fill: Specialisation, own_cache: Path) -> None:
    built = build(fill)
    path = own_cache / f"{built.key}.json"
    description = json.loads(path.read_text())
    description["log"] = description["log"].replace("0 bytes spill stores", "8 bytes spill stores")
    path.write_text(json.dumps(description))
    with pytest.raises(BuildFailed, match="8 bytes of register spills"):
        build(fill)
    assert build(dataclasses.replace(fill, may_spill=True)).spill_bytes == 8


def test_a_real_spill_fails(tmp_path: Path) -> None:
    path = tmp_path / "spill.cu"
    path.write_text("""
        __global__ void __launch_bounds__(1024, 2) spill(float* x) {
          float a[64];
          #pragma unroll
          for (int i = 0; i < 64; ++i) a[i] = x[i * 1024 + threadIdx.x];
          __syncthreads();
          #pragma unroll
          for (int i = 0; i < 64; ++i) x[(63 - i) * 1024 + threadIdx.x] = a[i] * a[(i * 7 + 3) % 64];
        }""")
    with pytest.raises(BuildFailed, match="register spills"):
        build(Specialisation(str(path), "spill"))


def test_serialised_wgmma_fails_on_a_cache_hit_too(fill: Specialisation, own_cache: Path) -> None:
    path = own_cache / f"{build(fill).key}.json"
    description = json.loads(path.read_text())
    description["log"] += (
        "\nptxas info (C7511): Potential Performance Loss: wgmma.mma_async instructions are serialized"
    )
    path.write_text(json.dumps(description))
    with pytest.raises(BuildFailed, match="serialised"):
        build(fill)


def test_too_much_shared_memory_is_refused(fill: Specialisation) -> None:
    with pytest.raises(BuildFailed, match="232449 bytes of shared memory"):
        build(dataclasses.replace(fill, shared_bytes=jit.SHARED_LIMIT + 1))


def test_resources_are_read_from_the_log() -> None:
    assert jit.resources(LOG.format(stores=8), "_Z1kv") == (168, 20, 2048)
    with pytest.raises(BuildFailed, match="says nothing about _Z5otherv"):
        jit.resources(LOG.format(stores=8), "_Z5otherv")


def test_a_cubin_is_taken_as_it_is(fill: Specialisation, tmp_path: Path) -> None:
    built = build(fill)
    path = tmp_path / "mine.cubin"
    path.write_bytes(built.cubin)
    taken = build(Specialisation(str(path), built.symbol))
    assert taken.cubin == built.cubin
    assert taken.symbol == built.symbol


def test_interrupted_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        cache.write_atomically(tmp_path / "x", b"data")
    assert list(tmp_path.glob("*x*")) == []


def test_two_processes_build_once(fill: Specialisation) -> None:
    code = (
        "from kernels_native.jit import *\n"
        f"print(build(Specialisation({fill.source!r}, 'fill', ('7',), threads=32)).cached)"
    )
    both = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=os.environ)
        for _ in range(2)
    ]
    assert sorted(process.communicate()[0].strip() for process in both) == ["False", "True"]


def test_cache_dir_and_clearing(fill: Specialisation, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(fill)
    size = sum(path.stat().st_size for path in own_cache.iterdir())
    assert cache.clear_cache() == size
    assert cache.cached_files() == []
    monkeypatch.delenv("ATTNBENCH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache.cache_dir() == Path("/somewhere/attnbench/native")


def test_package_imports_without_torch_or_cuda() -> None:
    code = "import sys, kernels_native; dir(kernels_native); assert not {'torch', 'cuda', 'triton'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
