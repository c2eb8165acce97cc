"""The native attention op as far as it goes without a GPU: what it takes, what it refuses, its fake tensors."""

from __future__ import annotations

import ctypes
import struct
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import kernels_native
from kernels_native import attention_checks, attention_op, launch, sm90_mma, tensor_map
from kernels_native.geometry import positive_scale

CALL: dict[str, Any] = {"dtype": "bf16", "head_dim": 128, "value_head_dim": 128, "heads": 8, "kv_heads": 2}


@pytest.mark.parametrize("kernel", ["sm90", "sm90_mma"])
def test_takes_the_plain_call(kernel: str) -> None:
    for dtype in ("bf16", "fp16", torch.bfloat16, torch.float16):
        reason = kernels_native.attention_unsupported(kernel, **{**CALL, "dtype": dtype}, causal=True, varlen=True)
        assert reason is None


@pytest.mark.parametrize(
    ("kernel", "change", "words"),
    [
        ("sm90_mma", {"dtype": torch.float32}, "takes fp16 and bf16, not fp32"),
        ("sm90_mma", {"head_dim": 192}, "head_dim that is a multiple of 8 up to 128, not 192"),
        ("sm90_mma", {"value_head_dim": 136}, "value_head_dim that is a multiple of 8 up to 128, not 136"),
        ("sm90", {"head_dim": 264}, "up to 256, not 264"),
        ("sm90_mma", {"head_dim": 60}, "not 60"),
        ("sm90_mma", {"kv_heads": 3}, "kv_heads that divide heads"),
    ],
)
def test_says_why_not(kernel: str, change: dict[str, Any], words: str) -> None:
    assert words in str(kernels_native.attention_unsupported(kernel, **{**CALL, **change}))


def test_unknown_kernel() -> None:
    with pytest.raises(ValueError, match=r"want 'sm90' or 'sm90_mma'"):
        kernels_native.attention_unsupported("sm80", **CALL)


def inputs(head_dim: int = 64, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(1, 8, heads, head_dim).to(dtype) for heads in (4, 2, 2))


def test_errors_name_the_argument() -> None:
    q, k, v = inputs()
    with pytest.raises(ValueError, match="q is on cpu"):
        kernels_native.attention(q, k, v, kernel="sm90_mma")
    with pytest.raises(ValueError, match="k has head dim 32"):
        kernels_native.attention(q, k[..., :32], v, kernel="sm90_mma")
    with pytest.raises(ValueError, match=r"fp16 and bf16, not fp32.*triton"):
        kernels_native.attention(*inputs(dtype=torch.float32), kernel="sm90_mma")
    cu = torch.tensor([0, 8])
    with pytest.raises(TypeError, match=r"cu_seqlens_q is torch\.int64"):
        kernels_native.attention(q[0], k[0], v[0], cu_seqlens_q=cu, cu_seqlens_k=cu, kernel="sm90_mma")


@pytest.mark.parametrize("packed", [False, True])
def test_fake_tensors_have_the_shapes(packed: bool) -> None:
    with FakeTensorMode():
        q, k, v = (torch.empty(2, 8, heads, 64, dtype=torch.bfloat16) for heads in (4, 2, 2))
        v = v[..., :32]
        cu = torch.empty(3, dtype=torch.int32) if packed else None
        if packed:
            q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
        out, lse = attention_op._forward_op(q, k, v, cu, cu, True, 0.1, "sm90_mma", False)
        assert out.shape == (*q.shape[:-1], 32)
        assert out.is_contiguous()
        assert lse.shape == ((4, 16) if packed else (2, 4, 8))
        assert lse.dtype == torch.float32
        grads = attention_op._backward_op(out, lse, q, k, v, out, lse, cu, cu, True, 0.1, "sm90_mma", False)
        assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]


def test_what_tma_cannot_address_is_copied() -> None:
    x = torch.randn(2, 40, 3, 64).to(torch.bfloat16)
    for same in (x, x.transpose(1, 2), x[:, ::2], x[:, :1].expand(2, 1, 3, 64)):
        assert tensor_map.tma_ready(same) is same
    wide = torch.randn(2, 40, 3, 65).to(torch.bfloat16)
    for other in (x[:, :1].expand_as(x), wide[..., 1:], x.transpose(1, 3)):
        ready = tensor_map.tma_ready(other)
        assert ready.is_contiguous()
        assert torch.equal(ready, other)


