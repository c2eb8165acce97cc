"""The arguments of one attention call: checked once, in plain torch, before any kernel sees them.

Importing this module needs torch but neither triton nor a GPU, so that every backend can share it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256
INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class AttentionArgs:
    """A checked attention call.

    Dense: q `[B, Sq, H, D]`, k `[B, Sk, Hkv, D]`, v `[B, Sk, Hkv, Dv]`; the cu_seqlens are None and the max_seqlens are
    Sq and Sk. Packed (`varlen`): q `[Tq, H, D]`, k `[Tk, Hkv, D]`, v `[Tk, Hkv, Dv]`, cu_seqlens int32 `[N + 1]`.
    `max_seqlen_*` is None only while `torch.compile` traces a packed call that leaves it out; see `resolved`.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    causal: bool
    softmax_scale: float
    cu_seqlens_q: torch.Tensor | None
    cu_seqlens_k: torch.Tensor | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None

    @property
    def varlen(self) -> bool:
        return self.cu_seqlens_q is not None

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return self.q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1

    @property
    def heads(self) -> int:
        return self.q.shape[-2]

    @property
    def kv_heads(self) -> int:
        return self.k.shape[-2]

    @property
    def head_dim(self) -> int:
        return self.q.shape[-1]

    @property
    def value_head_dim(self) -> int:
        return self.v.shape[-1]


def longest(cu_seqlens: torch.Tensor) -> int:
    """Length of the longest sequence. Waits for the device.

    Raises:
        RuntimeError: a CUDA graph is being captured, where nothing may wait.
    """
    if cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "max_seqlen_q and max_seqlen_k are missing, and cannot be read from cu_seqlens while a CUDA graph is being "
            "captured: pass both as integers"
        )
    return int(cu_seqlens.diff().max()) if cu_seqlens.shape[0] > 1 else 0


def call_key(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    softmax_scale: float | None,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
) -> tuple[Any, ...] | None:
    """All that the checks of `attention_arguments` look at (without `validate`): equal keys pass or fail alike.

    None where that cannot be told quickly.
    """
    if not (isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)):
        return None
    if softmax_scale is not None and type(softmax_scale) is not float:
        return None
    packed: tuple[Any, ...] = ()
    if not (cu_seqlens_q is cu_seqlens_k is max_seqlen_q is max_seqlen_k is None):
        for most in (max_seqlen_q, max_seqlen_k):
            if most is not None and (type(most) is not int or most < 0):
                return None
        for cu in (cu_seqlens_q, cu_seqlens_k):
            if not isinstance(cu, torch.Tensor):
                return None
            packed += (cu.shape, cu.dtype, cu.device, cu.stride())
    tensors = q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device
    return tensors, type(causal), softmax_scale, packed


_passed: dict[tuple[Any, ...], float] = {}
_MOST = 4096


