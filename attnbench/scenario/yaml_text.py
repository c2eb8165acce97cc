"""YAML text → plain values plus the place of every key and value.

YAML 1.2 scalars, read by PyYAML's safe scanner: `1e-3` is a float, `no`, `on` and `1:30` are text, `012` is 12, and
`12e10` is a float (quote a commit that looks like one). Duplicate keys, tags and merge keys are problems. Anchors work,
within a bound on what they expand to.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from attnbench.scenario.errors import Problem, ScenarioError, quoted

MAX_CHARACTERS = 1 << 20
MAX_VALUES = 100_000

Path = tuple[str | int, ...]
_TAG = "tag:yaml.org,2002:"


@dataclass
class Document:
    """A file's values, with (line, column) of each value and of each key by its path; counted from 1."""

    data: Any
    values: dict[Path, tuple[int, int]] = field(default_factory=dict)
    keys: dict[Path, tuple[int, int]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def place(self, path: Path, key: bool = False) -> tuple[int, int]:
        """Where a value (or its key) stands; the nearest enclosing value where the path itself is absent."""
        if key and path in self.keys:
            return self.keys[path]
        while path and path not in self.values:
            path = path[:-1]
        return self.values.get(path, (1, 1))


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


def _resolver(kind: str, pattern: str, first: str) -> None:
    _Loader.add_implicit_resolver(_TAG + kind, re.compile(pattern), list(first))


_resolver("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF")
_resolver("int", r"^(?:[-+]?[0-9]+|0x[0-9a-fA-F]+)$", "-+0123456789")
_resolver(
    "float",
    r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
    "-+0123456789.",
)
_resolver("null", r"^(?:~|null|Null|NULL|)$", "~nN")
_Loader.add_implicit_resolver(_TAG + "null", re.compile(r"^$"), [""])


def parse(text: str, file: str) -> Document:
    """Parse one YAML document.

    Raises:
        ScenarioError: the text is not YAML, is empty or too large, or nests or expands without end. Problems after
            which the rest can still be judged (a duplicate key, a tag) are in `Document.problems` instead.
    """

    def refuse(message: str, line: int = 0, column: int = 0) -> ScenarioError:
        return ScenarioError(file, [Problem(line, column, "", message)])

    if len(text) > MAX_CHARACTERS:
        raise refuse(f"{len(text):,} characters; wanted a scenario of at most {MAX_CHARACTERS:,}")
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
        finally:
            loader.dispose()
        if node is None:
            raise refuse("the file is empty; wanted a scenario with `name`, `backends` and `cases`", 1, 1)
        document = Document(None)
        document.data = _Reader(document).read(node, ())
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        raise refuse(f"character U+{ord(text[error.position]):04X} is not allowed in YAML", line, column) from None
    except yaml.MarkedYAMLError as error:
        raise refuse(*_explain(error)) from None
    except RecursionError:
        raise refuse("nested too deeply; wanted at most a few levels") from None
    except _TooMany as error:
        raise refuse(str(error), *error.place) from None
    return document


def _explain(error: yaml.MarkedYAMLError) -> tuple[str, int, int]:
    mark = error.problem_mark or error.context_mark
    line, column = (mark.line + 1, mark.column + 1) if mark else (0, 0)
    words = ", ".join(part for part in (error.context, error.problem) if part) or "not YAML"
    if "'\\t'" in words:
        words += "; indent with spaces, not tabs"
    if "expected a single document" in words:
        words = "a second document starts here; wanted one scenario a file"
    return f"not YAML: {words}", line, column


class _TooMany(Exception):
    def __init__(self, message: str, place: tuple[int, int]) -> None:
        super().__init__(message)
        self.place = place


class _Reader:
    """Turns a node graph into values, counting what aliases expand to."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.count = 0
        self.open: set[int] = set()

    def problem(self, node: yaml.Node, path: Path, message: str) -> None:
        self.document.problems.append(Problem(*_place(node), dotted(path), message))

    def read(self, node: yaml.Node, path: Path) -> Any:
        self.document.values[path] = _place(node)
        self.count += 1
        if self.count > MAX_VALUES:
            raise _TooMany(f"more than {MAX_VALUES:,} values once anchors are expanded", _place(node))
        if id(node) in self.open:
            raise _TooMany("an anchor contains itself", _place(node))
        self.open.add(id(node))
        try:
            if isinstance(node, yaml.ScalarNode):
                return self.scalar(node, path)
            wanted = _TAG + ("map" if isinstance(node, yaml.MappingNode) else "seq")
            if node.tag != wanted:
                self.tag(node, path)
            if isinstance(node, yaml.MappingNode):
                return self.mapping(node, path)
            return [self.read(child, (*path, i)) for i, child in enumerate(node.value)]
        finally:
            self.open.discard(id(node))

    def mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = key_node.value
            if not isinstance(key_node, yaml.ScalarNode) or not isinstance(key, str):
                self.problem(key_node, path, "a key that is a list or a mapping; wanted a field's name")
                continue
            if key == "<<":
                self.problem(key_node, path, "merge keys (<<) are not YAML 1.2; put what cases share into `defaults`")
                continue
            if key in out:
                line, _ = self.document.keys[(*path, key)]
                self.problem(key_node, (*path, key), f"duplicate key, first given in line {line}; keep one of them")
                continue
            self.document.keys[(*path, key)] = _place(key_node)
            out[key] = self.read(value_node, (*path, key))
        return out

    def scalar(self, node: yaml.ScalarNode, path: Path) -> Any:
        text: str = node.value
        kind = node.tag.removeprefix(_TAG)
        try:
            match kind:
                case "str":
                    return text
                case "null":
                    return None
                case "bool":
                    return {"true": True, "false": False}[text.lower()]
                case "int":
                    return int(text, 16 if text.lower().startswith("0x") else 10)
                case "float":
                    return float(re.sub(r"^([-+]?)\.(inf|nan)$", r"\1\2", text.lower()))
        except (ValueError, KeyError):
            self.problem(node, path, f"{quoted(text)} cannot be read as {kind}")
            return None
        self.tag(node, path)
        return None

    def tag(self, node: yaml.Node, path: Path) -> None:
        tag = node.tag.replace(_TAG, "!!")
        self.problem(node, path, f"tag {quoted(tag)} is not allowed: a scenario is plain data and never runs code")


def _place(node: yaml.Node) -> tuple[int, int]:
    return node.start_mark.line + 1, node.start_mark.column + 1


def dotted(path: Path) -> str:
    """`cases[2].matrix.seqlen`."""
    out = ""
    for part in path:
        out += f"[{part}]" if isinstance(part, int) else f".{part}" if out else part
    return out
