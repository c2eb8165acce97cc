"""The wgmma backward of wide heads without a GPU: builds clean, nothing waits for sums of dQ, launches as meant."""

from __future__ import annotations

import re

import pytest
import torch

from kernels_native import backward_call, sm90_backward_wide
from kernels_native.jit import SHARED_LIMIT, build
from kernels_native.sass import listing
from kernels_native.sm90_backward_wide import HEAD_DIMS, choose, specialisations


@pytest.mark.parametrize("dims", HEAD_DIMS)
@pytest.mark.parametrize(("causal", "deterministic", "dtype"), [(False, False, "bf16"), (True, True, "fp16")])
def test_builds_without_spills_or_serialisation(
    dims: tuple[int, int], causal: bool, deterministic: bool, dtype: str
) -> None:
    config = choose(*dims, causal, deterministic, dtype)
    for one in (config.main(), *config.rows()):
        built = build(one)  # raises on spills and on serialised wgmma
        assert built.spill_bytes == 0
        assert built.shared_bytes <= SHARED_LIMIT
    text = listing(build(config.main()))
    products = re.findall(r"HGMMA\.64x\d+x16\.F32(\.BF16)?", text)
    assert products
    assert all(bool(bf16) == (dtype == "bf16") for bf16 in products)
    assert "REDG.E.ADD.F32x4" in text
    assert ("LD.E.STRONG.GPU" in text or "LDG.E.STRONG.GPU" in text) == deterministic


def test_arrivals_do_not_wait_for_global_memory() -> None:
    # A fence of the whole GPU belongs to the cluster's start and end alone: in the loop it would wait for dQ's sums.
    text = listing(build(choose(256, 256, True, False, "bf16").main()))
    assert len(re.findall(r"MEMBAR\.(?:ALL|SC)\.GPU", text)) == len(re.findall("UCGABAR_ARV", text)) == 2


def test_every_specialisation_fits_shared_memory() -> None:
    names = list(specialisations())
    assert len(names) == len(set(names))
    assert all(one.shared_bytes <= SHARED_LIMIT for one in names)


def test_the_narrowest_specialisation_is_taken() -> None:
    taken = {
        dims: choose(*dims, True, False, "bf16") for dims in ((136, 136), (192, 64), (192, 136), (200, 8), (8, 200))
    }
    assert [(c.head_dim, c.head_dim_v) for c in taken.values()] == [
        (192, 192),
        (192, 128),
        (192, 192),
        (256, 256),
        (256, 256),
    ]
    with pytest.raises(ValueError, match="1 to 256"):
        choose(264, 64, False, False, "bf16")


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
    monkeypatch.setattr(sm90_backward_wide, "_kernels", lambda *_: found)
    monkeypatch.setattr(backward_call, "row_map", lambda *_: bytes(128))
    monkeypatch.setattr(sm90_backward_wide, "current_stream", lambda _: 0)
    return found


def test_launches_of_a_dense_call(kernels: tuple[Recorder, Recorder, Recorder]) -> None:
    q, k = torch.zeros(2, 300, 6, 192, dtype=torch.bfloat16), torch.zeros(2, 513, 3, 192, dtype=torch.bfloat16)
    v, dout = k[..., :128].contiguous(), q[..., :128].contiguous()
    lse = torch.zeros(2, 6, 300)
    grads = sm90_backward_wide.backward(dout, None, q, k, v, dout, lse, None, None, True, -0.125, True)
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]
    prepare, main, finish = (kernel.launches for kernel in kernels)
    # Query tiles of 64; pairs of blocks with 64 keys each.
    assert [grid for grid, _ in (*prepare, *main, *finish)] == [
        (5 * 2 * 6, 1, 1),
        (5 * 2 * 3 * 2, 1, 1),
        (5 * 2 * 6, 1, 1),
    ]
    rows, tiles = backward_call._ROWS_TURNS.unpack(finish[0][1]), backward_call._MAIN.unpack(main[0][1])
    assert rows[-2:] == (192, -0.125)  # dq has the scale with its sign, as the queries were negated
    assert backward_call._ROWS_TURNS.unpack(prepare[0][1])[-2] == 128
    assert tiles[-4:-1] == (192, 128, 0.125)
    assert tiles[6] == rows[7] != 0  # the turns of the deterministic mode
    assert tiles[3:6] == rows[4:7]  # lse2, delta, the sums


def test_launches_of_a_packed_call(kernels: tuple[Recorder, Recorder, Recorder]) -> None:
    q = torch.zeros(100, 4, 256, dtype=torch.float16)
    cu = torch.tensor([0, 30, 30, 90], dtype=torch.int32)
    sm90_backward_wide.backward(q, torch.zeros(4, 100), q, q, q, q, torch.zeros(4, 100), cu, cu, False, 0.125, False)
    prepare, main, finish = (kernel.launches[0] for kernel in kernels)
    assert prepare[0] == finish[0] == ((100 // 64 + 3 + 1) * 4, 1, 1)
    assert main[0] == ((100 // 128 + 3 + 1) * 4 * 2, 1, 1)
    assert backward_call._MAIN.unpack(main[1])[6] == 0  # no turns
