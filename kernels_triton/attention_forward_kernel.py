"""The forward kernel: FlashAttention-2's tiling with an online softmax in base 2 (Dao 2023, algorithm 1)."""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from kernels_triton.attention_tiles import INTERPRETED, LN2, SIZES, load_tile, sequence, tile_and_pair


@triton.jit
def _step(
    acc, row_sum, row_max, q, k_desc, v_desc, desc_batch, kv_head, k_start, n, rows, k_len, offset, scale_log2,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, CAUSAL: tl.constexpr,
    VARLEN: tl.constexpr, NEGATIVE_SCALE: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One key tile. `rows` are query indices inside the sequence, `offset` is Sk - Sq (the causal shift)."""
    k = load_tile(k_desc, desc_batch, kv_head, k_start + n, BLOCK_N, D)
    scores = tl.dot(q, k.T, input_precision=PRECISION)
    if MASKED:
        columns = n + tl.arange(0, BLOCK_N)
        live = (columns < k_len)[None, :]
        if CAUSAL:
            live = live & (columns[None, :] <= rows[:, None] + offset)
        scores = tl.where(live, scores * scale_log2, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        p = tl.math.exp2(scores - shift[:, None])
    else:
        if NEGATIVE_SCALE:
            new_max = tl.maximum(row_max, tl.min(scores, 1) * scale_log2)
        else:
            new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
        shift = new_max
        p = tl.math.exp2(scores * scale_log2 - shift[:, None])
    alpha = tl.math.exp2(row_max - shift)
    row_sum = row_sum * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None]
    v = load_tile(v_desc, desc_batch, kv_head, k_start + n, BLOCK_N, DV)
    if MASKED and VARLEN:
        # A packed tail tile reaches into the next sequence: 0 * NaN there would be NaN here.
        inside = n + tl.arange(0, BLOCK_N) < k_len
        v = tl.where(inside[:, None], v, tl.zeros_like(v))
    if not INTERPRETED:
        p = p.to(v.dtype)
    acc = tl.dot(p, v, acc, input_precision=PRECISION)
    return acc, row_sum, new_max


@triton.jit(do_not_specialize=SIZES)
def attention_forward_kernel(
    q_desc, k_desc, v_desc, out_ptr, lse_ptr, cu_q_ptr, cu_k_ptr,
    batch, heads, seqlen_q, seqlen_k, tokens_q, tiles, group, scale_log2,
    GROUP_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    HEAD_DIM_V: tl.constexpr, CAUSAL: tl.constexpr, VARLEN: tl.constexpr, NEGATIVE_SCALE: tl.constexpr,
    ALL_LIVE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One tile of BLOCK_M queries of one head: out (natural layout, contiguous) and lse (fp32, natural log).

    Descriptors are `[B or 1, heads, rows, head_dim]` views. GROUP_SIZE is H / Hkv. ALL_LIVE says that no tile needs a
    mask (dense, not causal, Sk a multiple of BLOCK_N).
    """
    sequences = batch + 1 if VARLEN else batch
    tile, pair = tile_and_pair(tl.program_id(0), tiles, sequences * heads, group, CAUSAL)
    b = pair // heads
    head = pair % heads
    q_start, q_len, q_rows = sequence(cu_q_ptr, b, batch, seqlen_q, tokens_q, VARLEN)
    if tile * BLOCK_M >= q_rows:
        return
    dv = tl.arange(0, DV)
    if VARLEN:
        desc_batch = 0
        lse_base = lse_ptr + head.to(tl.int64) * tokens_q + q_start
        out_base = out_ptr + (q_start.to(tl.int64) * heads + head) * HEAD_DIM_V
        if b == batch:
            for first in range(tile * BLOCK_M, q_rows, tiles * BLOCK_M):
                rows = first + tl.arange(0, BLOCK_M)
                tl.store(lse_base + rows, tl.full([BLOCK_M], float("-inf"), tl.float32), rows < q_rows)
                ptrs = out_base + rows.to(tl.int64)[:, None] * (heads * HEAD_DIM_V) + dv[None, :]
                zero = tl.zeros([BLOCK_M, DV], out_ptr.dtype.element_ty)
                tl.store(ptrs, zero, (rows < q_rows)[:, None] & (dv < HEAD_DIM_V)[None, :])
            return
        k_start, k_len, _ = sequence(cu_k_ptr, b, batch, seqlen_k, 0, VARLEN)
    else:
        desc_batch = b
        k_start = 0
        k_len = seqlen_k
        lse_base = lse_ptr + (b.to(tl.int64) * heads + head) * seqlen_q
        out_base = out_ptr + (b.to(tl.int64) * seqlen_q * heads + head) * HEAD_DIM_V
    kv_head = head // GROUP_SIZE
    offset = k_len - q_len

    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    acc = tl.zeros([BLOCK_M, DV], tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    q = load_tile(q_desc, desc_batch, head, q_start + tile * BLOCK_M, BLOCK_M, D)

    # Key tiles [0, full) are seen whole by every row of this tile, [full, end) need the mask.
    end = k_len
    full = k_len // BLOCK_N * BLOCK_N
    if CAUSAL:
        end = tl.maximum(0, tl.minimum(end, (tile + 1) * BLOCK_M + offset))
        full = tl.maximum(0, tl.minimum(full, (tile * BLOCK_M + offset + 1) // BLOCK_N * BLOCK_N))
    for n in tl.range(0, full, BLOCK_N, num_stages=STAGES):
        acc, row_sum, row_max = _step(
            acc, row_sum, row_max, q, k_desc, v_desc, desc_batch, kv_head, k_start, n, rows, k_len, offset, scale_log2,
            BLOCK_M, BLOCK_N, D, DV, CAUSAL, VARLEN, NEGATIVE_SCALE, False, PRECISION,
        )  # fmt: skip
    if not ALL_LIVE:
        for n in tl.range(full, end, BLOCK_N, num_stages=STAGES):
            acc, row_sum, row_max = _step(
                acc, row_sum, row_max, q, k_desc, v_desc, desc_batch, kv_head, k_start, n, rows, k_len, offset,
                scale_log2, BLOCK_M, BLOCK_N, D, DV, CAUSAL, VARLEN, NEGATIVE_SCALE, True, PRECISION,
            )  # fmt: skip

    seen = row_sum > 0.0
    inverse = tl.where(seen, 1.0 / tl.where(seen, row_sum, 1.0), 0.0)
    lse = tl.where(seen, (row_max + tl.math.log2(tl.where(seen, row_sum, 1.0))) * LN2, float("-inf"))
    tl.store(lse_base + rows, lse, rows < q_len)
    ptrs = out_base + rows.to(tl.int64)[:, None] * (heads * HEAD_DIM_V) + dv[None, :]
    out = (acc * inverse[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(ptrs, out, (rows < q_len)[:, None] & (dv < HEAD_DIM_V)[None, :])
