"""pydantic's errors in the words of a scenario: what was wrong, what is wanted, the nearest right word."""

from __future__ import annotations

import re
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from attnbench.errors import did_you_mean
from attnbench.scenario.errors import Problem, quoted
from attnbench.scenario.model import ScenarioModel
from attnbench.scenario.yaml_text import Document, Path, dotted


def explain(error: ValidationError, document: Document) -> dict[Path, Problem]:
    """One problem for each place that pydantic refuses, by its path."""
    found: dict[Path, Problem] = {}
    for item in error.errors(include_url=False, include_context=True):
        path = _in_text(item["loc"], document)
        message = _message(item, path)
        at = path
        if item["type"] == "missing":
            path = (*path, str(item["loc"][-1]))
        found.setdefault(
            path, Problem(*document.place(at, key=item["type"] == "extra_forbidden"), dotted(path), message)
        )
    # A field that takes a value or a list fails both readings; the deeper place says more.
    inner = {path[:n] for path in found for n in range(len(path))}
    return {path: problem for path, problem in found.items() if path not in inner}


def _in_text(loc: tuple[Any, ...], document: Document) -> Path:
    """A pydantic location without the names of union members, as far as the text has it."""
    path: Path = ()
    for part in loc:
        if (*path, part) in document.values:
            path = (*path, part)
    return path


def _message(item: Any, path: Path) -> str:
    kind, value, context = item["type"], item["input"], item.get("ctx", {})
    match kind:
        case "extra_forbidden":
            key, known = str(item["loc"][-1]), _fields_at(path[:-1])
            return f"unknown key {quoted(key)}; wanted one of {', '.join(known)}.{did_you_mean(key, known)}"
        case "missing":
            model = _model_at(path)
            info = model.model_fields.get(str(item["loc"][-1])) if model else None
            return f"missing; wanted it: {info.description}" if info and info.description else "missing"
        case "int_type" | "int_from_float":
            return f"{kind_of(value)}; wanted a whole number{_int_hint(value)}"
        case "float_type":
            return f"{kind_of(value)}; wanted a number"
        case "bool_type":
            hint = " (yes, no, on and off are text in YAML 1.2)" if isinstance(value, str) else ""
            return f"{kind_of(value)}; wanted true or false{hint}"
        case "string_type":
            return f"{kind_of(value)}; wanted text (put it into quotes)"
        case "list_type":
            hint = f", as in [{_written(value)}]" if isinstance(value, bool | int | float | str) else ""
            return f"{kind_of(value)}; wanted a list{hint}"
        case "model_type" | "model_attributes_type" | "dict_type":
            return f"{kind_of(value)}; wanted a mapping of {', '.join(_fields_at(path))}"
        case "literal_error":
            words = re.findall(r"'([^']*)'", str(context.get("expected", "")))
            near = did_you_mean(value, words) if isinstance(value, str) else ""
            return f"{kind_of(value)}; wanted one of {', '.join(words)}.{near}"
        case "multiple_of":
            step = context["multiple_of"]
            return f"{quoted(value)} is not a multiple of {step}; wanted {', '.join(_multiples(value, step))}"
        case "too_short":
            return "empty; wanted at least one"
        case "too_long":
            return f"{kind_of(value)}; wanted at most {context['max_length']:,}"
        case "string_too_short":
            return "empty; wanted some text"
        case "string_too_long":
            return f"{len(value):,} characters; wanted at most {context['max_length']:,}"
        case "string_pattern_mismatch" if path == ("name",):
            leaves = any(part in value for part in ("/", "\\", ".."))
            why = "would leave the results folder" if leaves else "is not a name for a folder"
            return f"{quoted(value)} {why}; wanted letters, digits, '_', '-' and '.', starting with a letter or digit"
        case "string_pattern_mismatch":
            wanted = "one word without spaces" if "tags" in path else "text of one line"
            return f"{kind_of(value)}; wanted {wanted}"
    wanted = item["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    return f"{kind_of(value)}; wanted {wanted[0].lower()}{wanted[1:]}"


def _written(value: bool | int | float | str) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _multiples(value: Any, step: int) -> list[str]:
    near = [value // step * step, (value // step + 1) * step]
    return [" or ".join(str(n) for n in near if n > 0)]


def _int_hint(value: Any) -> str:
    if isinstance(value, str) and (match := re.fullmatch(r"(\d{1,9})\s*[kK]", value)):
        return f", {int(match[1]) * 1024}"
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d[\d_, ]*", value):
        return " without quotes or separators"
    return ""


def kind_of(value: Any) -> str:
    match value:
        case None:
            return "nothing"
        case bool():
            return str(value).lower()
        case str():
            return f"text {quoted(value)}"
        case list():
            return f"a list of {len(value)}"
        case dict():
            return "a mapping"
    return quoted(value)


def _model_at(path: Path) -> type[BaseModel] | None:
    """The model whose fields stand at a path; None where there is none."""
    model: type[BaseModel] = ScenarioModel
    for part in path:
        if isinstance(part, int):
            continue
        if part not in model.model_fields:
            return None
        inner = _inner_model(model.model_fields[part].annotation)
        if inner is None:
            return None
        model = inner
    return model


def _inner_model(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _inner_model(part))), None)


def _fields_at(path: Path) -> list[str]:
    model = _model_at(path)
    return list(model.model_fields) if model else []
