import triton, triton.language as tl
from kernels_triton.attnres_common import rounded
from kernels_triton.attnres_attend_forward import split_dot

@triton.jit
def _row_outputs(row, v_ptr, out_ptr, lse_ptr, logits_ptr, v_block_stride, v_row_stride, rows, hidden, blocks, queries, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr):
    n = tl.arange(0, BLOCK_N)
    s = tl.arange(0, BLOCK_S)
    has_n = (n < blocks) & (row < rows)
    has_s = (s < queries) & (row < rows)
    at = (row * queries + s)[:, None] * blocks + n[None, :]
    score = tl.load(logits_ptr + at, mask=has_s[:, None] & has_n[None, :], other=float("-inf"))
    score = tl.where(has_s[:, None], score, 0.0)
    top = tl.max(score, axis=1)
    weight = tl.exp(score - top[:, None])
    total = tl.sum(weight, axis=1)
    tl.store(lse_ptr + s.to(tl.int64) * rows + row, top + tl.log(total), mask=has_s)
    weight = weight / total[:, None]
    o_at = out_ptr + (s.to(tl.int64) * rows + row) * hidden
    v_at = v_ptr + n.to(tl.int64) * v_block_stride + row * v_row_stride
    last = (tl.cdiv(hidden, CHUNK) - 1) * CHUNK
    for back in tl.range(0, hidden, CHUNK, num_stages=STAGES):
        d = last - back + tl.arange(0, CHUNK)
        live = d < hidden
        v = tl.load(v_at[:, None] + d[None, :], mask=has_n[:, None] & live[None, :], other=0.0)
        o = split_dot(weight, v, tl.zeros([BLOCK_S, CHUNK], tl.float32), True, "ieee")
        tl.store(o_at[:, None] + d[None, :], rounded(o, out_ptr), mask=has_s[:, None] & live[None, :])


@triton.jit
def forward_mma(
    v_ptr, w_ptr, out_ptr, lse_ptr, logits_ptr, rstd_ptr,
    v_block_stride, v_row_stride, w_stride, rows, hidden, blocks, queries, eps, programs,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, STEPS: tl.constexpr, CHUNK: tl.constexpr,
    STAGES_A: tl.constexpr, STAGES_B: tl.constexpr,
):
    SOURCES: tl.constexpr = ROWS * BLOCK_N
    PAIRED: tl.constexpr = 16 if BLOCK_N < 16 else BLOCK_N
    OUT_S: tl.constexpr = 16 if BLOCK_S < 16 else BLOCK_S
    source = tl.arange(0, SOURCES)
    n = source % BLOCK_N
    s = tl.arange(0, BLOCK_S)
    inner = tl.arange(0, STEPS)[None, :, None] * 16 + tl.arange(0, 16)[None, None, :]
    same = (source[:, None] == source[None, :])[None, :, :]
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), programs):
        first = tl.cast(tile, tl.int64) * ROWS
        v_row = first + source // BLOCK_N
        v_ok = (v_row < rows) & (n < blocks)
        v_at = v_ptr + n.to(tl.int64) * v_block_stride + v_row * v_row_stride
        product = tl.zeros([STEPS, SOURCES, BLOCK_S], tl.float32)
        square = tl.zeros([STEPS, SOURCES, SOURCES], tl.float32)
        for chunk in tl.range(0, hidden, STEPS * 16, num_stages=STAGES_A):
            d = chunk + inner
            v = tl.load(v_at[:, None, None] + d, mask=v_ok[:, None, None] & (d < hidden), other=0.0)
            w = tl.load(w_ptr + s[:, None, None] * w_stride + d, mask=(s < queries)[:, None, None] & (d < hidden), other=0.0)
            left = tl.permute(v, (1, 0, 2))
            product = tl.dot(left, tl.permute(w, (1, 2, 0)), product)
            square = tl.dot(left, tl.permute(v, (1, 2, 0)), square)
        mean = tl.sum(tl.sum(tl.where(same, square, 0.0), axis=0), axis=1) / hidden
        rstd = tl.rsqrt(mean + eps)
        score = tl.sum(product, axis=0) * rstd[:, None]
        at = (v_row[:, None] * queries + s[None, :]) * blocks + n[:, None]
        tl.store(logits_ptr + at, score, mask=v_ok[:, None] & (s < queries)[None, :])
        tl.store(rstd_ptr + v_row * blocks + n, rstd, mask=v_ok)
        tl.debug_barrier()
        for t in tl.static_range(ROWS):
            _row_outputs(tl.cast(tile, tl.int64) * ROWS + t, v_ptr, out_ptr, lse_ptr, logits_ptr, v_block_stride, v_row_stride, rows, hidden, blocks, queries, PAIRED, OUT_S, CHUNK, STAGES_B)
