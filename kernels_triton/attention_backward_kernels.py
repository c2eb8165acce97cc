"""The two backward kernels: dQ over key tiles, dK and dV over query tiles (Dao 2023, algorithm 2, split in two).

Each gradient tile has one writer and a fixed order of summation, so results are equal bit for bit in every run; the
price is that scores and dP are computed twice.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from kernels_triton.attention_tiles import INTERPRETED, LOG2E, SIZES, load_tile, sequence, tile_and_pair


@triton.jit
def _fill_rows_with_zero(base, first, rows_end, step, row_stride, ROWS: tl.constexpr, D: tl.constexpr, HEAD_DIM):
    d = tl.arange(0, D)
    for start in range(first, rows_end, step):
        rows = start + tl.arange(0, ROWS)
        zero = tl.zeros([ROWS, D], base.dtype.element_ty)
        mask = (rows < rows_end)[:, None] & (d < HEAD_DIM)[None, :]
        tl.store(base + rows.to(tl.int64)[:, None] * row_stride + d[None, :], zero, mask)


@triton.jit
def _dq_step(
    dq, q, do, shift, delta, k_desc, v_desc, desc_batch, kv_head, k_start, n, rows, k_len, offset, scale_log2,
    BLOCK_N: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, CAUSAL: tl.constexpr, VARLEN: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    k = load_tile(k_desc, desc_batch, kv_head, k_start + n, BLOCK_N, D)
    v = load_tile(v_desc, desc_batch, kv_head, k_start + n, BLOCK_N, DV)
    if MASKED and VARLEN:
        # A packed tail tile reaches into the next sequence: 0 * NaN there would be NaN here.
        inside = n + tl.arange(0, BLOCK_N) < k_len
        k = tl.where(inside[:, None], k, tl.zeros_like(k))
        v = tl.where(inside[:, None], v, tl.zeros_like(v))
    scores = tl.dot(q, k.T, input_precision=PRECISION)
    dp = tl.dot(do, v.T, input_precision=PRECISION)
    p = tl.math.exp2(scores * scale_log2 - shift[:, None])
    ds = p * (dp - delta[:, None])
    if MASKED:
        columns = n + tl.arange(0, BLOCK_N)
        live = (columns < k_len)[None, :]
        if CAUSAL:
            live = live & (columns[None, :] <= rows[:, None] + offset)
        ds = tl.where(live, ds, 0.0)
    if not INTERPRETED:
        ds = ds.to(k.dtype)
    return tl.dot(ds, k, dq, input_precision=PRECISION)


@triton.jit(do_not_specialize=SIZES)
def attention_dq_kernel(
    q_desc, k_desc, v_desc, do_desc, out_desc, lse_ptr, dlse_ptr, shift_ptr, delta_ptr, dq_ptr, cu_q_ptr, cu_k_ptr,
    batch, heads, seqlen_q, seqlen_k, tokens_q, tiles, group, scale_log2, scale,
    dlse_stride_b, dlse_stride_h, dlse_stride_s,
    GROUP_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    HEAD_DIM: tl.constexpr, CAUSAL: tl.constexpr, VARLEN: tl.constexpr, ALL_LIVE: tl.constexpr,
    HAS_DLSE: tl.constexpr, COMPUTE_DQ: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One tile of BLOCK_M queries of one head: dq (contiguous) and what the dK/dV kernel needs of a row.

    That is `delta = rowsum(dO * O) - dlse` and `shift = lse * log2(e)`, where a row that sees no key gets `+inf`, which
    makes each of its probabilities exp2(-inf) = 0. With COMPUTE_DQ off only these two are written.
    """
    sequences = batch + 1 if VARLEN else batch
    tile, pair = tile_and_pair(tl.program_id(0), tiles, sequences * heads, group, CAUSAL)
    b = pair // heads
    head = pair % heads
    q_start, q_len, q_rows = sequence(cu_q_ptr, b, batch, seqlen_q, tokens_q, VARLEN)
    if tile * BLOCK_M >= q_rows:
        return
    if VARLEN:
        desc_batch = 0
        row_base = head.to(tl.int64) * tokens_q + q_start
        dlse_base = head.to(tl.int64) * dlse_stride_h + q_start.to(tl.int64) * dlse_stride_s
        dq_row = q_start.to(tl.int64) * heads + head
        if b == batch:
            if COMPUTE_DQ:
                _fill_rows_with_zero(
                    dq_ptr + dq_row * HEAD_DIM,
                    tile * BLOCK_M,
                    q_rows,
                    tiles * BLOCK_M,
                    heads * HEAD_DIM,
                    BLOCK_M,
                    D,
                    HEAD_DIM,
                )
            return
        k_start, k_len, _ = sequence(cu_k_ptr, b, batch, seqlen_k, 0, VARLEN)
    else:
        desc_batch = b
        k_start = 0
        k_len = seqlen_k
        row_base = (b.to(tl.int64) * heads + head) * seqlen_q
        dlse_base = b.to(tl.int64) * dlse_stride_b + head.to(tl.int64) * dlse_stride_h
        dq_row = b.to(tl.int64) * seqlen_q * heads + head
    kv_head = head // GROUP_SIZE
    offset = k_len - q_len

    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    do = load_tile(do_desc, desc_batch, head, q_start + tile * BLOCK_M, BLOCK_M, DV)
    out = load_tile(out_desc, desc_batch, head, q_start + tile * BLOCK_M, BLOCK_M, DV)
    delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1)
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + dlse_base + rows.to(tl.int64) * dlse_stride_s, rows < q_len, other=0.0)
    shift = tl.load(lse_ptr + row_base + rows, rows < q_len, other=float("-inf")) * LOG2E
    shift = tl.where(shift == float("-inf"), float("inf"), shift)
    # A row that sees no key has no gradient, whatever its dO holds.
    delta = tl.where(shift == float("inf"), 0.0, delta)
    tl.store(delta_ptr + row_base + rows, delta, rows < q_len)
    tl.store(shift_ptr + row_base + rows, shift, rows < q_len)

    if COMPUTE_DQ:
        q = load_tile(q_desc, desc_batch, head, q_start + tile * BLOCK_M, BLOCK_M, D)
        dq = tl.zeros([BLOCK_M, D], tl.float32)
        end = k_len
        full = k_len // BLOCK_N * BLOCK_N
        if CAUSAL:
            end = tl.maximum(0, tl.minimum(end, (tile + 1) * BLOCK_M + offset))
            full = tl.maximum(0, tl.minimum(full, (tile * BLOCK_M + offset + 1) // BLOCK_N * BLOCK_N))
        for n in tl.range(0, full, BLOCK_N, num_stages=STAGES):
            dq = _dq_step(
                dq, q, do, shift, delta, k_desc, v_desc, desc_batch, kv_head, k_start, n, rows, k_len, offset,
                scale_log2, BLOCK_N, D, DV, CAUSAL, VARLEN, False, PRECISION,
            )  # fmt: skip
        if not ALL_LIVE:
            for n in tl.range(full, end, BLOCK_N, num_stages=STAGES):
                dq = _dq_step(
                    dq, q, do, shift, delta, k_desc, v_desc, desc_batch, kv_head, k_start, n, rows, k_len, offset,
                    scale_log2, BLOCK_N, D, DV, CAUSAL, VARLEN, True, PRECISION,
                )  # fmt: skip
        d = tl.arange(0, D)
        ptrs = dq_ptr + (dq_row + rows.to(tl.int64) * heads)[:, None] * HEAD_DIM + d[None, :]
        tl.store(ptrs, (dq * scale).to(dq_ptr.dtype.element_ty), (rows < q_len)[:, None] & (d < HEAD_DIM)[None, :])


@triton.jit
def _add_product(total, low, a, b, PRECISION: tl.constexpr):
    """total + a b. In fp32 `low` carries what each addition rounds away (Kahan's sum).

    A key that 80,000 queries see adds up as many products: one chain of fp32 additions drifts by ten times the error of
    a blocked matmul. 16-bit results round far above that, so there the product is added as it comes.
    """
    if b.dtype == tl.float32:
        part = tl.dot(a, b, input_precision=PRECISION) - low
        added = total + part
        return added, (added - total) - part
    else:
        return tl.dot(a, b, total, input_precision=PRECISION), low


@triton.jit
def _dkv_step(
    dk, dv, dk_low, dv_low, k, v, q_desc, do_desc, shift_base, delta_base, desc_batch, head, q_start, m, columns,
    q_len, offset, scale_log2, BLOCK_M: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, CAUSAL: tl.constexpr,
    VARLEN: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One query tile. Scores are transposed, [keys, queries], so that P and dS are register operands as they are."""
    rows = m + tl.arange(0, BLOCK_M)
    q = load_tile(q_desc, desc_batch, head, q_start + m, BLOCK_M, D)
    do = load_tile(do_desc, desc_batch, head, q_start + m, BLOCK_M, DV)
    if MASKED and VARLEN:
        inside = rows < q_len
        q = tl.where(inside[:, None], q, tl.zeros_like(q))
        do = tl.where(inside[:, None], do, tl.zeros_like(do))
    scores = tl.dot(k, q.T, input_precision=PRECISION)
    shift = tl.load(shift_base + rows, rows < q_len, other=float("inf"))
    p = tl.math.exp2(scores * scale_log2 - shift[None, :])
    if MASKED and CAUSAL:
        p = tl.where(columns[:, None] <= rows[None, :] + offset, p, 0.0)
    if INTERPRETED:
        dv, dv_low = _add_product(dv, dv_low, p, do, PRECISION)
    else:
        dv, dv_low = _add_product(dv, dv_low, p.to(do.dtype), do, PRECISION)
    dp = tl.dot(v, do.T, input_precision=PRECISION)
    delta = tl.load(delta_base + rows, rows < q_len, other=0.0)
    ds = p * (dp - delta[None, :])
    if not INTERPRETED:
        ds = ds.to(q.dtype)
    dk, dk_low = _add_product(dk, dk_low, ds, q, PRECISION)
    return dk, dv, dk_low, dv_low


@triton.jit(do_not_specialize=SIZES)
def attention_dkv_kernel(
    q_desc, k_desc, v_desc, do_desc, shift_ptr, delta_ptr, dk_ptr, dv_ptr, cu_q_ptr, cu_k_ptr,
    batch, kv_heads, seqlen_q, seqlen_k, tokens_q, tokens_k, tiles, group, scale_log2, scale,
    GROUP_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, CAUSAL: tl.constexpr, VARLEN: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One tile of BLOCK_N keys of one key head, summed over the query heads of its group: dk and dv (contiguous).

    Keys beyond the sequence need no mask: they spoil only their own rows of dk and dv, which are not stored. Queries
    beyond it have shift `+inf`, so probability 0.
    """
    sequences = batch + 1 if VARLEN else batch
    tile, pair = tile_and_pair(tl.program_id(0), tiles, sequences * kv_heads, group, False)
    b = pair // kv_heads
    kv_head = pair % kv_heads
    k_start, k_len, k_rows = sequence(cu_k_ptr, b, batch, seqlen_k, tokens_k, VARLEN)
    if tile * BLOCK_N >= k_rows:
        return
    heads = kv_heads * GROUP_SIZE
    if VARLEN:
        desc_batch = 0
        first_row = k_start.to(tl.int64) * kv_heads + kv_head
        if b == batch:
            first = tile * BLOCK_N
            step = tiles * BLOCK_N
            dk_base = dk_ptr + first_row * HEAD_DIM
            dv_base = dv_ptr + first_row * HEAD_DIM_V
            _fill_rows_with_zero(dk_base, first, k_rows, step, kv_heads * HEAD_DIM, BLOCK_N, D, HEAD_DIM)
            _fill_rows_with_zero(dv_base, first, k_rows, step, kv_heads * HEAD_DIM_V, BLOCK_N, DV, HEAD_DIM_V)
            return
        q_start, q_len, _ = sequence(cu_q_ptr, b, batch, seqlen_q, 0, VARLEN)
    else:
        desc_batch = b
        q_start = 0
        q_len = seqlen_q
        first_row = b.to(tl.int64) * seqlen_k * kv_heads + kv_head
    offset = k_len - q_len

    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k = load_tile(k_desc, desc_batch, kv_head, k_start + tile * BLOCK_N, BLOCK_N, D)
    v = load_tile(v_desc, desc_batch, kv_head, k_start + tile * BLOCK_N, BLOCK_N, DV)
    dk = tl.zeros([BLOCK_N, D], tl.float32)
    dv = tl.zeros([BLOCK_N, DV], tl.float32)
    dk_low = tl.zeros([BLOCK_N, D] if k.dtype == tl.float32 else [1], tl.float32)
    dv_low = tl.zeros([BLOCK_N, DV] if k.dtype == tl.float32 else [1], tl.float32)

    # Query tiles [begin, whole) cross the diagonal, [whole, full) need no mask, and a packed tail [full, …) needs one.
    begin = 0
    whole = 0
    if CAUSAL:
        begin = tl.maximum(0, tile * BLOCK_N - offset) // BLOCK_M * BLOCK_M
        whole = tl.cdiv(tl.maximum(0, (tile + 1) * BLOCK_N - 1 - offset), BLOCK_M) * BLOCK_M
        whole = tl.maximum(begin, tl.minimum(whole, tl.cdiv(q_len, BLOCK_M) * BLOCK_M))
    full = tl.cdiv(q_len, BLOCK_M) * BLOCK_M
    if VARLEN:
        full = q_len // BLOCK_M * BLOCK_M
    for member in range(GROUP_SIZE):
        head = kv_head * GROUP_SIZE + member
        row_base = head.to(tl.int64) * tokens_q + q_start if VARLEN else (b.to(tl.int64) * heads + head) * seqlen_q
        if CAUSAL or VARLEN:
            diagonal = (tl.minimum(whole, tl.maximum(full, begin)) - begin) // BLOCK_M
            masked = diagonal
            if VARLEN:
                masked += ((full < q_len) & (begin < q_len)).to(tl.int32)
            for i in tl.range(0, masked, num_stages=STAGES):
                m = tl.where(i < diagonal, begin + i * BLOCK_M, full)
                dk, dv, dk_low, dv_low = _dkv_step(
                    dk, dv, dk_low, dv_low, k, v, q_desc, do_desc, shift_ptr + row_base, delta_ptr + row_base,
                    desc_batch, head, q_start, m, columns, q_len, offset, scale_log2, BLOCK_M, D, DV, CAUSAL, VARLEN,
                    True, PRECISION,
                )  # fmt: skip
        for m in tl.range(whole, full, BLOCK_M, num_stages=STAGES):
            dk, dv, dk_low, dv_low = _dkv_step(
                dk, dv, dk_low, dv_low, k, v, q_desc, do_desc, shift_ptr + row_base, delta_ptr + row_base,
                desc_batch, head, q_start, m, columns, q_len, offset, scale_log2, BLOCK_M, D, DV, CAUSAL, VARLEN, False,
                PRECISION,
            )  # fmt: skip

    d = tl.arange(0, D)
    e = tl.arange(0, DV)
    stored = (columns < k_len)[:, None]
    rows64 = first_row + columns.to(tl.int64) * kv_heads
    dk_ptrs = dk_ptr + rows64[:, None] * HEAD_DIM + d[None, :]
    dv_ptrs = dv_ptr + rows64[:, None] * HEAD_DIM_V + e[None, :]
    tl.store(dk_ptrs, (dk * scale).to(dk_ptr.dtype.element_ty), stored & (d < HEAD_DIM)[None, :])
    tl.store(dv_ptrs, dv.to(dv_ptr.dtype.element_ty), stored & (e < HEAD_DIM_V)[None, :])
