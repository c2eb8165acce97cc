"""A backend from your own CUDA C++: a `.cu` file, built by the JIT that builds ours, or a `.cubin`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnbench.backends.base import Backend, BuildFailed
from attnbench.backends.custom_kernel import Namespace, from_launches
from attnbench.scenario.case import Case


@dataclass(frozen=True)
class CudaLaunch:
    """One launch of a kernel from a `.cu` or `.cubin` file.

    `grid(t)` gives the grid and `arguments(t)` the kernel's arguments in order, from the call `t` (see
    `custom_kernel.Namespace`): a tensor becomes its address, a bool, int or float a C `bool`, `int` or `float`, and a
    ctypes object (`ctypes.c_int64(n)`) itself. `scratch(t)` gives further tensors, which later launches of the same
    pass see as attributes of `t` too.

    Attributes:
        source: the file. A `.cu` is compiled by NVRTC for sm_90a, without host headers or a CUDA toolkit, and cached;
            headers beside it are found but are no part of the cache's key.
        entry: name of the `__global__` function, with template arguments where it has any (`"kernel<128>"`); of a
            `.cubin` the mangled symbol.
        threads: threads per block.
        shared_bytes: dynamic shared memory per block.
        options: further NVRTC options, such as `-DBLOCK=64`.
    """

    source: str | Path
    entry: str
    threads: int
    grid: Callable[[Namespace], Sequence[int]]
    arguments: Callable[[Namespace], Sequence[Any]]
    shared_bytes: int = 0
    options: tuple[str, ...] = ()
    scratch: Callable[[Namespace], Mapping[str, Any]] = field(default=lambda t: {})

    def __call__(self, t: Namespace) -> None:
        """Launch on PyTorch's current stream.

        Raises:
            BuildFailed: the file does not compile or load.
        """
        import kernels_native

        device = t.out.device.index
        try:
            kernel = kernels_native.kernel(self.specialisation(), device)
        except kernels_native.BuildFailed as error:
            raise BuildFailed(str(error)) from error
        for name, tensor in self.scratch(t).items():
            setattr(t, name, tensor)
        x, y, z = (*self.grid(t), 1, 1)[:3]
        arguments = [_argument(value) for value in self.arguments(t)]
        kernel.launch_arguments((x, y, z), arguments, kernels_native.current_stream(device))

    def specialisation(self) -> Any:
        """What the JIT builds; `kernels_native.build` of it needs no GPU."""
        import kernels_native

        return kernels_native.Specialisation(
            source=str(Path(self.source).resolve()),
            entry=self.entry,
            threads=self.threads,
            shared_bytes=self.shared_bytes,
            backend="custom",
            options=self.options,
            may_spill=True,
        )


def _argument(value: Any) -> Any:
    if isinstance(value, bool):
        return ctypes.c_bool(value)
    if isinstance(value, int):
        if not -(2**31) <= value < 2**31:
            raise ValueError(f"argument {value} does not fit a C int: pass ctypes.c_int64({value})")
        return ctypes.c_int(value)
    if isinstance(value, float):
        return ctypes.c_float(value)
    if hasattr(value, "data_ptr"):
        return ctypes.c_void_p(value.data_ptr())
    if isinstance(value, ctypes._SimpleCData | ctypes.Structure | ctypes.Array):
        return value
    raise TypeError(f"argument {value!r} is a {type(value).__name__}: want a tensor, number or ctypes object")


def from_cuda(
    forward: CudaLaunch | Sequence[CudaLaunch],
    backward: CudaLaunch | Sequence[CudaLaunch] = (),
    *,
    op: str = "attention",
    name: str = "my_cuda",
    supports: Callable[[Case, str], str | None] | None = None,
    deterministic: bool = False,
) -> Backend:
    """A backend from CUDA kernels: `forward` fills `out` and `lse`, `backward` fills the gradients.

    Both are launched in the order given. Without a backward only the forward pass is checked and timed. Inputs arrive
    as they are, so pass the kernels their strides. `supports` adds to the one reason known here: there is no GPU.
    """

    def reason(case: Case, device: str) -> str | None:
        if not device.startswith("cuda"):
            return "needs a CUDA GPU"
        return supports(case, device) if supports is not None else None

    return from_launches(
        _sequence(forward), _sequence(backward), op=op, name=name, supports=reason, deterministic=deterministic
    )


def _sequence(launches: CudaLaunch | Sequence[CudaLaunch]) -> Sequence[CudaLaunch]:
    return (launches,) if isinstance(launches, CudaLaunch) else tuple(launches)
