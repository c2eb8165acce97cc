"""From an exception to a typed outcome."""

from __future__ import annotations

import traceback

from attnbench.backends.base import BuildFailed

_ILLEGAL = ("illegal memory access", "misaligned address", "illegal instruction", "illegal address", "invalid address")
_BUILD_ERRORS = (
    "CompilationError",
    "CompileError",
    "OutOfResources",
    "PTXASError",
    "BackendCompilerFailed",
    "NVRTCError",
)


def classify(error: BaseException) -> tuple[str, str]:
    """The outcome that `error` means, and its reason in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    reason = f"{type(error).__name__}: {text}"[:400]
    kinds = {cls.__name__ for cls in type(error).__mro__}
    if isinstance(error, BuildFailed):
        return "build-failed", text[:2000]
    if isinstance(error, MemoryError) or "OutOfMemoryError" in kinds or "out of memory" in text:
        return "oom", reason
    if any(words in text for words in _ILLEGAL):
        return "illegal-access", reason
    if kinds & set(_BUILD_ERRORS):
        return "build-failed", reason
    return "crashed", reason


def is_sticky(error: BaseException) -> bool:
    """Whether the CUDA context is lost, so that this process can do no more GPU work."""
    del error
    import torch

    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except Exception:
        return True
    return False


def tail(error: BaseException, lines: int = 12) -> list[str]:
    """The last lines of the traceback, for the record."""
    text = "".join(traceback.format_exception(error))
    return [line[:300] for line in text.splitlines() if line.strip()][-lines:]
