# mypy: disallow-untyped-defs=False
"""dQ for Hopper in Gluon: one warpgroup loads by TMA, two own 64 queries each and walk the key tiles.

The two share the streamed tiles and nothing else, and every sum has a fixed order. dS stays in registers. With three or
more stages, the next tile's scores and dP are multiplied while dS K of this one runs.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from kernels_triton.attention_hopper_tiles import (
    LOG2E,
    fill_rows_with_zero,
    sequence,
    store_rows,
    tile_and_pair,
    zero_rows_from,
)
from kernels_triton.attention_tiles import SIZES


@gluon.jit
def _dq_step(t, dq, q, do, shift, delta, k_smem, v_smem, k_full, k_empty, v_full, v_empty, rows, n, k_len, offset,
             scale_log2, BLOCK_N: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, STAGES: gl.constexpr,
             CAUSAL: gl.constexpr, MASKED: gl.constexpr):  # fmt: skip
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    stage = t % STAGES
    phase = (t // STAGES) & 1
    k = k_smem.index(stage).reshape([BLOCK_N, D])
    v = v_smem.index(stage).reshape([BLOCK_N, DV])
    zero = gl.zeros([64, BLOCK_N], gl.float32, s_layout)
    mbarrier.wait(k_full.index(stage), phase)
    scores = warpgroup_mma(q, k.permute([1, 0]), zero, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(stage), phase)
    # dP - delta: the accumulator starts at -delta.
    dp = zero - gl.expand_dims(delta, 1)
    dp = warpgroup_mma(do, v.permute([1, 0]), dp, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    p = gl.exp2(scores * scale_log2 - gl.expand_dims(shift, 1))
    dp = warpgroup_mma_wait(0, deps=[dp])
    mbarrier.arrive(v_empty.index(stage))
    ds = p * dp
    if MASKED:
        columns = n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, s_layout))
        live = gl.expand_dims(columns < k_len, 0)
        if CAUSAL:
            live = live & (gl.expand_dims(columns, 0) <= gl.expand_dims(rows + offset, 1))
        ds = gl.where(live, ds, 0.0)
    ds = gl.convert_layout(ds.to(k_smem.dtype), gl.DotOperandLayout(0, dq_layout, 2))
    dq = warpgroup_mma(ds, k, dq, is_async=True)
    dq = warpgroup_mma_wait(0, deps=[dq])
    mbarrier.arrive(k_empty.index(stage))
    return dq


@gluon.jit
def _dq_ahead(t, dq, ds, q, do, shift, delta, k_smem, v_smem, k_full, k_empty, v_full, v_empty, rows, n, k_len, offset,
              scale_log2, BLOCK_N: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, STAGES: gl.constexpr,
              CAUSAL: gl.constexpr, MASKED: gl.constexpr, FIRST: gl.constexpr):  # fmt: skip
    """dS of tile `t` and, meanwhile, dS K of tile `t - 1`."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    stage = t % STAGES
    before = (t + STAGES - 1) % STAGES
    phase = (t // STAGES) & 1
    k = k_smem.index(stage).reshape([BLOCK_N, D])
    v = v_smem.index(stage).reshape([BLOCK_N, DV])
    zero = gl.zeros([64, BLOCK_N], gl.float32, s_layout)
    mbarrier.wait(k_full.index(stage), phase)
    scores = warpgroup_mma(q, k.permute([1, 0]), zero, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(stage), phase)
    # dP - delta: the accumulator starts at -delta.
    dp = zero - gl.expand_dims(delta, 1)
    dp = warpgroup_mma(do, v.permute([1, 0]), dp, is_async=True)
    if FIRST:
        scores, dp = warpgroup_mma_wait(0, deps=[scores, dp])
    else:
        dq = warpgroup_mma(ds, k_smem.index(before).reshape([BLOCK_N, D]), dq, is_async=True)
        scores, dp = warpgroup_mma_wait(1, deps=[scores, dp])
    mbarrier.arrive(v_empty.index(stage))
    new_ds = gl.exp2(scores * scale_log2 - gl.expand_dims(shift, 1)) * dp
    if MASKED:
        columns = n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, s_layout))
        live = gl.expand_dims(columns < k_len, 0)
        if CAUSAL:
            live = live & (gl.expand_dims(columns, 0) <= gl.expand_dims(rows + offset, 1))
        new_ds = gl.where(live, new_ds, 0.0)
    if not FIRST:
        dq = warpgroup_mma_wait(0, deps=[dq])
        mbarrier.arrive(k_empty.index(before))
    return dq, gl.convert_layout(new_ds.to(k_smem.dtype), gl.DotOperandLayout(0, dq_layout, 2))


