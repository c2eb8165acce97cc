# mypy: disallow-untyped-defs=False
"""Forward for Hopper in Gluon: one warpgroup loads by TMA, two of 64 queries each multiply and take the softmax.

The next tile's scores are multiplied while this tile's softmax runs (Shah et al. 2024, section 3.2), which plain
Triton's compiler does not schedule. Key tiles are walked from the last to the first, so that only the first ones are
masked.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from kernels_triton.attention_hopper_tiles import (
    LN2,
    fill_rows_with_zero,
    sequence,
    store_rows,
    tile_and_pair,
    zero_rows_from,
)
from kernels_triton.attention_tiles import SIZES


@gluon.jit
def _softmax(scores, row_max, row_sum, rows, n, k_len, offset, scale_log2, BLOCK_N: gl.constexpr,
             CAUSAL: gl.constexpr, NEGATIVE_SCALE: gl.constexpr, MASKED: gl.constexpr):  # fmt: skip
    """(p in fp32, factor for what was summed so far, new maximum, new sum)."""
    if MASKED:
        columns = n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, scores.type.layout))
        live = gl.expand_dims(columns < k_len, 0)
        if CAUSAL:
            live = live & (gl.expand_dims(columns, 0) <= gl.expand_dims(rows + offset, 1))
        scores = gl.where(live, scores * scale_log2, float("-inf"))
        new_max = gl.maximum(row_max, gl.max(scores, 1))
        shift = gl.where(new_max == float("-inf"), 0.0, new_max)
        p = gl.exp2(scores - gl.expand_dims(shift, 1))
    else:
        if NEGATIVE_SCALE:
            new_max = gl.maximum(row_max, gl.min(scores, 1) * scale_log2)
        else:
            new_max = gl.maximum(row_max, gl.max(scores, 1) * scale_log2)
        shift = new_max
        p = gl.exp2(scores * scale_log2 - gl.expand_dims(shift, 1))
    alpha = gl.exp2(row_max - shift)
    row_sum = row_sum * alpha + gl.sum(p, 1)
    return p, alpha, new_max, row_sum


@gluon.jit
def _advance(t, acc, p, row_max, row_sum, q, k_smem, v_smem, k_full, k_empty, v_full, v_empty, rows, n, k_len, offset,
             scale_log2, BLOCK_N: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, STAGES: gl.constexpr,
             CAUSAL: gl.constexpr, NEGATIVE_SCALE: gl.constexpr, MASKED: gl.constexpr):  # fmt: skip
    """Scores of tile `t` and, meanwhile, P V of tile `t - 1`."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    stage = t % STAGES
    before = (t - 1) % STAGES
    mbarrier.wait(k_full.index(stage), (t // STAGES) & 1)
    k = k_smem.index(stage).reshape([BLOCK_N, D])
    v = v_smem.index(before).reshape([BLOCK_N, DV])
    zero = gl.zeros([64, BLOCK_N], gl.float32, s_layout)
    scores = warpgroup_mma(q, k.permute([1, 0]), zero, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(before), ((t - 1) // STAGES) & 1)
    acc = warpgroup_mma(p, v, acc, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(k_empty.index(stage))
    new_p, alpha, row_max, row_sum = _softmax(
        scores, row_max, row_sum, rows, n, k_len, offset, scale_log2, BLOCK_N, CAUSAL, NEGATIVE_SCALE, MASKED
    )
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(v_empty.index(before))
    acc = acc * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, o_layout)), 1)
    p = gl.convert_layout(new_p.to(k_smem.dtype), gl.DotOperandLayout(0, o_layout, 2))
    return acc, p, row_max, row_sum


@gluon.jit
def _consume(member, q_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full, v_empty, out_base, lse_base, row_stride,
             first_row, q_len, k_len, blocks, masked, scale_log2, BLOCK_N: gl.constexpr, D: gl.constexpr,
             DV: gl.constexpr, HEAD_DIM_V: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
             VARLEN: gl.constexpr, NEGATIVE_SCALE: gl.constexpr, ALL_LIVE: gl.constexpr):  # fmt: skip
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    offset = k_len - q_len
    rows = first_row + member * 64 + gl.arange(0, 64, layout=row_layout)
    acc = gl.zeros([64, DV], gl.float32, o_layout)
    row_sum = gl.full([64], 0.0, gl.float32, row_layout)
    row_max = gl.full([64], float("-inf"), gl.float32, row_layout)
    if blocks > 0:
        q = q_smem.index(member).reshape([64, D])
        mbarrier.wait(q_full, 0)
        mbarrier.wait(k_full.index(0), 0)
        k = k_smem.index(0).reshape([BLOCK_N, D])
        zero = gl.zeros([64, BLOCK_N], gl.float32, s_layout)
        scores = warpgroup_mma(q, k.permute([1, 0]), zero, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(k_empty.index(0))
        p, _, row_max, row_sum = _softmax(
            scores, row_max, row_sum, rows, (blocks - 1) * BLOCK_N, k_len, offset, scale_log2, BLOCK_N, CAUSAL,
            NEGATIVE_SCALE, not ALL_LIVE,
        )  # fmt: skip
        p = gl.convert_layout(p.to(k_smem.dtype), gl.DotOperandLayout(0, o_layout, 2))
        if VARLEN:  # noqa: SIM102
            if blocks * BLOCK_N > k_len:
                mbarrier.wait(v_full.index(0), 0)
                zero_rows_from(v_smem.index(0).reshape([BLOCK_N, DV]), k_len - (blocks - 1) * BLOCK_N, BLOCK_N, DV)
        if not ALL_LIVE:
            for t in range(1, masked):
                acc, p, row_max, row_sum = _advance(
                    t, acc, p, row_max, row_sum, q, k_smem, v_smem, k_full, k_empty, v_full, v_empty, rows,
                    (blocks - 1 - t) * BLOCK_N, k_len, offset, scale_log2, BLOCK_N, D, DV, STAGES, CAUSAL,
                    NEGATIVE_SCALE, True,
                )  # fmt: skip
        for t in range(gl.maximum(1, masked), blocks):
            acc, p, row_max, row_sum = _advance(
                t, acc, p, row_max, row_sum, q, k_smem, v_smem, k_full, k_empty, v_full, v_empty, rows,
                (blocks - 1 - t) * BLOCK_N, k_len, offset, scale_log2, BLOCK_N, D, DV, STAGES, CAUSAL,
                NEGATIVE_SCALE, False,
            )  # fmt: skip
        last = (blocks - 1) % STAGES
        mbarrier.wait(v_full.index(last), ((blocks - 1) // STAGES) & 1)
        acc = warpgroup_mma(p, v_smem.index(last).reshape([BLOCK_N, DV]), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])

    seen = row_sum > 0.0
    total = gl.where(seen, row_sum, 1.0)
    inverse = gl.where(seen, 1.0 / total, 0.0)
    lse = gl.where(seen, (row_max + gl.log2(total)) * LN2, float("-inf"))
    gl.store(lse_base + rows, lse, mask=rows < q_len)
    out = acc * gl.expand_dims(gl.convert_layout(inverse, gl.SliceLayout(1, o_layout)), 1)
    store_rows(out_base, out, first_row + member * 64, q_len, row_stride, DV, HEAD_DIM_V)


@gluon.jit
def _produce(q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full, v_empty, desc_batch, head,
             kv_head, q_row, k_start, blocks, BLOCK_N: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
             STAGES: gl.constexpr):  # fmt: skip
    if blocks > 0:
        mbarrier.expect(q_full, 2 * q_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(q_desc, [desc_batch, head, q_row, 0], q_full, q_smem.index(0))
        tma.async_copy_global_to_shared(q_desc, [desc_batch, head, q_row + 64, 0], q_full, q_smem.index(1))
        for t in range(blocks):
            stage = t % STAGES
            free = ((t // STAGES) & 1) ^ 1
            row = k_start + (blocks - 1 - t) * BLOCK_N
            mbarrier.wait(k_empty.index(stage), free)
            mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                k_desc, [desc_batch, kv_head, row, 0], k_full.index(stage), k_smem.index(stage)
            )
            mbarrier.wait(v_empty.index(stage), free)
            mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                v_desc, [desc_batch, kv_head, row, 0], v_full.index(stage), v_smem.index(stage)
            )


@gluon.jit(do_not_specialize=SIZES)
def attention_forward_hopper(
    q_desc, k_desc, v_desc, out_ptr, lse_ptr, cu_q_ptr, cu_k_ptr,
    batch, heads, seqlen_q, seqlen_k, tokens_q, tiles, group, scale_log2,
    GROUP_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, HEAD_DIM_V: gl.constexpr,
    CAUSAL: gl.constexpr, VARLEN: gl.constexpr, NEGATIVE_SCALE: gl.constexpr, ALL_LIVE: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """One tile of 128 queries of one head; arguments as `attention_forward_kernel`'s, 16-bit inputs only."""
    sequences = batch
    if VARLEN:
        sequences = batch + 1
    tile, pair = tile_and_pair(gl.program_id(0), tiles, sequences * heads, group, CAUSAL)
    b = pair // heads
    head = pair % heads
    q_start, q_len, q_rows = sequence(cu_q_ptr, b, batch, seqlen_q, tokens_q, VARLEN)
    k_start, k_len, _ = sequence(cu_k_ptr, b, batch, seqlen_k, 0, VARLEN)
    if tile * 128 >= q_rows:
        return
    desc_batch = b
    if VARLEN:
        desc_batch = 0
        lse_base = lse_ptr + head.to(gl.int64) * tokens_q + q_start
        out_base = out_ptr + (q_start.to(gl.int64) * heads + head) * HEAD_DIM_V
        if b == batch:
            first = tile * 128
            fill_rows_with_zero(out_base, first, q_rows, tiles * 128, heads * HEAD_DIM_V, DV, HEAD_DIM_V)
            for start in range(first, q_rows, tiles * 128):
                rows = start + gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
                blind = gl.full([128], float("-inf"), gl.float32, rows.type.layout)
                gl.store(lse_base + rows, blind, mask=rows < q_rows)
            return
    else:
        lse_base = lse_ptr + (b.to(gl.int64) * heads + head) * seqlen_q
        out_base = out_ptr + (b.to(gl.int64) * seqlen_q * heads + head) * HEAD_DIM_V

    end = k_len
    full = k_len // BLOCK_N
    if CAUSAL:
        offset = k_len - q_len
        end = gl.maximum(0, gl.minimum(end, (tile + 1) * 128 + offset))
        full = gl.maximum(0, gl.minimum(full, (tile * 128 + offset + 1) // BLOCK_N))
    blocks = gl.cdiv(end, BLOCK_N)
    masked = blocks - full

    q_smem = gl.allocate_shared_memory(q_desc.dtype, [2, 1, 1, 64, D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, BLOCK_N, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, BLOCK_N, DV], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    row_stride = heads * HEAD_DIM_V
    gl.warp_specialize(
        [
            (_consume, (0, q_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full, v_empty, out_base, lse_base,
                        row_stride, tile * 128, q_len, k_len, blocks, masked, scale_log2, BLOCK_N, D, DV, HEAD_DIM_V,
                        STAGES, CAUSAL, VARLEN, NEGATIVE_SCALE, ALL_LIVE)),
            (_consume, (1, q_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full, v_empty, out_base, lse_base,
                        row_stride, tile * 128, q_len, k_len, blocks, masked, scale_log2, BLOCK_N, D, DV, HEAD_DIM_V,
                        STAGES, CAUSAL, VARLEN, NEGATIVE_SCALE, ALL_LIVE)),
            (_produce, (q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full, v_empty,
                        desc_batch, head, head // GROUP_SIZE, q_start + tile * 128, k_start, blocks, BLOCK_N, D, DV,
                        STAGES)),
        ],
        [4, 4],
        [240, 24],
    )  # fmt: skip