def attention_arguments(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    validate: bool = False,
) -> AttentionArgs:
    """Checks a call and fills in its defaults (scale `D ** -0.5`, max_seqlen from cu_seqlens).

    Shapes, dtypes, devices and head counts are checked always; the values of cu_seqlens, which take a synchronisation
    to read, under `validate`. Rows beyond `cu_seqlens[-1]` are legal.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: a shape, device, head count, head dim, scale or (under `validate`) a cu_seqlens value is wrong.
        RuntimeError: max_seqlen is left out while a CUDA graph is being captured.
    """
    key = None
    if not validate and not torch.compiler.is_compiling():
        key = call_key(q, k, v, causal, softmax_scale, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    known = None if key is None else _passed.get(key)
    if known is not None:
        if cu_seqlens_q is None:
            max_seqlen_q, max_seqlen_k = q.shape[1], k.shape[1]
        return resolved(AttentionArgs(q, k, v, causal, known, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k))
    args = _checked(
        q, k, v, causal, softmax_scale, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, validate=validate
    )
    if key is not None:
        if len(_passed) >= _MOST:
            _passed.clear()
        _passed[key] = args.softmax_scale
    return args


def _checked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    softmax_scale: float | None,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    *,
    validate: bool,
) -> AttentionArgs:
    _check_tensors(q, k, v, packed=cu_seqlens_q is not None or cu_seqlens_k is not None)
    scale = _check_scale(softmax_scale, q.shape[-1])
    if not isinstance(causal, bool):
        raise TypeError(f"causal is {causal!r}: want True or False")

    if cu_seqlens_q is None and cu_seqlens_k is None:
        for name, given in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
            if given is not None:
                raise ValueError(
                    f"{name} is {given} but the call is dense: leave it out, or pass cu_seqlens_q and _k too"
                )
        return AttentionArgs(q, k, v, causal, scale, None, None, q.shape[1], k.shape[1])

    if cu_seqlens_q is None or cu_seqlens_k is None:
        missing, other = ("cu_seqlens_q", "cu_seqlens_k") if cu_seqlens_q is None else ("cu_seqlens_k", "cu_seqlens_q")
        raise ValueError(f"{missing} is missing while {other} is given: packed input needs both")
    _check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, q)
    _check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, q)
    if cu_seqlens_q.shape[0] != cu_seqlens_k.shape[0]:
        raise ValueError(
            f"cu_seqlens_q has {cu_seqlens_q.shape[0]} entries and cu_seqlens_k has {cu_seqlens_k.shape[0]}: both want "
            "one more than the number of sequences"
        )
    max_seqlen_q = _check_max_seqlen("max_seqlen_q", max_seqlen_q)
    max_seqlen_k = _check_max_seqlen("max_seqlen_k", max_seqlen_k)
    if validate and not torch.compiler.is_compiling():
        _check_values("q", cu_seqlens_q, q.shape[0], max_seqlen_q)
        _check_values("k", cu_seqlens_k, k.shape[0], max_seqlen_k)
    args = AttentionArgs(q, k, v, causal, scale, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return args if torch.compiler.is_compiling() else resolved(args)


def resolved(args: AttentionArgs) -> AttentionArgs:
    """The same call with both max_seqlens known; waits for the device only where one was left out."""
    if args.cu_seqlens_q is None or args.cu_seqlens_k is None:
        return args
    if args.max_seqlen_q is not None and args.max_seqlen_k is not None:
        return args
    return AttentionArgs(
        args.q,
        args.k,
        args.v,
        args.causal,
        args.softmax_scale,
        args.cu_seqlens_q,
        args.cu_seqlens_k,
        longest(args.cu_seqlens_q) if args.max_seqlen_q is None else args.max_seqlen_q,
        longest(args.cu_seqlens_k) if args.max_seqlen_k is None else args.max_seqlen_k,
    )


def lse_shape(q: torch.Tensor) -> tuple[int, ...]:
    """`[B, H, Sq]`, or packed `[H, Tq]`."""
    return (q.shape[1], q.shape[0]) if q.dim() == 3 else (q.shape[0], q.shape[2], q.shape[1])


def empty_results(q: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of a call, not yet computed (for `register_fake`)."""
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(lse_shape(q), dtype=torch.float32)


def check_backward(
    args: AttentionArgs,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
) -> None:
    """Checks what a backward takes beside the arguments of its forward: results and cotangents (None: zeros).

    Raises:
        TypeError: out or dout is not of q's dtype, or lse or dlse not float32.
        ValueError: a shape or device is wrong.
    """
    q = args.q
    out_shape, rows = (*q.shape[:-1], args.value_head_dim), lse_shape(q)
    for name, tensor, shape, dtype in (
        ("out", out, out_shape, q.dtype),
        ("lse", lse, rows, torch.float32),
        ("dout", dout, out_shape, q.dtype),
        ("dlse", dlse, rows, torch.float32),
    ):
        if tensor is None:
            continue
        if tensor.shape != shape:
            raise ValueError(f"{name} has shape {_shape(tensor)}: want {list(shape)}")
        if tensor.dtype != dtype:
            raise TypeError(f"{name} is {tensor.dtype}: want {dtype}")
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device} and q is on {q.device}: want it on {q.device}")


def _shape(tensor: torch.Tensor) -> str:
    return f"[{', '.join(str(n) for n in tensor.shape)}]"


def _check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, packed: bool) -> None:
    rank, wanted = (3, "[tokens, heads, head_dim]") if packed else (4, "[batch, seqlen, heads, head_dim]")
    layout = "packed (cu_seqlens given)" if packed else "dense (no cu_seqlens)"
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}: want a torch.Tensor")
        if tensor.dim() != rank:
            raise ValueError(f"{name} has shape {_shape(tensor)}: {layout} input wants {wanted}")
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{name} is {tensor.dtype}: want float16, bfloat16 or float32")
        if tensor.dtype != q.dtype:
            raise TypeError(f"{name} is {tensor.dtype} and q is {q.dtype}: want one dtype for q, k and v")
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device} and q is on {q.device}: want one device for q, k and v")
        if tensor.shape[-2] == 0:
            raise ValueError(f"{name} has shape {_shape(tensor)}: want at least one head")
        head_dim = tensor.shape[-1]
        if head_dim == 0 or head_dim % 8 or head_dim > MAX_HEAD_DIM:
            raise ValueError(f"{name} has head dim {head_dim}: want a multiple of 8 from 8 to {MAX_HEAD_DIM}")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k has head dim {k.shape[-1]} and q has {q.shape[-1]}: want them equal (only v may differ)")
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(f"v has shape {_shape(v)} and k has {_shape(k)}: want them equal up to the head dim")
    if not packed and k.shape[0] != q.shape[0]:
        raise ValueError(f"k has batch {k.shape[0]} and q has {q.shape[0]}: want one batch size")
    if q.shape[-2] % k.shape[-2]:
        raise ValueError(f"q has {q.shape[-2]} heads and k has {k.shape[-2]}: want the heads of k to divide those of q")
    for name, tensor in (("q", q), ("k", k)):
        if tensor.shape[-3] > INT32_MAX:
            raise ValueError(f"{name} has {tensor.shape[-3]} rows: want at most {INT32_MAX}")


def _check_scale(softmax_scale: float | None, head_dim: int) -> float:
    if softmax_scale is None:
        return float(head_dim) ** -0.5
    if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, int | float):
        raise TypeError(
            f"softmax_scale is a {type(softmax_scale).__name__}: want a float, or None for head_dim ** -0.5"
        )
    if not math.isfinite(softmax_scale):
        raise ValueError(f"softmax_scale is {softmax_scale}: want a finite number")
    return float(softmax_scale)


def _check_cu_seqlens(name: str, cu_seqlens: torch.Tensor, q: torch.Tensor) -> None:
    if not isinstance(cu_seqlens, torch.Tensor):
        raise TypeError(f"{name} is a {type(cu_seqlens).__name__}: want an int32 torch.Tensor [sequences + 1]")
    if cu_seqlens.dtype != torch.int32:
        raise TypeError(f"{name} is {cu_seqlens.dtype}: want torch.int32 (use .to(torch.int32))")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0:
        raise ValueError(f"{name} has shape {_shape(cu_seqlens)}: want [sequences + 1]")
    if cu_seqlens.device != q.device:
        raise ValueError(f"{name} is on {cu_seqlens.device} and q is on {q.device}: want it on {q.device}")
    if not cu_seqlens.is_contiguous():
        raise ValueError(f"{name} is not contiguous: use .contiguous()")


def _check_max_seqlen(name: str, given: int | None) -> int | None:
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, int | torch.SymInt):
        raise TypeError(f"{name} is a {type(given).__name__}: want an int, or None to read it from cu_seqlens")
    if given < 0:
        raise ValueError(f"{name} is {given}: want 0 or more")
    return given


def _check_values(which: str, cu_seqlens: torch.Tensor, tokens: int, max_seqlen: int | None) -> None:
    name = f"cu_seqlens_{which}"
    values = cu_seqlens.tolist()
    if values[0] != 0:
        raise ValueError(f"{name} starts at {values[0]}: want 0")
    for i, (start, end) in enumerate(pairwise(values)):
        if end < start:
            raise ValueError(f"{name} falls from {start} to {end} at index {i + 1}: want it never to decrease")
        if max_seqlen is not None and end - start > max_seqlen:
            raise ValueError(
                f"sequence {i} of {name} has {end - start} tokens and max_seqlen_{which} is {max_seqlen}: want "
                f"max_seqlen_{which} to be at least the longest sequence"
            )
    if values[-1] > tokens:
        raise ValueError(f"{name} ends at {values[-1]} and {which} has {tokens} tokens: want it to end at most there")
