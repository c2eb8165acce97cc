# mypy: disallow-untyped-defs=False
"""dK and dV for Hopper in Gluon: one warpgroup loads by TMA, two own a key tile and walk the query tiles.

Each owns 64 of the keys, shares only the streamed tiles with the other, and sums in a fixed order. Scores are held
transposed, [keys, queries], so that P and dS are register operands as they are.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels_triton.attention_hopper_tiles import (
    fill_rows_with_zero,
    sequence,
    store_rows,
    tile_and_pair,
    zero_rows_from,
)
from kernels_triton.attention_tiles import SIZES


@gluon.jit
def _dkv_step(t, dk, dv, k, v, q_smem, do_smem, q_full, q_empty, do_full, do_empty, shift_base, delta_base,
              columns, m, q_len, offset, scale_log2, BLOCK_M: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
              STAGES: gl.constexpr, CAUSAL: gl.constexpr, MASKED: gl.constexpr):  # fmt: skip
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    dk_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    dv_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    stage = t % STAGES
    q = q_smem.index(stage).reshape([BLOCK_M, D])
    do = do_smem.index(stage).reshape([BLOCK_M, DV])
    rows = m + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, s_layout))
    if MASKED:
        shift = gl.load(shift_base + rows, mask=rows < q_len, other=float("inf"))
        delta = gl.load(delta_base + rows, mask=rows < q_len, other=0.0)
    else:
        shift = gl.load(shift_base + rows)
        delta = gl.load(delta_base + rows)
    zero = gl.zeros([64, BLOCK_M], gl.float32, s_layout)
    mbarrier.wait(q_full.index(stage), (t // STAGES) & 1)
    scores = warpgroup_mma(k, q.permute([1, 0]), zero, use_acc=False, is_async=True)
    mbarrier.wait(do_full.index(stage), (t // STAGES) & 1)
    # dP - delta: the accumulator starts at -delta.
    dp = zero - gl.expand_dims(delta, 0)
    dp = warpgroup_mma(v, do.permute([1, 0]), dp, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    p = gl.exp2(scores * scale_log2 - gl.expand_dims(shift, 0))
    if MASKED:  # noqa: SIM102
        if CAUSAL:
            p = gl.where(gl.expand_dims(columns - offset - m, 1) <= gl.expand_dims(rows - m, 0), p, 0.0)
    p_operand = gl.convert_layout(p.to(q_smem.dtype), gl.DotOperandLayout(0, dv_layout, 2))
    dv = warpgroup_mma(p_operand, do, dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=[dp])
    ds = (p * dp).to(q_smem.dtype)
    dk = warpgroup_mma(gl.convert_layout(ds, gl.DotOperandLayout(0, dk_layout, 2)), q, dk, is_async=True)
    dk, dv = warpgroup_mma_wait(0, deps=[dk, dv])
    mbarrier.arrive(do_empty.index(stage))
    mbarrier.arrive(q_empty.index(stage))
    return dk, dv


@gluon.jit
def _dkv_consume(member, k_smem, v_smem, q_smem, do_smem, kv_full, q_full, q_empty, do_full, do_empty,
                 shift_ptr, delta_ptr, row_base, row_step, dk_base, dv_base, kv_heads, first_key, q_len, k_len, begin,
                 whole, tail_row, tail, masked, blocks, scale_log2, scale, GROUP_SIZE: gl.constexpr,
                 BLOCK_M: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, HEAD_DIM: gl.constexpr,
                 HEAD_DIM_V: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
                 VARLEN: gl.constexpr):  # fmt: skip
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    dk_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    dv_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    own = first_key + member * 64
    columns = own + gl.arange(0, 64, layout=gl.SliceLayout(1, s_layout))
    offset = k_len - q_len
    k = k_smem.index(member).reshape([64, D])
    v = v_smem.index(member).reshape([64, DV])
    dk = gl.zeros([64, D], gl.float32, dk_layout)
    dv = gl.zeros([64, DV], gl.float32, dv_layout)
    mbarrier.wait(kv_full, 0)
    t = 0
    for group_member in range(GROUP_SIZE):
        base = row_base + group_member * row_step
        for i in range(0, masked):
            m = gl.where(i < tail, tail_row, begin + (i - tail) * BLOCK_M)
            if VARLEN:  # noqa: SIM102
                if i < tail:
                    stage = t % STAGES
                    mbarrier.wait(q_full.index(stage), (t // STAGES) & 1)
                    zero_rows_from(q_smem.index(stage).reshape([BLOCK_M, D]), q_len - m, BLOCK_M, D)
                    mbarrier.wait(do_full.index(stage), (t // STAGES) & 1)
                    zero_rows_from(do_smem.index(stage).reshape([BLOCK_M, DV]), q_len - m, BLOCK_M, DV)
            dk, dv = _dkv_step(
                t, dk, dv, k, v, q_smem, do_smem, q_full, q_empty, do_full, do_empty, shift_ptr + base,
                delta_ptr + base, columns, m, q_len, offset, scale_log2, BLOCK_M, D, DV, STAGES, CAUSAL, True,
            )  # fmt: skip
            t += 1
        for i in range(masked, blocks):
            dk, dv = _dkv_step(
                t, dk, dv, k, v, q_smem, do_smem, q_full, q_empty, do_full, do_empty, shift_ptr + base,
                delta_ptr + base, columns, whole + (i - masked) * BLOCK_M, q_len, offset, scale_log2, BLOCK_M, D, DV,
                STAGES, CAUSAL, False,
            )  # fmt: skip
            t += 1
    store_rows(dk_base, dk * scale, own, k_len, kv_heads * HEAD_DIM, D, HEAD_DIM)
    store_rows(dv_base, dv, own, k_len, kv_heads * HEAD_DIM_V, DV, HEAD_DIM_V)


@gluon.jit
def _dkv_produce(q_desc, do_desc, k_desc, v_desc, k_smem, v_smem, q_smem, do_smem, kv_full, q_full, q_empty, do_full,
                 do_empty, desc_batch, kv_head, k_row, q_start, begin, whole, tail_row, tail, masked, blocks,
                 GROUP_SIZE: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    mbarrier.expect(kv_full, 2 * (k_desc.block_type.nbytes + v_desc.block_type.nbytes))
    for j in gl.static_range(2):
        tma.async_copy_global_to_shared(k_desc, [desc_batch, kv_head, k_row + 64 * j, 0], kv_full, k_smem.index(j))
        tma.async_copy_global_to_shared(v_desc, [desc_batch, kv_head, k_row + 64 * j, 0], kv_full, v_smem.index(j))
    t = 0
    for group_member in range(GROUP_SIZE):
        head = kv_head * GROUP_SIZE + group_member
        for i in range(0, blocks):
            m = gl.where(i < tail, tail_row, begin + (i - tail) * BLOCK_M)
            m = gl.where(i < masked, m, whole + (i - masked) * BLOCK_M)
            stage = t % STAGES
            mbarrier.wait(q_empty.index(stage), ((t // STAGES) & 1) ^ 1)
            mbarrier.expect(q_full.index(stage), q_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                q_desc, [desc_batch, head, q_start + m, 0], q_full.index(stage), q_smem.index(stage)
            )
            mbarrier.wait(do_empty.index(stage), ((t // STAGES) & 1) ^ 1)
            mbarrier.expect(do_full.index(stage), do_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                do_desc, [desc_batch, head, q_start + m, 0], do_full.index(stage), do_smem.index(stage)
            )
            t += 1


@gluon.jit(do_not_specialize=SIZES)
def attention_dkv_hopper(
    q_desc, k_desc, v_desc, do_desc, shift_ptr, delta_ptr, dk_ptr, dv_ptr, cu_q_ptr, cu_k_ptr,
    batch, kv_heads, seqlen_q, seqlen_k, tokens_q, tokens_k, tiles, group, scale_log2, scale,
    GROUP_SIZE: gl.constexpr, BLOCK_M: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr, CAUSAL: gl.constexpr, VARLEN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One tile of 128 keys of one key head: as `attention_dkv_kernel`, 16-bit inputs only."""
    sequences = batch
    if VARLEN:
        sequences = batch + 1
    tile, pair = tile_and_pair(gl.program_id(0), tiles, sequences * kv_heads, group, False)
    b = pair // kv_heads
    kv_head = pair % kv_heads
    k_start, k_len, k_rows = sequence(cu_k_ptr, b, batch, seqlen_k, tokens_k, VARLEN)
    q_start, q_len, _ = sequence(cu_q_ptr, b, batch, seqlen_q, 0, VARLEN)
    if tile * 128 >= k_rows:
        return
    heads = kv_heads * GROUP_SIZE
    desc_batch = b
    if VARLEN:
        desc_batch = 0
        first = k_start.to(gl.int64) * kv_heads + kv_head
        row_base = kv_head.to(gl.int64) * GROUP_SIZE * tokens_q + q_start
        row_step = tokens_q.to(gl.int64)
        if b == batch:
            start = tile * 128
            step = tiles * 128
            fill_rows_with_zero(dk_ptr + first * HEAD_DIM, start, k_rows, step, kv_heads * HEAD_DIM, D, HEAD_DIM)
            fill_rows_with_zero(dv_ptr + first * HEAD_DIM_V, start, k_rows, step, kv_heads * HEAD_DIM_V, DV, HEAD_DIM_V)
            return
    else:
        first = b.to(gl.int64) * seqlen_k * kv_heads + kv_head
        row_base = (b.to(gl.int64) * heads + kv_head * GROUP_SIZE) * seqlen_q
        row_step = seqlen_q.to(gl.int64)

    # Query tiles in order: a tail cut by the sequence's end, those that cross the diagonal, those without a mask.
    begin = 0
    whole = 0
    full = q_len // BLOCK_M * BLOCK_M
    if CAUSAL:
        offset = k_len - q_len
        begin = gl.maximum(0, tile * 128 - offset) // BLOCK_M * BLOCK_M
        begin = gl.minimum(begin, gl.cdiv(q_len, BLOCK_M) * BLOCK_M)
        whole = gl.cdiv(gl.maximum(0, (tile + 1) * 128 - 1 - offset), BLOCK_M) * BLOCK_M
        whole = gl.maximum(gl.minimum(whole, full), gl.minimum(begin, full))
    tail = gl.where((full < q_len) & (begin < q_len), 1, 0)
    diagonal = gl.maximum(0, whole - begin) // BLOCK_M
    masked = tail + diagonal
    blocks = masked + gl.maximum(0, full - whole) // BLOCK_M

    k_smem = gl.allocate_shared_memory(k_desc.dtype, [2, 1, 1, 64, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [2, 1, 1, 64, DV], v_desc.layout)
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, 1, BLOCK_M, D], q_desc.layout)
    do_smem = gl.allocate_shared_memory(do_desc.dtype, [STAGES, 1, 1, BLOCK_M, DV], do_desc.layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    do_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
        mbarrier.init(do_full.index(i), count=1)
        mbarrier.init(do_empty.index(i), count=2)
    dk_base = dk_ptr + first * HEAD_DIM
    dv_base = dv_ptr + first * HEAD_DIM_V
    gl.warp_specialize(
        [
            (_dkv_consume, (0, k_smem, v_smem, q_smem, do_smem, kv_full, q_full, q_empty, do_full,
                            do_empty, shift_ptr, delta_ptr, row_base, row_step, dk_base, dv_base, kv_heads,
                            tile * 128, q_len, k_len, begin, whole, full, tail, masked, blocks, scale_log2, scale,
                            GROUP_SIZE, BLOCK_M, D, DV, HEAD_DIM, HEAD_DIM_V, STAGES, CAUSAL, VARLEN)),
            (_dkv_consume, (1, k_smem, v_smem, q_smem, do_smem, kv_full, q_full, q_empty, do_full,
                            do_empty, shift_ptr, delta_ptr, row_base, row_step, dk_base, dv_base, kv_heads,
                            tile * 128, q_len, k_len, begin, whole, full, tail, masked, blocks, scale_log2, scale,
                            GROUP_SIZE, BLOCK_M, D, DV, HEAD_DIM, HEAD_DIM_V, STAGES, CAUSAL, VARLEN)),
            (_dkv_produce, (q_desc, do_desc, k_desc, v_desc, k_smem, v_smem, q_smem, do_smem, kv_full, q_full,
                            q_empty, do_full, do_empty, desc_batch, kv_head, k_start + tile * 128, q_start, begin,
                            whole, full, tail, masked, blocks, GROUP_SIZE, BLOCK_M, STAGES)),
        ],
        [4, 4],
        [240, 24],
    )  # fmt: skip