def test_maps_are_cached_and_legal(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(tensor_map, "_maps", {})
    monkeypatch.setattr(tensor_map, "_encode", lambda *key: calls.append(key) or bytes(128))
    x = torch.randn(2, 40, 3, 64).to(torch.bfloat16)
    for _ in range(3):
        tensor_map.row_map(x, "bf16", 128)
    tensor_map.row_map(x[:1, :1, :1], "bf16", 128)
    tensor_map.row_map(x[0], "bf16", 64)
    assert len(calls) == 3
    assert calls[0][2:5] == ((64, 40, 3, 2), (384, 128, 15360), (64, 128, 1, 1))
    assert all(stride % 16 == 0 and stride for call in calls for stride in call[3])
    assert tensor_map.row_map(x[:0], "bf16", 64) == bytes(128)


def test_a_scale_that_is_not_positive_moves_into_the_queries() -> None:
    q = torch.randn(4, 2, 8)
    for scale in (0.5, -0.5):
        positive, size = positive_scale(q, scale)
        assert size > 0
        torch.testing.assert_close(positive * size, q * scale)
    assert 0 < positive_scale(q, 0.0)[1] < 1e-20


class Recorder:
    """Stands in for a loaded kernel."""

    def __init__(self) -> None:
        self.launches: list[tuple[tuple[int, int, int], bytes]] = []

    def launch(self, grid: tuple[int, int, int], params: bytes, stream: int) -> None:
        self.launches.append((grid, params))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    found = Recorder()
    monkeypatch.setattr(sm90_mma, "_plans", {})
    monkeypatch.setattr(sm90_mma, "kernel", lambda *_: found)
    monkeypatch.setattr(sm90_mma, "_backward_kernels", lambda *_: (found,) * 3)
    monkeypatch.setattr(sm90_mma, "current_stream", lambda _: 0)
    monkeypatch.setattr(tensor_map, "_encode", lambda *_: bytes(128))
    return found


def test_grids_cover_dense_and_packed(recorder: Recorder) -> None:
    q, k, v = (torch.randn(2, 300, heads, 64).to(torch.bfloat16) for heads in (4, 2, 2))
    out, lse = sm90_mma.forward(q, k, v, None, None, True, 0.125)
    sm90_mma.backward(out, lse, q, k, v, out, lse, None, None, True, 0.125, True)
    assert [grid[0] for grid, _ in recorder.launches] == [3 * 4 * 2, 5 * 2 * 4, 3 * 2 * 2, 5 * 2 * 4]
    recorder.launches.clear()
    cu = torch.tensor([0, 0, 300], dtype=torch.int32)
    packed = [x[0] for x in (q, k, v)]
    out, lse = sm90_mma.forward(*packed, cu, cu, True, 0.125)
    sm90_mma.backward(out, lse, *packed, out, lse, cu, cu, True, 0.125, False)
    assert [grid[0] for grid, _ in recorder.launches] == [(2 + 3) * 4, (4 + 3) * 4, (2 + 3) * 2, (4 + 3) * 4]


def test_scale_and_strides_reach_the_kernel(recorder: Recorder) -> None:
    q, k, v = (torch.randn(2, 300, heads, 64).to(torch.bfloat16) for heads in (4, 2, 2))
    sm90_mma.forward(q, k, v, None, None, False, 0.5)
    fields = sm90_mma._TAIL.unpack(recorder.launches[0][1][416:])
    assert fields[:5] == (256, 64, 300 * 256, 300, 1200)
    assert fields[5:13] == (2, 300, 300, 4, 2, 3, 8, 64)
    assert fields[13] == pytest.approx(0.5 * 1.4426950408889634)


def test_nothing_is_launched_where_there_is_no_query(recorder: Recorder) -> None:
    q, k, v = torch.empty(0, 8, 4, 64), torch.empty(0, 8, 2, 64), torch.empty(0, 8, 2, 64)
    out, lse = sm90_mma.forward(*(x.to(torch.bfloat16) for x in (q, k, v)), None, None, False, 1.0)
    assert out.shape == (0, 8, 4, 64)
    assert lse.shape == (0, 4, 8)
    assert recorder.launches == []


def bare_kernel(launch_function: Any) -> launch.Kernel:
    kernel = launch.Kernel.__new__(launch.Kernel)
    kernel.specialisation = sm90_mma.forward_specialisation(64, True, "bf16")
    kernel.built = SimpleNamespace(registers=230, shared_bytes=51200)  # type: ignore[assignment]
    kernel._handle, kernel._block, kernel._shared, kernel._launch = 1, 128, 49152, launch_function
    kernel._success = 0
    return kernel


def test_launch_failures_name_kernel_and_limit() -> None:
    kernel = bare_kernel(lambda *_: 1)  # CUDA_ERROR_INVALID_VALUE
    with pytest.raises(kernels_native.LaunchFailed, match=r"attention_forward<64.*230 registers.*65535"):
        kernel.launch((1, 70000, 1), bytes(8), 0)
    with pytest.raises(kernels_native.LaunchFailed, match=r"attention_forward<64.*230 registers.*65535"):
        kernel.launch_arguments((1, 70000, 1), (ctypes.c_int(1),), 0)
    kernel.launch((0, 1, 1), bytes(8), 0)


def test_parameters_are_passed_whole() -> None:
    seen: list[bytes] = []

    def fake(*arguments: Any) -> int:
        array = ctypes.cast(arguments[9], ctypes.POINTER(ctypes.c_void_p))
        seen.append(ctypes.string_at(array[0] or 0, 12))
        return 0

    packed = struct.pack("<iq", 0, -3)
    kernel = bare_kernel(fake)
    kernel.launch((1, 1, 1), packed, 0)
    kernel.launch_arguments((1, 1, 1), (ctypes.create_string_buffer(packed, len(packed)),), 0)
    assert seen == [packed, packed]


def test_a_checked_call_is_not_checked_again_and_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(attention_checks, "_checked_scales", {})
    monkeypatch.setattr(attention_checks, "check", lambda *_: calls.append(1))
    monkeypatch.setattr(attention_op, "_forward", lambda q, *_: (q, q))
    q, k, v = inputs()
    for _ in range(3):
        kernels_native.attention(q, k, v, kernel="sm90_mma")
    assert len(calls) == 1
    kernels_native.attention(q, k, v, kernel="sm90_mma", causal=True)
    kernels_native.attention(q[:, :4], k, v, kernel="sm90_mma")
    kernels_native.attention(q, k, v, kernel="sm90_mma", softmax_scale=0.5)
    assert len(calls) == 3
    with pytest.raises(TypeError, match="causal is 1"):
        kernels_native.attention(q, k, v, kernel="sm90_mma", causal=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="packed"):
        kernels_native.attention(q, k, v, kernel="sm90_mma", cu_seqlens_k=torch.zeros(2, dtype=torch.int32))


def test_packed_calls_are_checked_once_for_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(attention_checks, "_checked_scales", {})
    monkeypatch.setattr(attention_checks, "check", lambda *_: calls.append(1))
    monkeypatch.setattr(attention_op, "_forward", lambda q, *_: (q, q))
    q, k, v = (x[0] for x in inputs())
    cu = torch.tensor([0, 2, q.shape[0]], dtype=torch.int32)

    def call(cu_q: Any = cu, cu_k: Any = cu, **most: Any) -> None:
        kernels_native.attention(q, k, v, kernel="sm90_mma", cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **most)
        kernels_native.attention_forward(q, k, v, kernel="sm90_mma", cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **most)

    call()
    call(max_seqlen_q=3, max_seqlen_k=3)
    call(cu + 0, max_seqlen_q=5, max_seqlen_k=1)
    assert len(calls) == 1
    call(cu[1:], cu[1:])
    assert len(calls) == 2
    for wrong, error, words in (
        ({"cu_q": cu.long()}, TypeError, "int64"),
        ({"cu_q": cu[::2]}, ValueError, "entries|contiguous"),
        ({"cu_q": [0, 1, 2]}, TypeError, "list"),
        ({"cu_q": None}, ValueError, "missing"),
        ({"max_seqlen_q": True}, TypeError, "bool"),
        ({"max_seqlen_q": -1}, ValueError, "-1"),
    ):
        with pytest.raises(error, match=words):
            call(**wrong)
