"""Phase 1 forward for few blocks and queries: one row a turn, plain fp32 arithmetic, nothing staged in shared memory.

A thread keeps the same columns of every source, so that sums over blocks stay in registers; only the logits' partial
sums cross threads, all at once. They pass through the `logits` and `rstd` buffers, from which every thread reads its
row's weights back.
"""

# ruff: noqa: RUF005 - a Triton kernel cannot unpack a tuple

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from kernels_triton.attnres_common import rounded


@triton.jit
def _fold(x, ELEMS: tl.constexpr):
    """`[C]` to `[C / ELEMS]`: sums of neighbours, which one thread holds."""
    return tl.sum(tl.reshape(x, [x.shape[0] // ELEMS, ELEMS]), axis=1)


@triton.jit
def _joined(parts, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """A power of two of equal vectors as one tensor with log2(COUNT) further dimensions, the topmost split last."""
    if COUNT == 1:
        return parts[FIRST]
    else:
        low = _joined(parts, FIRST, COUNT // 2)
        high = _joined(parts, FIRST + COUNT // 2, COUNT // 2)
        return tl.join(low, high)


@triton.jit
def _totals(parts, FIRST: tl.constexpr, COUNT: tl.constexpr, BITS: tl.constexpr):
    """Sums over threads of COUNT = 2^BITS vectors, and which vector each belongs to."""
    lanes: tl.constexpr = parts[FIRST].shape[0]
    total = tl.sum(tl.reshape(_joined(parts, FIRST, COUNT), [lanes, COUNT]), axis=0)
    at = tl.arange(0, COUNT)
    which = tl.zeros([COUNT], tl.int32)
    for bit in tl.static_range(BITS):
        which += ((at >> bit) & 1) << (BITS - 1 - bit)
    return total, which + FIRST


@triton.jit
def forward_stream(
    v_ptr,
    w_ptr,
    out_ptr,
    lse_ptr,
    logits_ptr,
    rstd_ptr,
    v_block_stride,
    v_row_stride,
    w_stride,
    rows,
    hidden,
    eps,
    programs,
    BLOCKS: tl.constexpr,
    QUERIES: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    ELEMS: tl.constexpr,
    STAGES: tl.constexpr,
):
    column = tl.arange(0, CHUNK)
    for row in range(tl.program_id(0), rows, programs):
        row64 = tl.cast(row, tl.int64)
        v_at = v_ptr + row64 * v_row_stride
        logit_at = logits_ptr + row64 * (QUERIES * BLOCKS)
        for group in tl.static_range(0, QUERIES, GROUP):
            zero = tl.zeros([CHUNK // ELEMS], tl.float32)
            part = (zero,)
            for _ in tl.static_range(BLOCKS * GROUP + BLOCKS - 1):
                part = part + (zero,)
            for chunk in tl.range(0, hidden, CHUNK, num_stages=STAGES):
                d = chunk + column
                live = d < hidden
                v = (tl.load(v_at + d, mask=live, other=0.0).to(tl.float32),)
                for n in tl.static_range(1, BLOCKS):
                    v = v + (
                        tl.load(v_at + n * tl.cast(v_block_stride, tl.int64) + d, mask=live, other=0.0).to(tl.float32),
                    )
                new = (part[0] + _fold(v[0] * v[0], ELEMS),)
                for n in tl.static_range(1, BLOCKS):
                    new = new + (part[n] + _fold(v[n] * v[n], ELEMS),)
                for s in tl.static_range(GROUP):
                    w = tl.load(w_ptr + (group + s) * w_stride + d, mask=live, other=0.0, eviction_policy="evict_last")
                    w = w.to(tl.float32)
                    for n in tl.static_range(BLOCKS):
                        new = new + (part[BLOCKS + s * BLOCKS + n] + _fold(v[n] * w, ELEMS),)
                part = new
            if group == 0:
                for bit in tl.static_range(7):
                    if (BLOCKS >> bit) & 1:
                        total, which = _totals(part, BLOCKS & ((1 << bit) - 1), 1 << bit, bit)
                        tl.store(rstd_ptr + row64 * BLOCKS + which, tl.rsqrt(total / hidden + eps))
            for bit in tl.static_range(8):
                if ((BLOCKS * GROUP) >> bit) & 1:
                    total, which = _totals(part, BLOCKS + ((BLOCKS * GROUP) & ((1 << bit) - 1)), 1 << bit, bit)
                    tl.store(logit_at + group * BLOCKS + which - BLOCKS, total)
            tl.debug_barrier()
            r = (tl.load(rstd_ptr + row64 * BLOCKS),)
            for n in tl.static_range(1, BLOCKS):
                r = r + (tl.load(rstd_ptr + row64 * BLOCKS + n),)
            p = ()
            for s in tl.static_range(GROUP):
                score = ()
                for n in tl.static_range(BLOCKS):
                    score = score + (tl.load(logit_at + (group + s) * BLOCKS + n) * r[n],)
                top = score[0]
                for n in tl.static_range(1, BLOCKS):
                    top = tl.maximum(top, score[n])
                weight = ()
                for n in tl.static_range(BLOCKS):
                    weight = weight + (tl.exp(score[n] - top),)
                total = weight[0]
                for n in tl.static_range(1, BLOCKS):
                    total += weight[n]
                tl.store(lse_ptr + (group + s) * tl.cast(rows, tl.int64) + row, top + tl.log(total))
                for n in tl.static_range(BLOCKS):
                    p = p + (weight[n] / total,)
            tl.debug_barrier()
            for s in tl.static_range(GROUP):
                for n in tl.static_range(BLOCKS):
                    score_at = logit_at + (group + s) * BLOCKS + n
                    tl.store(score_at, tl.load(score_at) * r[n])
            last = (tl.cdiv(hidden, CHUNK) - 1) * CHUNK
            for back in tl.range(0, hidden, CHUNK, num_stages=STAGES):
                d = last - back + column
                live = d < hidden
                v = (tl.load(v_at + d, mask=live, other=0.0).to(tl.float32),)
                for n in tl.static_range(1, BLOCKS):
                    v = v + (
                        tl.load(v_at + n * tl.cast(v_block_stride, tl.int64) + d, mask=live, other=0.0).to(tl.float32),
                    )
                for s in tl.static_range(GROUP):
                    o = p[s * BLOCKS] * v[0]
                    for n in tl.static_range(1, BLOCKS):
                        o += p[s * BLOCKS + n] * v[n]
                    at = out_ptr + ((group + s) * tl.cast(rows, tl.int64) + row) * hidden + d
                    tl.store(at, rounded(o, out_ptr), mask=live)
