"""The wgmma forward without a GPU: every specialisation builds clean, its index maths agree, its schedule is whole."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest

from kernels_native.jit import INCLUDE, ROOT, SHARED_LIMIT, build
from kernels_native.sm90_forward import _PREPARE, HEAD_DIMS, choose, specialisations, split_config, split_plan


def sass(cubin: bytes) -> str:
    """Disassembly with the tool from the triton wheel."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(
    ("causal", "varlen", "dtype"), [(False, False, "bf16"), (True, False, "fp16"), (True, True, "bf16")]
)
def test_builds_without_spills_or_serialisation(head_dim: int, causal: bool, varlen: bool, dtype: str) -> None:
    config = choose(head_dim, head_dim, causal, varlen, dtype)
    built = build(config.specialisation())  # raises on spills and on serialised wgmma
    assert built.spill_bytes == 0
    assert built.shared_bytes <= SHARED_LIMIT
    text = sass(built.cubin)
    products = re.findall(r"HGMMA\.64x(\d+)x16\.F32(\.BF16)?", text)
    assert {int(n) for n, _ in products} >= {config.block_n}
    assert all(bool(bf16) == (dtype == "bf16") for _, bf16 in products)
    assert "UTMALDG.4D" in text
    assert "UTMASTG.4D" in text


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_other_paths_build_too(dtype: str) -> None:
    halves = choose(128, 128, True, False, dtype, aligned=True)
    assert halves.diagonal_halves
    for config in (
        halves,
        split_config(halves),
        choose(192, 128, True, False, dtype),
        choose(128, 64, True, True, dtype),
    ):
        assert build(config.specialisation()).spill_bytes == 0
    assert {f"64x{n}x16" for n in (64, 128)} == set(
        re.findall(r"HGMMA\.(64x\d+x16)", sass(build(halves.specialisation()).cubin))
    )


def test_exponentials_run_under_the_second_product() -> None:
    # In the unmasked loop the wait for P V must come after the exponentials, or the overlap is lost.
    text = sass(build(choose(128, 128, False, False, "bf16").specialisation()).cubin)
    events = re.findall(r"(MUFU\.EX2|DEPBAR\.LE gsb0, 0x[01]|tnspB)", text)
    waits = [i for i, event in enumerate(events) if event == "DEPBAR.LE gsb0, 0x1"]
    assert len(waits) == 2  # the masked and the unmasked loop
    for start in waits:
        end = events.index("DEPBAR.LE gsb0, 0x0", start)
        assert events[start:end].count("MUFU.EX2") >= 64


def test_every_specialisation_fits_shared_memory() -> None:
    names = list(specialisations())
    assert len(names) == len(set(names))
    assert all(one.shared_bytes <= SHARED_LIMIT for one in names)


def test_head_dims_beyond_the_largest_are_refused() -> None:
    with pytest.raises(ValueError, match="1 to 256"):
        choose(264, 264, False, False, "bf16")


def swizzle(address: np.ndarray) -> np.ndarray:
    """128-byte swizzle of byte addresses: the 16-byte chunk's index is mixed with the row's (address bits 7 to 9)."""
    return address ^ ((address >> 7 & 7) << 4)