@gluon.jit
def _dq_consume(member, q_smem, do_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full, v_empty, out_base, lse_base,
                dlse_base, dlse_stride_s, shift_base, delta_base, dq_base, heads, first_row, q_len, k_len, blocks,
                masked, scale_log2, scale, BLOCK_N: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
                HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
                VARLEN: gl.constexpr, ALL_LIVE: gl.constexpr, HAS_DLSE: gl.constexpr,
                COMPUTE_DQ: gl.constexpr, AHEAD: gl.constexpr):  # fmt: skip
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    load: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // DV, DV // 8], [4, 1], [1, 0])
    offset = k_len - q_len
    own = first_row + member * 64
    rows = own + gl.arange(0, 64, layout=row_layout)
    line = own + gl.arange(0, 64, layout=gl.SliceLayout(1, load))
    columns = gl.arange(0, DV, layout=gl.SliceLayout(0, load))
    ptrs = out_base + gl.expand_dims(line.to(gl.int64) * (heads * HEAD_DIM_V), 1) + gl.expand_dims(columns, 0)
    out = gl.load(ptrs, mask=gl.expand_dims(line < q_len, 1) & gl.expand_dims(columns < HEAD_DIM_V, 0), other=0.0)
    shift = gl.load(lse_base + rows, mask=rows < q_len, other=float("-inf")) * LOG2E
    shift = gl.where(shift == float("-inf"), float("inf"), shift)
    mbarrier.wait(q_full, 0)
    dout = do_smem.index(member).reshape([64, DV]).load(load)
    delta = gl.convert_layout(gl.sum(out.to(gl.float32) * dout.to(gl.float32), 1), row_layout)
    if HAS_DLSE:
        delta -= gl.load(dlse_base + rows.to(gl.int64) * dlse_stride_s, mask=rows < q_len, other=0.0)
    # A row that sees no key has no gradient, whatever its dO holds.
    delta = gl.where(shift == float("inf"), 0.0, delta)
    gl.store(shift_base + rows, shift, mask=rows < q_len)
    gl.store(delta_base + rows, delta, mask=rows < q_len)

    if COMPUTE_DQ:
        dq = gl.zeros([64, D], gl.float32, dq_layout)
        if blocks > 0:
            q = q_smem.index(member).reshape([64, D])
            do = do_smem.index(member).reshape([64, DV])
            if VARLEN:  # noqa: SIM102
                if blocks * BLOCK_N > k_len:
                    live = k_len - (blocks - 1) * BLOCK_N
                    mbarrier.wait(k_full.index(0), 0)
                    zero_rows_from(k_smem.index(0).reshape([BLOCK_N, D]), live, BLOCK_N, D)
            if AHEAD:
                dq, ds = _dq_ahead(
                    0, dq, shift, q, do, shift, delta, k_smem, v_smem, k_full, k_empty, v_full, v_empty, rows,
                    (blocks - 1) * BLOCK_N, k_len, offset, scale_log2, BLOCK_N, D, DV, STAGES, CAUSAL,
                    not ALL_LIVE, True,
                )  # fmt: skip
                if not ALL_LIVE:
                    for t in range(1, masked):
                        dq, ds = _dq_ahead(
                            t, dq, ds, q, do, shift, delta, k_smem, v_smem, k_full, k_empty, v_full, v_empty, rows,
                            (blocks - 1 - t) * BLOCK_N, k_len, offset, scale_log2, BLOCK_N, D, DV, STAGES, CAUSAL,
                            True, False,
                        )  # fmt: skip
                for t in range(gl.maximum(1, masked), blocks):
                    dq, ds = _dq_ahead(
                        t, dq, ds, q, do, shift, delta, k_smem, v_smem, k_full, k_empty, v_full, v_empty, rows,
                        (blocks - 1 - t) * BLOCK_N, k_len, offset, scale_log2, BLOCK_N, D, DV, STAGES, CAUSAL,
                        False, False,
                    )  # fmt: skip
                last = k_smem.index((blocks - 1) % STAGES).reshape([BLOCK_N, D])
                dq = warpgroup_mma(ds, last, dq, is_async=True)
                dq = warpgroup_mma_wait(0, deps=[dq])
            else:
                if not ALL_LIVE:
                    for t in range(0, masked):
                        dq = _dq_step(
                            t, dq, q, do, shift, delta, k_smem, v_smem, k_full, k_empty, v_full, v_empty, rows,
                            (blocks - 1 - t) * BLOCK_N, k_len, offset, scale_log2, BLOCK_N, D, DV, STAGES, CAUSAL,
                            True,
                        )  # fmt: skip
                for t in range(masked, blocks):
                    dq = _dq_step(
                        t, dq, q, do, shift, delta, k_smem, v_smem, k_full, k_empty, v_full, v_empty, rows,
                        (blocks - 1 - t) * BLOCK_N, k_len, offset, scale_log2, BLOCK_N, D, DV, STAGES, CAUSAL, False,
                    )  # fmt: skip
        store_rows(dq_base, dq * scale, own, q_len, heads * HEAD_DIM, D, HEAD_DIM)


