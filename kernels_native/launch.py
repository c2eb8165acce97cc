"""Load compiled kernels and launch them on PyTorch's current stream; every driver call's answer is checked."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

from kernels_native.jit import BuildFailed, Built, Specialisation, build

_LIMITS = {
    "CUDA_ERROR_INVALID_VALUE": "a grid dimension beyond 2^31-1 (x) or 65535 (y, z), or more dynamic shared memory "
    "than the device allows a block",
    "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES": "more registers or shared memory than a multiprocessor has",
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "this GPU is not of compute capability 9.0, for which the kernel was built",
}


_OnePointer = ctypes.c_char_p * 1


@functools.cache
def _driver_launch() -> Any:
    """The driver's cuLaunchKernel itself: the bindings wrap each handle in an object, which costs more."""
    launch = ctypes.CDLL("libcuda.so.1").cuLaunchKernel
    launch.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]
    launch.restype = ctypes.c_int
    return launch


class LaunchFailed(RuntimeError):
    """The driver refused a call; the message names the kernel, its specialisation and the limit."""


class Kernel:
    """One specialisation, loaded into the CUDA context that was current at construction.

    A kernel takes one `__grid_constant__` struct, whose bytes the caller packs. Launches are asynchronous.
    """

    def __init__(self, specialisation: Specialisation) -> None:
        """Builds (or reads from the cache) and loads.

        Raises:
            BuildFailed: the kernel does not build or load.
        """
        from cuda.bindings import driver

        self.built: Built = build(specialisation)
        self.specialisation = specialisation
        self._success = driver.CUresult.CUDA_SUCCESS
        self._block = specialisation.threads
        self._shared = specialisation.shared_bytes
        try:
            self._module = self._checked(driver.cuModuleLoadData(self.built.cubin), "loading its cubin")
            self.function = self._checked(
                driver.cuModuleGetFunction(self._module, self.built.symbol.encode()), "looking it up in its cubin"
            )
            if self.built.shared_bytes > 48 * 1024:
                attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                self._checked(
                    driver.cuFuncSetAttribute(self.function, attribute, self._shared), "raising its shared memory"
                )
        except LaunchFailed as error:
            raise BuildFailed(str(error)) from None
        self._launch = _driver_launch()
        self._handle = int(self.function)

    def launch(self, grid: tuple[int, int, int], params: bytes, stream: int) -> None:
        """Launch on `stream` (a CUstream as an integer); an empty grid launches nothing.

        Args:
            params: the bytes of the kernel's one parameter, with C++ padding.

        Raises:
            LaunchFailed: the driver refused.
        """
        if 0 in grid:
            return
        # The driver copies the parameters before it returns.
        error = self._launch(self._handle, *grid, self._block, 1, 1, self._shared, stream, _OnePointer(params), None)
        if error:
            self._refused(error, grid)

    def launch_arguments(self, grid: tuple[int, int, int], arguments: Sequence[Any], stream: int) -> None:
        """The same for a kernel with several parameters, each a ctypes object of the parameter's type."""
        if 0 in grid:
            return
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        error = self._launch(self._handle, *grid, self._block, 1, 1, self._shared, stream, pointers, None)
        if error:
            self._refused(error, grid)

    def _refused(self, error: int, grid: tuple[int, int, int]) -> None:
        from cuda.bindings import driver

        self._checked((driver.CUresult(error),), f"a launch of {grid} blocks")

    def _checked(self, answer: tuple[Any, ...], doing: str) -> Any:
        error = answer[0]
        if error != self._success:
            limit = _LIMITS.get(error.name)
            raise LaunchFailed(
                f"{self.specialisation.name} ({self._block} threads, {self.built.registers} registers, "
                f"{self.built.shared_bytes} bytes of shared memory a block): {doing} failed with {error.name}"
                + (f"; the usual reason: {limit}" if limit else "")
            )
        return answer[1] if len(answer) > 1 else None


_kernels: dict[tuple[Specialisation, int], Kernel] = {}
_lock = threading.Lock()


def kernel(specialisation: Specialisation, device: int) -> Kernel:
    """The loaded kernel for a device; built and loaded on first use. The device must be current.

    Raises:
        BuildFailed: it does not build or load.
    """
    found = _kernels.get((specialisation, device))
    if found is None:
        with _lock:
            found = _kernels.get((specialisation, device))
            if found is None:
                import torch

                torch.cuda.current_stream(device)  # initialises CUDA and makes the device's primary context current
                torch.cuda.synchronize(device)
                found = _kernels[specialisation, device] = Kernel(specialisation)
    return found


@functools.cache
def _raw_stream() -> Callable[[int], int]:
    import torch

    found: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
    return found


def current_stream(device: int) -> int:
    """The stream that PyTorch would launch on, as an integer."""
    return _raw_stream()(device)
