"""One backward call of the native kernels: its buffers, and what its three launches take.

`prepare` computes delta = rowsum(dO * out) - dlse and clears the sums of dQ, the main kernel owns tiles of keys and
adds to them, `finish` scales and rounds them. All three count query tiles over the padded rows of one head.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from kernels_native.geometry import LOG2_E, dtype_name, flat_tiles, positive_scale, row_strides, section
from kernels_native.tensor_map import row_map, tma_ready

if TYPE_CHECKING:
    import torch

_MAIN = struct.Struct("<512s 8Q 7q 9i 2f 28x")
_ROWS = struct.Struct("<10Q 12q 5i f")
_ROWS_TURNS = struct.Struct("<11Q 12q 5i f")


class BackwardCall:
    """Validated CUDA tensors of a call, its gradients, and an fp32 workspace `[heads, padded rows, dim + 2]`.

    Args:
        dlse: None stands for zeros.
        dim: columns of the sums of dQ, the head dim in shared memory.
        block_m: queries of a tile.
        turns: counters a query tile by which key tiles take turns (deterministic mode); 0 for none.
        cleared: whether the counters are cleared here; otherwise `prepare` does it.
    """

    def __init__(
        self,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        cu_seqlens_q: torch.Tensor | None,
        cu_seqlens_k: torch.Tensor | None,
        softmax_scale: float,
        *,
        dim: int,
        block_m: int,
        turns: int,
        cleared: bool = False,
    ) -> None:
        import torch

        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        self.gradients = dq, dk, dv
        self._dtype = dtype_name(q)
        self.varlen = cu_seqlens_q is not None
        self.sequences = cu_seqlens_q.shape[0] - 1 if cu_seqlens_q is not None else q.shape[0]
        self.head_dim, self.value_dim, self.dim = q.shape[-1], v.shape[-1], dim
        self._heads, self._kv_heads = q.shape[-2], k.shape[-2]
        self.rows, self.keys = q.shape[-3], k.shape[-3]
        self._block_m = block_m
        self._softmax_scale = softmax_scale
        q, self._positive_scale = positive_scale(q, softmax_scale)
        self._q, self._k, self._v, self._dout, self._out = (tma_ready(x) for x in (q, k, v, dout, out))
        self._lse = lse.contiguous()
        self._dlse = None if dlse is None else dlse.to(torch.float32).contiguous()

        # The row kernels count one head's tiles over all sequences.
        outer = 1 if self.varlen else self.sequences
        self._row_tiles = flat_tiles(self.rows, block_m, self.sequences, self.varlen) * outer
        self._padded = self._row_tiles * block_m
        rows = self._heads * self._padded
        self._sums = torch.empty(rows * (dim + 2), dtype=torch.float32, device=q.device)
        self._turns = None
        if turns:
            allocate = torch.zeros if cleared else torch.empty
            self._turns = allocate(self._heads * self._row_tiles * turns, dtype=torch.int32, device=q.device)
        self._cleared = cleared
        lse2 = self._sums.data_ptr()
        self._workspace = lse2, lse2 + 4 * rows, lse2 + 8 * rows  # lse in log2 units, delta, the sums of dQ
        self._offsets = (
            (cu_seqlens_q.data_ptr(), cu_seqlens_k.data_ptr())
            if cu_seqlens_q is not None and cu_seqlens_k is not None
            else (0, 0)
        )

    @property
    def empty(self) -> bool:
        """Whether there is no sequence at all, and no gradient to write."""
        return not self.sequences and not self.varlen

    @property
    def all_heads(self) -> int:
        """Key heads that the main kernel's grid counts: of every dense sequence, or of the one packed batch."""
        return self._kv_heads * (1 if self.varlen else self.sequences)

    @property
    def row_grid(self) -> tuple[int, int, int]:
        """Of `prepare` and `finish`."""
        return self._row_tiles * self._heads, 1, 1

    def key_tiles(self, keys: int) -> int:
        """Tiles of so many keys of one of `all_heads`."""
        return flat_tiles(self.keys, keys, self.sequences, self.varlen)

    def row_params(self, columns: int) -> bytes:
        """Parameters of `prepare` (`columns`: the value head dim) and of `finish` (the head dim)."""
        out, dout, dq = self._out, self._dout, self.gradients[0]
        inputs = out.data_ptr(), dout.data_ptr(), self._lse.data_ptr(), _address(self._dlse), *self._workspace
        outputs = dq.data_ptr(), *self._offsets
        strides = *row_strides(out), *row_strides(dout), *row_strides(dq)
        sizes = self.rows, self._heads * self.rows, self._padded, self.sequences, self.rows, self.keys, self._row_tiles
        rest = *outputs, *strides, *sizes, columns, self._softmax_scale
        return _ROWS.pack(*inputs, *rest) if self._cleared else _ROWS_TURNS.pack(*inputs, _address(self._turns), *rest)

    def main_params(self, block_n: int, key_tiles: int, rows: int, l2_bytes: int) -> bytes:
        """Parameters of the main kernel.

        Args:
            block_n: keys that a thread block loads at a time.
            key_tiles: of one of `all_heads`.
            rows: queries of one head that the blocks which run at one time go through.
            l2_bytes: what a section of heads may take of L2 with their queries, gradients and sums.
        """
        _, dk, dv = self.gradients
        boxes = (self._q, self._block_m), (self._k, block_n), (self._v, block_n), (self._dout, self._block_m)
        group = self._heads // self._kv_heads
        bytes_per_row = group * (2 * (self.head_dim + self.value_dim) + 4 * self.dim)
        return _MAIN.pack(
            b"".join(row_map(x, self._dtype, box_rows) for x, box_rows in boxes),
            dk.data_ptr(),
            dv.data_ptr(),
            *self._workspace,
            _address(self._turns),
            *self._offsets,
            *row_strides(dk),
            *row_strides(dv),
            self._padded,
            self.sequences,
            self.rows,
            self.keys,
            self._kv_heads,
            group,
            key_tiles,
            section(self.all_heads, rows * bytes_per_row, l2_bytes),
            self.head_dim,
            self.value_dim,
            abs(self._softmax_scale),
            self._positive_scale * LOG2_E,
        )


def _address(x: torch.Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
