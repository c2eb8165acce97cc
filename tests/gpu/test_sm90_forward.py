"""The wgmma forward on a GPU: every specialisation against fp64, packed edge cases, isolation, graphs, streams."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from kernels_native.sm90_forward import Config, choose, forward, split_config

pytestmark = pytest.mark.sm90
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCE = {"bf16": 5e-3, "fp16": 7e-4}
"""Relative Frobenius error; rounding P and O to the dtype costs about 2.3e-3 and 2.9e-4."""


def random(shape: tuple[int, ...], dtype: str, seed: int) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(DTYPES[dtype])


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp64 out `[rows, heads, columns]` and lse `[heads, rows]` of one sequence."""
    group = q.shape[1] // k.shape[1]
    q64, k64, v64 = (x.double().transpose(0, 1) for x in (q, k, v))
    k64, v64 = k64.repeat_interleave(group, 0), v64.repeat_interleave(group, 0)
    scores = q64 @ k64.transpose(1, 2) * scale
    rows, keys = scores.shape[-2:]
    if causal:
        visible = torch.arange(keys, device="cuda") <= torch.arange(rows, device="cuda")[:, None] + keys - rows
        scores = scores.masked_fill(~visible, -math.inf)
    lse = torch.logsumexp(scores, -1) if keys else torch.full(scores.shape[:2], -math.inf, device="cuda").double()
    weights = torch.exp(scores - torch.where(lse == -math.inf, 0.0, lse)[..., None])
    return (weights @ v64).transpose(0, 1), lse


def check(out: torch.Tensor, lse: torch.Tensor, want: torch.Tensor, want_lse: torch.Tensor, dtype: str) -> None:
    assert torch.isfinite(out).all()
    assert torch.equal(torch.isinf(lse), torch.isinf(want_lse))
    finite = torch.isfinite(want_lse)
    torch.testing.assert_close(lse[finite].double(), want_lse[finite], rtol=2e-6, atol=2e-5)
    error = (out.double() - want).norm() / want.norm().clamp(min=1e-20)
    assert error < TOLERANCE[dtype]


def dense(
    config: Config, batch: int, rows: int, keys: int, heads: int, kv_heads: int, dims: tuple[int, int] | None = None
) -> None:
    dim, dim_v = dims or (config.head_dim, config.head_dim_v)
    q = random((batch, rows, heads, dim), config.dtype, 1)
    k, v = (random((batch, keys, kv_heads, d), config.dtype, seed) for d, seed in ((dim, 2), (dim_v, 3)))
    out, lse = forward(q, k, v, causal=config.causal, softmax_scale=dim**-0.5, config=config)
    wants = [reference(q[b], k[b], v[b], config.causal, dim**-0.5) for b in range(batch)]
    check(out, lse, torch.stack([w[0] for w in wants]), torch.stack([w[1] for w in wants]), config.dtype)


SHAPES = [(2, 384, 512, 4, 2), (1, 300, 515, 3, 1), (1, 515, 300, 2, 2), (3, 77, 1000, 2, 2), (1, 1, 1, 1, 1)]


@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_every_head_dim_matches_fp64(dims: tuple[int, int], causal: bool, dtype: str) -> None:
    for shape in SHAPES:
        dense(choose(*dims, causal, False, dtype), *shape)


@pytest.mark.parametrize("dim", [8, 40, 72, 80, 104, 120, 136])
def test_other_head_dims_are_padded(dim: int) -> None:
    dense(choose(dim, dim, True, False, "bf16"), 1, 130, 130, 2, 2, (dim, dim))


def test_options_of_the_kernel_all_match() -> None:
    base = choose(128, 128, True, False, "bf16")
    for q_registers, pingpong, dynamic, quick in itertools.product((False, True), repeat=4):
        config = replace(base, q_registers=q_registers, pingpong=pingpong, dynamic=dynamic, quick=quick)
        dense(config, 2, 700, 700, 6, 2)
    for rows, keys in ((1024, 1024), (384, 512), (100, 228), (640, 256), (1, 129)):
        dense(replace(base, diagonal_halves=True), 2, rows, keys, 3, 3)


@pytest.mark.parametrize("causal", [False, True])
def test_several_tiles_a_block_and_lazy_rescale_under_large_scores(causal: bool) -> None:
    config = choose(128, 128, causal, False, "bf16")
    q, k, v = (random((2, 2048, 12, 128), "bf16", seed) for seed in (1, 2, 3))
    ramp = torch.linspace(0.1, 8, 2048, device="cuda")[None, :, None, None]
    k = (k * ramp.flip(1)).bfloat16()  # walked from right to left, the maximum keeps growing
    out, lse = forward(q, k, v, causal=causal, softmax_scale=128**-0.5, config=config)
    wants = [reference(q[b], k[b], v[b], causal, 128**-0.5) for b in range(2)]
    check(out, lse, torch.stack([w[0] for w in wants]), torch.stack([w[1] for w in wants]), "bf16")


