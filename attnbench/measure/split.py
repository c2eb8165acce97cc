"""What a call's device time is made of: its kernels by name, as `torch.profiler` sees them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnbench.measure.timer import DeviceClock

CALLS = 5
_EVICT = "bitwise_not"
"""The kernel that evicts L2 here: one that no operation launches, so that it can be told from an operation's fills."""
_PARTS = (
    ("zero_fill", re.compile(r"^Memset|FillFunctor|fill_kernel")),
    ("copy", re.compile(r"^Memcpy|copy_kernel|CatArrayBatchedCopy")),
    ("preprocess", re.compile(r"preprocess|prepare|dot_do_o|delta")),
    ("postprocess", re.compile(r"postprocess|finish|convert_dq|combine|column_sum")),
)


def part_of(kernel: str) -> str:
    """`zero_fill`, `copy`, `preprocess`, `postprocess` or, for every other kernel, `main`."""
    return next((part for part, pattern in _PARTS if pattern.search(kernel)), "main")


def short_name(kernel: str) -> str:
    """A kernel's name without its return type, template arguments and parameters."""
    if kernel.startswith(("Memset", "Memcpy")):
        return kernel
    return re.split(r"[<(]", kernel.removeprefix("void "), maxsplit=1)[0].strip()


def parts(kernels: dict[str, float]) -> dict[str, float]:
    """Milliseconds by part, in the order in which the parts run; kernels that share a part add up."""
    found: dict[str, float] = {}
    for name, ms in kernels.items():
        part = part_of(name)
        found[part] = found.get(part, 0.0) + ms
    order = ("zero_fill", "preprocess", "main", "postprocess", "copy")
    return {part: found[part] for part in order if part in found}


def per_call(events: Iterable[Any], calls: int) -> dict[str, float]:
    """Milliseconds a call by kernel, from `key_averages()` of a profile over `calls` calls."""
    return {
        event.key: event.self_device_time_total / 1e3 / calls
        for event in events
        if event.self_device_time_total > 0 and _EVICT not in event.key
    }


def kernel_times(
    clock: DeviceClock, call: Callable[[], Any], calls: int = CALLS, *, cold: bool = True
) -> dict[str, float]:
    """Milliseconds a call by full kernel name, cold or warm L2; empty where the profiler sees no kernels."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        with torch.cuda.stream(clock.stream):
            for _ in range(calls):
                if cold:
                    clock.evict()
                call()
        clock.stream.synchronize()
    return per_call(profile.key_averages(), calls)