def tma_tile(values: np.ndarray) -> np.ndarray:
    """Shared memory, in 2-byte elements, after TMA loads of `[rows, 64]` boxes panel by panel."""
    rows, columns = values.shape
    memory = np.zeros(rows * columns, values.dtype)
    row, column = np.mgrid[0:rows, 0:columns]
    address = column // 64 * rows * 128 + row * 128 + column % 64 * 2
    memory[swizzle(address) // 2] = values
    return memory


def test_k_major_descriptor_walks_reach_the_right_elements() -> None:
    # Rows of K^T: element (n, k) of the operand at k-step i lies 32 bytes a step on, SBO 1,024 between eight rows.
    rows, dim = 128, 128
    values = np.arange(rows * dim).reshape(rows, dim)
    memory = tma_tile(values)
    for step in range(dim // 16):
        start = step // 4 * rows * 128 + step % 4 * 32
        n, k = np.mgrid[0:rows, 0:16]
        address = start + n // 8 * 1024 + n % 8 * 128 + k * 2
        assert (memory[swizzle(address) // 2] == values[:, step * 16 : step * 16 + 16]).all()


def test_mn_major_descriptor_walks_reach_the_right_elements() -> None:
    # V as stored: element (k, n) with n along the rows; LBO a panel, SBO eight keys, a k-step 2,048 bytes.
    keys, dim = 128, 192
    values = np.arange(keys * dim).reshape(keys, dim)
    memory = tma_tile(values)
    for step in range(keys // 16):
        k, n = np.mgrid[0:16, 0:dim]
        address = step * 2048 + n // 64 * keys * 128 + k // 8 * 1024 + k % 8 * 128 + n % 64 * 2
        assert (memory[swizzle(address) // 2] == values[step * 16 : step * 16 + 16]).all()


def accumulator(thread: int, i: int) -> tuple[int, int]:
    """(row, column) of accumulator i of a thread (PTX ISA, wgmma D fragment)."""
    return 16 * (thread // 32) + thread % 32 // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (thread % 4) + i % 2


def fragment_a(thread: int, register: int, half: int) -> tuple[int, int]:
    """(row, column) of half a register of the A operand (PTX ISA, wgmma A fragment)."""
    row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (register % 2)
    return row, 8 * (register // 2) + 2 * (thread % 4) + half


def test_accumulators_are_the_next_products_operand() -> None:
    for thread in range(128):
        for step in range(4):
            for register in range(4):
                for half in range(2):
                    row, column = accumulator(thread, 8 * step + 2 * register + half)
                    assert (row, column - 16 * step) == fragment_a(thread, register, half)


def test_output_staging_is_what_a_tma_store_reads() -> None:
    # stmatrix.x4: lane l gives the address of row l % 8 of matrix l / 8; thread t's register m is at row t / 4, columns
    # 2 (t % 4) of matrix m.
    block_m, dim, warpgroup = 128, 128, 1
    memory = np.full(block_m * dim, -1)
    for thread in range(128):
        warp = thread // 32
        for i in range(dim // 16):
            for m in range(4):
                lane = 8 * m + thread % 32 // 4  # whose address this thread's element follows
                r = warp * 16 + (lane & 15)
                chunk = 2 * (i % 4) + lane // 16
                address = i // 4 * block_m * 128 + warpgroup * 64 * 128 + r * 128 + ((chunk ^ (r & 7)) << 4)
                for half in range(2):
                    row, column = accumulator(thread, 8 * i + 2 * m + half)
                    memory[(address + 4 * (thread % 4)) // 2 + half] = row * dim + column
    expected = tma_tile(np.arange(64 * dim).reshape(64, dim))
    for panel in range(dim // 64):
        got = memory[(panel * block_m + 64) * 64 : (panel * block_m + 128) * 64]
        assert (got == expected[panel * 64 * 64 : (panel + 1) * 64 * 64]).all()


HOST = r"""
#include <algorithm>
#include <cstdio>
using std::max; using std::min;
#define __device__
#define __forceinline__ inline
%s
int main() {
  int blocks, row_tiles, heads, batch, section;
  while (std::scanf("%%d %%d %%d %%d %%d", &blocks, &row_tiles, &heads, &batch, &section) == 5) {
    const int total = row_tiles * heads * batch;
    for (int block = 0; block < blocks; ++block)
      for (int round = 0;; ++round) {
        const int index = attn::zigzag(round, block, blocks);
        if (index >= total) break;
        int r[2], h[2], b[2];
        attn::dense_tile<false>(index, row_tiles, heads, heads * batch, section, r[0], h[0], b[0]);
        attn::dense_tile<true>(index, row_tiles, heads, heads * batch, section, r[1], h[1], b[1]);
        std::printf("%%d %%d %%d %%d %%d %%d %%d %%d\n", block, index, r[0], h[0], b[0], r[1], h[1], b[1]);
      }
    std::printf("end\n");
  }
}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="no host C++ compiler")
def test_schedule_visits_every_tile_once(tmp_path: Path) -> None:
    text = (INCLUDE / "scheduler.cuh").read_text()
    host = re.search(r"// The round-robin.*?(?=// The largest i)", text, re.DOTALL)
    assert host is not None
    source = tmp_path / "schedule.cpp"
    source.write_text(HOST % f"namespace attn {{\n{host[0]}\n}}")
    binary = tmp_path / "schedule"
    subprocess.run(["g++", "-O1", "-o", binary, source], check=True)
    shapes = [(132, 32, 16, 4, 16), (132, 3, 5, 7, 4), (1, 1, 1, 1, 1), (7, 8, 6, 1, 6), (132, 33, 2, 1, 2)]
    output = subprocess.run(
        [binary], input="\n".join(" ".join(map(str, s)) for s in shapes), capture_output=True, text=True, check=True
    ).stdout
    for shape, part in zip(shapes, output.split("end\n"), strict=False):
        _, row_tiles, heads, batch, _ = shape
        rows = np.array([[int(x) for x in line.split()] for line in part.splitlines()])
        total = row_tiles * heads * batch
        assert sorted(rows[:, 1]) == list(range(total))
        for columns in (rows[:, 2:5], rows[:, 5:8]):
            assert len({tuple(x) for x in columns}) == total
            assert (columns < [row_tiles, heads, batch]).all()
            assert (columns >= 0).all()


EXTRA = r"""
#include "device.h"
#define BLOCK_M 128
inline int __clz(int x) { return __builtin_clz(x); }
inline int atomicAdd(int* at, int x) { const int old = *at; *at += x; return old; }
inline int __shfl_up_sync(unsigned, int x, int lanes) {
  posted[threadIdx.x][0] = x;
  __syncwarp();
  const int y = posted[max<int>(threadIdx.x / 32 * 32, threadIdx.x - lanes)][0];
  __syncwarp();
  return y;
}
"""


@pytest.fixture(scope="module")
def prepare(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """sm90_forward_prepare.cu on the CPU: `run(params)`."""
    folder = tmp_path_factory.mktemp("prepare")
    emulator = Path(__file__).parent / "emulator"
    header = (emulator / "device.h").read_text()
    (folder / "device.h").write_text(header.replace("kMostThreads = 256", "kMostThreads = 1024"))
    shutil.copy(emulator / "device.cpp", folder)
    source = EXTRA + (ROOT / "sm90_forward_prepare.cu").read_text().replace('extern "C" ', "")
    source += """
void run_block(int threads, int block, void (*body)());
static PrepareParams given;
extern "C" void run(const PrepareParams* p) {
  given = *p;
  run_block(1024, 0, [] { sm90_forward_prepare(given); });
}"""
    (folder / "prepare.cpp").write_text(source)
    command = ["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-o", "prepare.so", "prepare.cpp", "device.cpp"]
    subprocess.run(command, check=True, cwd=folder)
    return ctypes.CDLL(str(folder / "prepare.so"))


@pytest.mark.skipif(shutil.which("g++") is None, reason="no host C++ compiler")
@pytest.mark.parametrize("kind", ["mixed", "equal", "growing", "empty", "none"])
def test_packed_sequences_are_ordered_by_their_keys(prepare: ctypes.CDLL, kind: str) -> None:
    generator = np.random.default_rng(1)
    lengths = {
        "mixed": generator.integers(0, 3000, (2, 2500)),
        "equal": np.full((2, 5000), 16),
        "growing": np.stack([np.arange(12) * 100 + 1] * 2),
        "empty": np.zeros((2, 3), int),
        "none": np.zeros((2, 0), int),
    }[kind]
    batch, beyond = lengths.shape[1], 37
    cu_q, cu_k = (np.concatenate([[0], np.cumsum(x)]).astype(np.int32) for x in lengths)
    found = np.full(2 * batch + 3, -1, np.int32)
    tokens = int(cu_q[-1]) + beyond
    prepare.run(_PREPARE.pack(cu_q.ctypes.data, cu_k.ctypes.data, found.ctypes.data, batch, tokens))
    offsets, order = found[: batch + 2], found[batch + 2 :]
    assert sorted(order) == list(range(batch + 1))
    assert order[-1] == batch  # the tokens beyond the last sequence
    rows = np.append(lengths[0], beyond)[order]
    assert (np.diff(offsets) == -(-rows // 128)).all()
    assert offsets[0] == 0
    keys = lengths[1][order[:-1]]
    longest_after = np.maximum.accumulate(keys[::-1])[::-1]
    assert (longest_after[:-1] <= 1.25 * np.maximum(keys[:-1], 1) + 1).all()  # nearly descending


def test_parameters_have_the_size_of_the_kernels_struct() -> None:
    from kernels_native.sm90_forward import _ADDRESSES, _NUMBERS

    size = 4 * 128 + _ADDRESSES.size + _NUMBERS.size
    assert size == 640  # four tensor maps, eight addresses, eleven ints, two floats, padded to a tensor map's alignment
    assert size % 64 == 0


def test_split_plan_covers_the_keys_and_fills_the_gpu() -> None:
    for rows, keys, heads, kv_heads, batch in [(1, 8192, 32, 8, 8), (64, 32768, 32, 8, 1), (1, 32768, 32, 32, 1)]:
        tile_rows, splits, each = split_plan(rows, keys, heads, kv_heads, batch, 132, 128, 128)
        assert tile_rows * (heads // kv_heads) <= 128
        assert (splits - 1) * each * 128 < keys <= splits * each * 128
        assert splits * batch * kv_heads * -(-rows // tile_rows) <= 132 or splits == 1
    assert split_plan(4096, 4096, 16, 16, 4, 132, 128, 128) == (0, 0, 0)
    assert split_plan(1, 100, 129, 1, 1, 132, 128, 128) == (0, 0, 0)  # a group that no tile holds
