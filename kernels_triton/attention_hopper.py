"""The Gluon kernels for Hopper under one roof, with their kind of descriptor."""

from __future__ import annotations

from functools import cache

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels_triton.attention_hopper_dkv import attention_dkv_hopper as dkv
from kernels_triton.attention_hopper_dq import attention_dq_hopper as dq
from kernels_triton.attention_hopper_forward import attention_forward_hopper as forward

_DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


@cache
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(block), _DTYPES[dtype])


def descriptor(tensor: torch.Tensor, shape: list[int], strides: list[int], block: list[int]) -> TensorDescriptor:
    """A TMA descriptor whose blocks lie in shared memory swizzled as wgmma reads them."""
    return TensorDescriptor(tensor, shape, strides, block, _layout(tuple(block), tensor.dtype))


__all__ = ["descriptor", "dkv", "dq", "forward"]