@gluon.jit
def _dq_produce(q_desc, do_desc, k_desc, v_desc, q_smem, do_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full,
                v_empty, desc_batch, head, kv_head, q_row, k_start, blocks, BLOCK_N: gl.constexpr,
                STAGES: gl.constexpr, COMPUTE_DQ: gl.constexpr):  # fmt: skip
    mbarrier.expect(q_full, 2 * q_desc.block_type.nbytes + 2 * do_desc.block_type.nbytes)
    for i in gl.static_range(2):
        tma.async_copy_global_to_shared(q_desc, [desc_batch, head, q_row + 64 * i, 0], q_full, q_smem.index(i))
        tma.async_copy_global_to_shared(do_desc, [desc_batch, head, q_row + 64 * i, 0], q_full, do_smem.index(i))
    if COMPUTE_DQ:
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
def attention_dq_hopper(
    q_desc, k_desc, v_desc, do_desc, out_ptr, lse_ptr, dlse_ptr, shift_ptr, delta_ptr, dq_ptr, cu_q_ptr, cu_k_ptr,
    batch, heads, seqlen_q, seqlen_k, tokens_q, tiles, group, scale_log2, scale,
    dlse_stride_b, dlse_stride_h, dlse_stride_s,
    GROUP_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr, CAUSAL: gl.constexpr, VARLEN: gl.constexpr, ALL_LIVE: gl.constexpr,
    HAS_DLSE: gl.constexpr, COMPUTE_DQ: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """One tile of 128 queries of one head: as `attention_dq_kernel`, 16-bit inputs only; `out` is contiguous."""
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
        row_base = head.to(gl.int64) * tokens_q + q_start
        dlse_base = head.to(gl.int64) * dlse_stride_h + q_start.to(gl.int64) * dlse_stride_s
        first = q_start.to(gl.int64) * heads + head
        if b == batch:
            if COMPUTE_DQ:
                fill_rows_with_zero(
                    dq_ptr + first * HEAD_DIM, tile * 128, q_rows, tiles * 128, heads * HEAD_DIM, D, HEAD_DIM
                )
            return
    else:
        row_base = (b.to(gl.int64) * heads + head) * seqlen_q
        dlse_base = b.to(gl.int64) * dlse_stride_b + head.to(gl.int64) * dlse_stride_h
        first = b.to(gl.int64) * seqlen_q * heads + head

    end = k_len
    full = k_len // BLOCK_N
    if CAUSAL:
        offset = k_len - q_len
        end = gl.maximum(0, gl.minimum(end, (tile + 1) * 128 + offset))
        full = gl.maximum(0, gl.minimum(full, (tile * 128 + offset + 1) // BLOCK_N))
    blocks = gl.cdiv(end, BLOCK_N)
    masked = blocks - full

    q_smem = gl.allocate_shared_memory(q_desc.dtype, [2, 1, 1, 64, D], q_desc.layout)
    do_smem = gl.allocate_shared_memory(do_desc.dtype, [2, 1, 1, 64, DV], do_desc.layout)
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
    out_base = out_ptr + first * HEAD_DIM_V
    lse_base = lse_ptr + row_base
    shift_base = shift_ptr + row_base
    delta_base = delta_ptr + row_base
    dq_base = lse_base
    if COMPUTE_DQ:
        dq_base = dq_ptr + first * HEAD_DIM
    dlse_start = lse_base
    if HAS_DLSE:
        dlse_start = dlse_ptr + dlse_base
    gl.warp_specialize(
        [
            (_dq_consume, (0, q_smem, do_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full, v_empty, out_base,
                           lse_base, dlse_start, dlse_stride_s, shift_base, delta_base, dq_base, heads, tile * 128,
                           q_len, k_len, blocks, masked, scale_log2, scale, BLOCK_N, D, DV, HEAD_DIM, HEAD_DIM_V,
                           STAGES, CAUSAL, VARLEN, ALL_LIVE, HAS_DLSE, COMPUTE_DQ, AHEAD)),
            (_dq_consume, (1, q_smem, do_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full, v_empty, out_base,
                           lse_base, dlse_start, dlse_stride_s, shift_base, delta_base, dq_base, heads, tile * 128,
                           q_len, k_len, blocks, masked, scale_log2, scale, BLOCK_N, D, DV, HEAD_DIM, HEAD_DIM_V,
                           STAGES, CAUSAL, VARLEN, ALL_LIVE, HAS_DLSE, COMPUTE_DQ, AHEAD)),
            (_dq_produce, (q_desc, do_desc, k_desc, v_desc, q_smem, do_smem, k_smem, v_smem, q_full, k_full, k_empty,
                           v_full, v_empty, desc_batch, head, head // GROUP_SIZE, q_start + tile * 128, k_start,
                           blocks, BLOCK_N, STAGES, COMPUTE_DQ)),
        ],
        [4, 4],
        [240, 24],
    )  # fmt: skip
