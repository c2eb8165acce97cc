"""Variants of a case's inputs: other memory layouts, other values, rows that belong to no sequence, fewer cotangents.

A variant is written as words, since it is also what a table shows: `q,k,v:transposed dout:wide values:x10 beyond:3
grads:lse`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from attnbench.ops.base import Inputs


def apply_layout(inputs: Inputs, variant: str) -> Inputs:
    """The inputs of a case in one of its variants; "" changes nothing.

    `NAME[,NAME…]:LAYOUT` lays inputs (or, as `dout` and `dlse`, cotangents) out as `laid_out` does. `values:` is one
    of `VALUES`. `beyond:N` appends N rows of NaN after the last packed sequence. `grads:out` or `grads:lse` keeps one
    cotangent only. Tensors are leaves that require grad, as before.

    Raises:
        ValueError: a word of the variant is not understood.
    """
    tensors = {name: tensor.detach() for name, tensor in inputs.tensors.items()}
    cotangents = dict(inputs.cotangents)
    layouts: list[tuple[str, str]] = []
    for word in variant.split():
        what, _, how = word.partition(":")
        if what == "values" and how in VALUES:
            VALUES[how](tensors)
        elif what == "beyond" and how.isdigit():
            _append_rows(tensors, cotangents, int(how))
        elif what == "grads" and how in cotangents:
            cotangents = {how: cotangents[how]}
        elif how in LAYOUTS:
            layouts += [(name, how) for name in what.split(",")]
        else:
            raise ValueError(f"input variant {word!r}: want tensors:layout, values:…, beyond:N or grads:output")
    for name, layout in layouts:  # last, so that what comes before may copy
        if name in tensors:
            tensors[name] = laid_out(tensors[name], layout)
        elif name.startswith("d") and name[1:] in cotangents:
            cotangents[name[1:]] = laid_out(cotangents[name[1:]], layout)
        else:
            raise ValueError(f"input variant {variant!r}: there is no tensor {name!r}")
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
    return replace(inputs, tensors=leaves, cotangents=cotangents)


def laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values in another memory layout; all but "expanded" keep them. NaN fills what lies between.

    For tensors `[…, tokens, heads, width]`: "transposed" puts heads before tokens in memory, "wide" takes the last half
    of a tensor twice as wide, "slice" the middle third of one with three times the heads (a packed qkv projection),
    "offset" starts one element after an aligned address, "odd_stride" pads every token by one element, "expanded"
    repeats the first token with stride 0.
    """
    return LAYOUTS[layout](tensor)


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(-3, -2).contiguous().transpose(-3, -2)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    width = tensor.shape[-1]
    return _nan(tensor, *tensor.shape[:-1], 2 * width)[..., width:].copy_(tensor)


def _slice(tensor: torch.Tensor) -> torch.Tensor:
    *lead, heads, width = tensor.shape
    return _nan(tensor, *lead, 3 * heads, width)[..., heads : 2 * heads, :].copy_(tensor)


def _offset(tensor: torch.Tensor) -> torch.Tensor:
    return _nan(tensor, tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor)


def _odd_stride(tensor: torch.Tensor) -> torch.Tensor:
    *lead, heads, width = tensor.shape
    return _nan(tensor, *lead, heads * width + 1)[..., :-1].unflatten(-1, (heads, width)).copy_(tensor)


def _expanded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[..., :1, :, :].clone().expand(tensor.shape)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": _transposed,
    "wide": _wide,
    "slice": _slice,
    "offset": _offset,
    "odd_stride": _odd_stride,
    "expanded": _expanded,
}


def _times_ten(tensors: dict[str, torch.Tensor]) -> None:
    """Scores of several hundred: one key takes all of a row."""
    for name in ("q", "k"):
        tensors[name].mul_(10.0)


def _equal_keys(tensors: dict[str, torch.Tensor]) -> None:
    tensors["k"].copy_(tensors["k"][..., :1, :, :].clone().expand_as(tensors["k"]))


def _hidden_key(tensors: dict[str, torch.Tensor]) -> None:
    """The first key scores thousands below the others, yet is all that the first causal query sees."""
    tensors["q"][..., 0] = 32.0
    tensors["k"][..., 0] = 0.0
    tensors["k"][..., :1, :, 0] = -2048.0


def _threes(tensors: dict[str, torch.Tensor]) -> None:
    for tensor in tensors.values():
        tensor.fill_(3.0)


def _zero_rows(tensors: dict[str, torch.Tensor]) -> None:
    """Every other position of attention residuals holds zeros: its mean square is 0, only eps keeps rsqrt finite."""
    for name in ("values", "partial_sum"):
        if name in tensors:
            tensors[name][..., ::2, :] = 0.0


def _nothing_attended(tensors: dict[str, torch.Tensor]) -> None:
    tensors["inter_lse"].fill_(-torch.inf)


VALUES: dict[str, Callable[[dict[str, torch.Tensor]], None]] = {
    "x10": _times_ten,
    "equal_keys": _equal_keys,
    "hidden_key": _hidden_key,
    "threes": _threes,
    "zero_rows": _zero_rows,
    "nothing_attended": _nothing_attended,
}


def _append_rows(tensors: dict[str, torch.Tensor], cotangents: dict[str, torch.Tensor], rows: int) -> None:
    for held in (tensors, cotangents):
        for name, tensor in held.items():
            axis = 1 if name == "lse" else 0
            shape = list(tensor.shape)
            shape[axis] = rows
            held[name] = torch.cat([tensor, _nan(tensor, *shape)], dim=axis)


def _nan(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=like.dtype, device=like.device)
