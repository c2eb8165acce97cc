"""Your own kernel as a backend: load it by name, or make it from a Python function.

A backend is an object with `supports(case, device) -> str | None` (None, or the reason why not) and
`prepare(case, inputs) -> Prepared`. It is named in a scenario or with `--backend` as `package.module:object` or
`path/to/file.py:object`. `examples/my_kernel/` has one of each kind; `custom_kernel` makes one from a Triton kernel.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from attnbench.backends.base import Backend, Prepared
from attnbench.backends.custom_kernel import Launch, from_triton
from attnbench.ops.base import Inputs
from attnbench.scenario.case import AttentionCase, Case, op_name

if TYPE_CHECKING:
    import torch

__all__ = ["Launch", "LoadError", "from_function", "from_triton", "load"]

Supports = Callable[[Case, str], str | None]


class LoadError(ValueError):
    """A user's own backend cannot be loaded; the message says what was found and what is wanted."""


def load(name: str) -> Backend:
    """The object that `package.module:object` or `path/to/file.py:object` names.

    The working directory (for a module) or the file's folder (for a file) is put on `sys.path`, so that the code may
    import its neighbours.

    Raises:
        LoadError: no such file, module or object, its import failed, or it lacks `supports` or `prepare`.
    """
    where, _, path = name.rpartition(":")
    if not where or not path:
        raise LoadError(f"backend {name!r}: want package.module:object or path/to/file.py:object")
    found: Any = _file(name, Path(where)) if where.endswith(".py") else _module(name, where)
    for part in path.split("."):
        if not hasattr(found, part):
            raise LoadError(f"backend {name!r}: {where} has no {part!r}{_offer(found)}")
        found = getattr(found, part)
    return _checked(name, found)


def from_function(
    function: Callable[..., Any],
    *,
    op: str = "attention",
    name: str | None = None,
    supports: Supports | None = None,
    devices: tuple[str, ...] = ("cuda", "cpu"),
    differentiable: bool = True,
    lse_grad: bool = True,
    deterministic: bool = False,
) -> Backend:
    """A backend from a Python function that takes the operation's public arguments.

    For attention: `function(q, k, v, *, causal, softmax_scale, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
    max_seqlen_k)`, called with those of the keywords that it has. Without the cu_seqlens ones packed cases are
    unsupported. It returns out, or (out, lse). For the residual phases it takes their tensors and eps by name.

    Args:
        supports: what else it does not take: `supports(case, device)` gives the reason, or None.
        differentiable: whether autograd flows through it; without, only the forward pass is checked and timed.
        lse_grad: whether a gradient flows through the lse that it returns.
        deterministic: whether equal calls promise equal bits; checked then.
    """
    name = name or str(getattr(function, "__name__", "custom"))
    return _FunctionBackend(name, function, op, supports, devices, differentiable, lse_grad, deterministic)


@dataclass
class _FunctionBackend:
    name: str
    function: Callable[..., Any]
    op: str
    reason: Supports | None
    devices: tuple[str, ...]
    differentiable: bool
    lse_grad: bool
    deterministic: bool

    def supports(self, case: Case, device: str) -> str | None:
        if op_name(case) != self.op:
            return f"computes {self.op} only"
        if device.split(":")[0] not in self.devices:
            return f"runs on {' and '.join(self.devices)} only"
        if isinstance(case, AttentionCase) and case.layout == "varlen" and not self._takes("cu_seqlens_q"):
            return "takes no cu_seqlens_q: dense input only"
        if isinstance(case, AttentionCase) and case.causal and not self._takes("causal"):
            return "takes no causal: full attention only"
        return self.reason(case, device) if self.reason is not None else None

    def prepare(self, case: Case, inputs: Inputs) -> Prepared:
        extras = {name: value for name, value in inputs.extras.items() if self._takes(name)}

        def run(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            result = self.function(**tensors, **extras)
            if isinstance(result, tuple):
                return {"out": result[0], "lse": result[1]}
            return {"out": result}

        detached = {name: tensor.detach() for name, tensor in inputs.tensors.items()}
        return Prepared(
            forward=lambda: run(inputs.tensors),
            kernel_forward=lambda: run(detached),
            differentiable=self.differentiable,
            lse_grad=self.lse_grad,
            deterministic=self.deterministic,
        )

    def _takes(self, argument: str) -> bool:
        parameters = inspect.signature(self.function).parameters
        return argument in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _file(name: str, path: Path) -> ModuleType:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise LoadError(f"backend {name!r}: there is no file {path}")
    spec = importlib.util.spec_from_file_location(f"attnbench_custom_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    _search(path.parent)
    sys.modules[spec.name] = module  # dataclasses and pickle look a class up by its module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[spec.name]
        raise LoadError(f"backend {name!r}: importing {path} raised {type(error).__name__}: {error}") from error
    return module


def _module(name: str, module: str) -> ModuleType:
    _search(Path.cwd())
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and (module == error.name or module.startswith(error.name + ".")):
            raise LoadError(
                f"backend {name!r}: there is no module {error.name!r} in this environment or the working directory"
            ) from error
        raise LoadError(f"backend {name!r}: importing {module} needs {error.name!r}, which is missing") from error
    except Exception as error:
        raise LoadError(f"backend {name!r}: importing {module} raised {type(error).__name__}: {error}") from error


def _search(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _checked(name: str, found: Any) -> Backend:
    wanted = "want an object with supports(case, device) and prepare(case, inputs)"
    if inspect.isclass(found):
        raise LoadError(f"backend {name!r} is a class: {wanted}, so name an instance of it")
    missing = [method for method in ("supports", "prepare") if not callable(getattr(found, method, None))]
    if missing:
        hint = ", or wrap the function: attnbench.backends.custom.from_function(...)" if callable(found) else ""
        raise LoadError(f"backend {name!r} is a {type(found).__name__} without {' and '.join(missing)}: {wanted}{hint}")
    backend: Backend = found
    return backend


def _offer(found: Any) -> str:
    names = [n for n, value in vars(found).items() if hasattr(value, "supports") and hasattr(value, "prepare")]
    return f": it has {', '.join(names)}" if names else ""
