"""The wgmma backward without a GPU: every specialisation builds clean, overlaps as meant, and its index maths agree."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from kernels_native import backward_call, sm90_backward
from kernels_native.jit import SHARED_LIMIT, build
from kernels_native.sass import listing
from kernels_native.sm90_backward import HEAD_DIMS, choose, is_wide, specialisations


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("causal", "deterministic", "dtype"), [(False, False, "bf16"), (True, True, "fp16")])
def test_builds_without_spills_or_serialisation(head_dim: int, causal: bool, deterministic: bool, dtype: str) -> None:
    config = choose(head_dim, head_dim, causal, deterministic, dtype, wide=not causal)
    for one in (config.main(), *config.rows()):
        built = build(one)  # raises on spills and on serialised wgmma
        assert built.spill_bytes == 0
        assert built.shared_bytes <= SHARED_LIMIT
    text = listing(build(config.main()))
    products = re.findall(r"HGMMA\.64x\d+x16\.F32(\.BF16)?", text)
    assert products
    assert all(bool(bf16) == (dtype == "bf16") for bf16 in products)
    assert "UBLKRED" in text
    assert ("LD.E.STRONG.GPU" in text or "LDG.E.STRONG.GPU" in text) == deterministic


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_exponentials_run_under_the_second_product(head_dim: int) -> None:
    # dP is in flight from the second group of products on; what waits for it must come after the exponentials.
    config = choose(head_dim, head_dim, False, False, "bf16")
    text = listing(build(config.main()))
    events = re.findall(r"(MUFU\.EX2|DEPBAR\.LE gsb0, 0x[0-9])", text)
    first = events.index("MUFU.EX2")
    exponentials = config.block_m // 2
    assert events[first : first + exponentials] == ["MUFU.EX2"] * exponentials


def test_every_specialisation_fits_shared_memory() -> None:
    names = list(specialisations())
    assert len(names) == len(set(names))
    assert all(one.shared_bytes <= SHARED_LIMIT for one in names)


def test_head_dims_beyond_the_largest_are_refused() -> None:
    with pytest.raises(ValueError, match="1 to 128"):
        choose(136, 64, False, False, "bf16")


def swizzled(row: int, chunk: int) -> int:
    return row * 128 + ((chunk ^ (row & 7)) << 4)


def accumulators(tile: np.ndarray) -> np.ndarray:
    """What each of 128 threads holds of a product of 64 rows (PTX ISA, wgmma D fragment)."""
    held = np.zeros((128, tile.shape[1] // 2))
    for thread in range(128):
        for i in range(held.shape[1]):
            row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (i // 2 % 2)
            held[thread, i] = tile[row, 8 * (i // 4) + 2 * (thread % 4) + i % 2]
    return held


def stmatrix(memory: np.ndarray, addresses: list[int], registers: np.ndarray, transposed: bool) -> None:
    """stmatrix.x4 of a warp: registers `[lane, matrix, half]`; lane 8 j + r gives the address of row r of matrix j."""
    for j in range(4):
        matrix = np.zeros((8, 8))
        for lane in range(32):
            matrix[lane // 4, 2 * (lane % 4) : 2 * (lane % 4) + 2] = registers[lane, j]
        for r in range(8):
            at = addresses[8 * j + r] // 2
            memory[at : at + 8] = (matrix.T if transposed else matrix)[r]


def by_query(warp: int) -> list[int]:
    """The kernel's addresses of 16 queries by a warp's 16 rows, stored transposed."""
    return [swizzled((lane & 7) + ((lane >> 4) << 3), 2 * warp + ((lane >> 3) & 1)) for lane in range(32)]


def read_tile(memory: np.ndarray, rows: int, columns: int) -> np.ndarray:
    tile = np.zeros((rows, columns))
    for row in range(rows):
        for column in range(columns):
            address = column // 64 * rows * 128 + swizzled(row, column % 64 // 8) + column % 8 * 2
            tile[row, column] = memory[address // 2]
    return tile


@pytest.mark.parametrize("block_m", [64, 80, 128])
def test_ds_reaches_shared_memory_with_queries_along_the_rows(block_m: int) -> None:
    transposed = np.arange(128 * block_m, dtype=float).reshape(128, block_m)  # keys x queries
    memory = np.full(128 * block_m, np.nan)
    for wg in range(2):
        held = accumulators(transposed[64 * wg : 64 * wg + 64])
        for warp in range(4):
            for n in range(block_m // 16):
                registers = held[32 * warp : 32 * warp + 32, 8 * n : 8 * n + 8].reshape(32, 4, 2)
                stmatrix(memory, [wg * block_m * 128 + a + n * 2048 for a in by_query(warp)], registers, True)
    assert (read_tile(memory, block_m, 128) == transposed.T).all()


@pytest.mark.parametrize(("dim", "block_m", "swap"), [(64, 128, False), (128, 64, False), (128, 80, True)])
def test_finish_undoes_the_order_of_the_accumulators(dim: int, block_m: int, swap: bool) -> None:
    dq = np.arange(block_m * dim, dtype=float).reshape(block_m, dim)
    columns = block_m if swap else 64
    sums = np.zeros((2, columns // 8, 128, 4))  # warpgroup, quarter of 16 columns, thread, accumulator
    for wg in range(2):
        half = dq[:, 64 * wg : 64 * wg + 64] if dim == 128 else dq[64 * wg : 64 * wg + 64]
        sums[wg] = accumulators(half.T if swap else half).reshape(128, columns // 8, 4).transpose(1, 0, 2)
    memory = np.full(block_m * dim, np.nan)
    for wg in range(2):
        for warp in range(4):
            start = wg * (block_m if dim == 128 else 64) * 128
            for j in range(columns // 16):
                lanes = slice(32 * warp, 32 * warp + 32)
                registers = np.concatenate((sums[wg, 2 * j, lanes], sums[wg, 2 * j + 1, lanes]), 1).reshape(32, 4, 2)
                if swap:
                    addresses = [start + a + j * 2048 for a in by_query(warp)]
                else:
                    addresses = [
                        (start + warp * 2048 + swizzled(lane & 15, lane >> 4)) ^ (j * 32) for lane in range(32)
                    ]
                stmatrix(memory, addresses, registers, swap)
    assert (read_tile(memory, block_m, dim) == dq).all()


class Recorder:
    """Stands in for a kernel: keeps the grids and parameters of its launches."""

    def __init__(self) -> None:
        self.launches: list[tuple[tuple[int, int, int], bytes]] = []

    def launch(self, grid: tuple[int, int, int], params: bytes, stream: int) -> None:
        assert stream == 0
        self.launches.append((grid, params))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> tuple[Recorder, Recorder, Recorder]:
    found = Recorder(), Recorder(), Recorder()
    monkeypatch.setattr(sm90_backward, "_kernels", lambda *_: found)
    monkeypatch.setattr(backward_call, "row_map", lambda *_: bytes(128))
    monkeypatch.setattr(sm90_backward, "current_stream", lambda _: 0)
    return found


def test_launches_of_a_dense_call(kernels: tuple[Recorder, Recorder, Recorder]) -> None:
    q, k = torch.zeros(2, 300, 6, 128, dtype=torch.bfloat16), torch.zeros(2, 513, 3, 128, dtype=torch.bfloat16)
    lse = torch.zeros(2, 6, 300)
    grads = sm90_backward.backward(q, None, q, k, k, q, lse, None, None, True, -0.125, True)
    assert [x.shape for x in grads] == [q.shape, k.shape, k.shape]
    prepare, main, finish = (kernel.launches for kernel in kernels)
    assert [grid for grid, _ in (*prepare, *main, *finish)] == [(5 * 2 * 6, 1, 1), (5 * 3 * 2, 1, 1), (5 * 2 * 6, 1, 1)]
    rows, tiles = backward_call._ROWS_TURNS.unpack(finish[0][1]), backward_call._MAIN.unpack(main[0][1])
    assert rows[-1] == -0.125  # dq has the scale with its sign, as the queries were negated
    assert tiles[-2] == 0.125
    assert tiles[6] == rows[7] != 0  # the turns of the deterministic mode
    assert tiles[3:6] == rows[4:7]  # lse2, delta, the sums


def test_launches_of_a_packed_call(kernels: tuple[Recorder, Recorder, Recorder]) -> None:
    q = torch.zeros(100, 4, 64, dtype=torch.float16)
    cu = torch.tensor([0, 30, 30, 90], dtype=torch.int32)
    sm90_backward.backward(q, torch.zeros(4, 100), q, q, q, q, torch.zeros(4, 100), cu, cu, False, 0.125, False)
    prepare, main, finish = (kernel.launches[0] for kernel in kernels)
    assert prepare[0] == finish[0] == ((100 // 128 + 3 + 1) * 4, 1, 1)
    assert main[0] == ((100 // 128 + 3 + 1) * 4, 1, 1)
    assert backward_call._MAIN.unpack(main[1])[6] == 0  # no turns


def test_tile_follows_the_lengths() -> None:
    assert not is_wide(4096, False, False)
    assert is_wide(4096, True, False)
    assert is_wide(16384, False, False)
    assert not is_wide(16384, False, True)
    assert choose(128, 128, True, False, "bf16", True).block_m == 80
    assert choose(128, 128, True, True, "bf16", True).block_m == 64
    assert choose(64, 64, True, False, "bf16", True).block_m == 128
