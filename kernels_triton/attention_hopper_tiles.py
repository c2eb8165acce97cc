# mypy: disallow-untyped-defs=False
"""What the Gluon kernels share: which tile a program owns, where its sequence lies, and rows to be zeroed."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def tile_and_pair(pid, tiles, pairs, group, HEAVY_LAST: gl.constexpr):
    """As `attention_tiles.tile_and_pair`."""
    per_group = group * tiles
    first = (pid // per_group) * group
    size = gl.minimum(group, pairs - first)
    rest = pid % per_group
    tile = rest // size
    if HEAVY_LAST:
        tile = tiles - 1 - tile
    return tile, first + rest % size


@gluon.jit
def sequence(cu_ptr, batch_index, batch, dense_length, tokens, VARLEN: gl.constexpr):
    """As `attention_tiles.sequence`."""
    start = 0
    length = dense_length
    rows = dense_length
    if VARLEN:
        start = gl.load(cu_ptr + batch_index)
        end = gl.load(cu_ptr + gl.minimum(batch_index + 1, batch))
        length = end - start
        rows = gl.where(batch_index == batch, tokens - start, length)
    return start, length, rows


@gluon.jit
def fill_rows_with_zero(base, first, rows_end, step, row_stride, D: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Zeroes 128 rows from `first`, every `step` rows, up to `rows_end`; a row has HEAD_DIM elements."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // D, D // 8], [gl.num_warps(), 1], [1, 0])
    columns = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    for start in range(first, rows_end, step):
        rows = start + gl.arange(0, 128, layout=gl.SliceLayout(1, layout))
        ptrs = base + gl.expand_dims(rows.to(gl.int64) * row_stride, 1) + gl.expand_dims(columns, 0)
        mask = gl.expand_dims(rows < rows_end, 1) & gl.expand_dims(columns < HEAD_DIM, 0)
        gl.store(ptrs, gl.zeros([128, D], base.dtype.element_ty, layout), mask=mask)


@gluon.jit
def store_rows(base, value, first, rows_end, row_stride, D: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Stores a `[64, D]` tile in whole lines; rows from `rows_end` on are left alone."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // D, D // 8], [gl.num_warps(), 1], [1, 0])
    value = gl.convert_layout(value.to(base.dtype.element_ty), layout)
    rows = first + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    ptrs = base + gl.expand_dims(rows.to(gl.int64) * row_stride, 1) + gl.expand_dims(columns, 0)
    gl.store(ptrs, value, mask=gl.expand_dims(rows < rows_end, 1) & gl.expand_dims(columns < HEAD_DIM, 0))


@gluon.jit
def zero_rows_from(smem, live, ROWS: gl.constexpr, D: gl.constexpr):
    """Zeroes rows from `live` on: a packed tail tile reaches into the next sequence, and 0 * NaN is NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // D, D // 8], [gl.num_warps(), 1], [1, 0])
    value = smem.load(layout)
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    smem.store(gl.where(gl.expand_dims(rows < live, 1), value, gl.zeros_like(value)))
    fence_async_shared()