PACKED = [
    ([300, 0, 65, 63, 1], [300, 5, 65, 63, 1]),
    ([0, 0, 1023], [0, 1, 2045]),
    ([0, 0, 0, 1], [3, 0, 5, 7]),
    ([0, 150, 0, 150], [100, 100, 100, 100]),
    ([128, 200, 0, 700, 0], [700, 100, 0, 700, 0]),
    ([16] * 2000, [16] * 2000),
    ([1] * 500 + [2000] + [3] * 500, [7] * 500 + [2000] + [1] * 500),
]


def offsets(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", PACKED, ids=lambda x: f"{len(x[0])}-{sum(x[0])}")
def test_packed_sequences(dim: int, causal: bool, lengths: tuple[list[int], list[int]]) -> None:
    lens_q, lens_k = lengths
    beyond = 37
    q = random((sum(lens_q) + beyond, 4, dim), "bf16", 1)
    k, v = (random((sum(lens_k) + beyond, 2, dim), "bf16", seed) for seed in (2, 3))
    cu_q, cu_k = offsets(lens_q), offsets(lens_k)
    out, lse = forward(q, k, v, causal=causal, softmax_scale=dim**-0.5, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    want, want_lse = torch.zeros_like(out, dtype=torch.float64), torch.full_like(lse, -math.inf, dtype=torch.float64)
    a = b = 0
    for rows, keys in zip(lens_q, lens_k, strict=True):
        if rows:
            want[a : a + rows], want_lse[:, a : a + rows] = reference(
                q[a : a + rows], k[b : b + keys], v[b : b + keys], causal, dim**-0.5
            )
        a, b = a + rows, b + keys
    check(out, lse, want, want_lse, "bf16")
    assert (out[a:] == 0).all()
    assert (lse[:, a:] == -math.inf).all()

    # The same bits for a sequence whatever its neighbours hold, NaN included.
    for poisoned in range(min(len(lens_q), 5)):
        qn, kn, vn = q.clone(), k.clone(), v.clone()
        qn[cu_q[poisoned] : cu_q[poisoned + 1]] = math.nan
        for x in (kn, vn):
            x[cu_k[poisoned] : cu_k[poisoned + 1]] = math.nan
            x[cu_k[-1] :] = math.nan
        other, other_lse = forward(
            qn, kn, vn, causal=causal, softmax_scale=dim**-0.5, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k
        )
        keep = torch.ones(len(q), dtype=torch.bool, device="cuda")
        keep[cu_q[poisoned] : cu_q[poisoned + 1]] = False
        assert torch.equal(other[keep], out[keep])
        assert torch.equal(other_lse[:, keep], lse[:, keep])


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_packed_self_attention_with_one_tensor_of_offsets(dim: int, dtype: str) -> None:
    # Equal lengths are known without reading them; the diagonal tiles then take their short way.
    for lengths in ([300, 0, 65, 63, 1], [1023], [64, 128, 192, 4096, 256, 1], [16] * 500, [70] * 30 + [1500]):
        cu = offsets(lengths)
        q, k, v = (random((sum(lengths), 4, dim), dtype, seed) for seed in (1, 2, 3))
        out, lse = forward(q, k, v, causal=True, softmax_scale=dim**-0.5, cu_seqlens_q=cu, cu_seqlens_k=cu)
        ends = list(itertools.accumulate(lengths))
        parts = [slice(end - n, end) for end, n in zip(ends, lengths, strict=True) if n]
        wants = [reference(q[part], k[part], v[part], True, dim**-0.5) for part in parts]
        check(out, lse, torch.cat([w[0] for w in wants]), torch.cat([w[1] for w in wants], 1), dtype)


def test_every_output_is_written() -> None:
    torch.use_deterministic_algorithms(True)  # fills torch.empty with NaN
    try:
        for lens in ([5, 0, 130, 64], [0, 0], [128]):
            q = random((sum(lens) + 3, 2, 128), "bf16", 1)
            cu = offsets(lens)
            for causal in (False, True):
                out, lse = forward(q, q, q, causal=causal, softmax_scale=0.1, cu_seqlens_q=cu, cu_seqlens_k=cu)
                assert not torch.isnan(out).any()
                assert not torch.isnan(lse).any()
        dense(choose(128, 128, True, False, "bf16"), 1, 799, 3, 4, 4)
        dense(choose(64, 64, True, False, "bf16"), 1, 239, 1, 4, 4)
    finally:
        torch.use_deterministic_algorithms(False)


def test_no_keys_at_all() -> None:
    q = random((2, 100, 2, 64), "bf16", 1)
    none = q[:, :0]
    out, lse = forward(q, none, none, causal=False, softmax_scale=0.125)
    assert (out == 0).all()
    assert (lse == -math.inf).all()


def test_nan_in_a_row_stays_in_the_row() -> None:
    q, k, v = (random((1, 256, 2, 128), "bf16", seed) for seed in (1, 2, 3))
    clean, clean_lse = forward(q, k, v, causal=False, softmax_scale=0.1)
    q[0, 77, 1] = math.nan
    out, lse = forward(q, k, v, causal=False, softmax_scale=0.1)
    assert torch.isnan(out[0, 77, 1]).all()
    assert torch.isnan(lse[0, 1, 77])
    out[0, 77, 1], lse[0, 1, 77] = clean[0, 77, 1], clean_lse[0, 1, 77]
    torch.testing.assert_close(out, clean, rtol=0, atol=0.02)  # the rows that share a rescale vote may round otherwise
    torch.testing.assert_close(lse, clean_lse)


def test_strided_inputs() -> None:
    wide = random((2, 4, 257, 3 * 128), "bf16", 1)
    q, k, v = (wide[..., i * 128 : (i + 1) * 128].transpose(1, 2) for i in range(3))
    out, lse = forward(q, k, v, causal=True, softmax_scale=0.1)
    same, same_lse = forward(*(x.contiguous() for x in (q, k, v)), causal=True, softmax_scale=0.1)
    assert torch.equal(out, same)
    assert torch.equal(lse, same_lse)
    odd = random((1, 200, 3, 41), "bf16", 1)[..., 1:]
    out, _ = forward(odd, odd, odd, causal=True, softmax_scale=0.1)
    same, _ = forward(*(odd.contiguous(),) * 3, causal=True, softmax_scale=0.1)
    assert torch.equal(out, same)
    expanded = random((1, 200, 1, 64), "bf16", 1).expand(2, 200, 4, 64)
    out, _ = forward(expanded, expanded, expanded, causal=False, softmax_scale=0.1)
    assert torch.equal(out[0, :, 0], out[1, :, 3])


def test_repeats_are_bitwise_equal() -> None:
    q, k, v = (random((2, 1500, 8, 128), "bf16", seed) for seed in (1, 2, 3))
    first = forward(q, k, v, causal=True, softmax_scale=0.1)
    for _ in range(20):
        again = forward(q, k, v, causal=True, softmax_scale=0.1)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_graph_replay_with_other_lengths() -> None:
    q, k, v = (random((512, 4, 128), "bf16", seed) for seed in (1, 2, 3))
    cu = offsets([300, 212])

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        return forward(q, k, v, causal=True, softmax_scale=0.1, cu_seqlens_q=cu, cu_seqlens_k=cu)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = run()
    for lengths in ([300, 212], [128, 384], [0, 512]):
        cu.copy_(offsets(lengths))
        graph.replay()
        want, want_lse = run()
        assert torch.equal(out, want)
        assert torch.equal(lse, want_lse)


def test_concurrent_streams_do_not_share_their_tile_counter() -> None:
    q, k, v = (random((2, 2048, 8, 128), "bf16", seed) for seed in (1, 2, 3))
    want, _ = forward(q, k, v, causal=True, softmax_scale=0.1)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    outs = []
    for _ in range(10):
        for stream in streams:
            with torch.cuda.stream(stream):
                outs.append(forward(q, k, v, causal=True, softmax_scale=0.1)[0])
    torch.cuda.synchronize()
    assert all(torch.equal(out, want) for out in outs)


@pytest.mark.slow
def test_more_than_two_to_the_31_elements() -> None:
    q = torch.zeros((524544 + 256, 32, 128), dtype=torch.bfloat16, device="cuda")
    q[-256:] = random((256, 32, 128), "bf16", 1)
    k, v = (random((512, 32, 128), "bf16", seed) for seed in (2, 3))
    cu_q, cu_k = offsets([524544, 256]), offsets([256, 256])
    out, lse = forward(q, k, v, causal=True, softmax_scale=128**-0.5, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    want, want_lse = reference(q[-256:], k[256:], v[256:], True, 128**-0.5)
    check(out[-256:], lse[:, -256:], want, want_lse, "bf16")
    assert (out[: 524544 - 256] == 0).all()


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(2, 1, 4096, 8, 2), (1, 64, 3000, 6, 2), (1, 5, 3, 7, 1), (1, 200, 8192, 3, 3)])
def test_packed_groups_and_split_keys(dim: int, causal: bool, shape: tuple[int, int, int, int, int]) -> None:
    dense(split_config(choose(dim, dim, causal, False, "bf16")), *shape)


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_scores_far_below_and_above_zero(sign: float) -> None:
    # Negative limits and large jumps take the slow way through the maximum.
    config = choose(128, 128, False, False, "bf16")
    q, k, v = (random((1, 1024, 2, 128), "bf16", seed) for seed in (1, 2, 3))
    q = (q + 1).bfloat16()
    k = (k + sign * torch.linspace(4, 0.5, 1024, device="cuda")[None, :, None, None]).bfloat16()
    out, lse = forward(q, k, v, causal=False, softmax_scale=128**-0.5, config=config)
    want, want_lse = reference(q[0], k[0], v[0], False, 128**-0.5)
    check(out, lse, want[None], want_lse[None], "bf16")
