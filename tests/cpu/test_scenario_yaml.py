"""YAML text: 1.2 scalars, places, and everything that must be refused."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnbench.scenario import ScenarioError
from attnbench.scenario.yaml_text import MAX_VALUES, Document, parse


def read(text: str):
    document = parse(text, "f.yaml")
    assert not document.problems, document.problems
    return document.data


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("1E3", 1000.0),
        ("2.", 2.0),
        (".5", 0.5),
        ("-.5e1", -5.0),
        ("12e10", 12e10),
        ("no", "no"),
        ("yes", "yes"),
        ("on", "on"),
        ("off", "off"),
        ("y", "y"),
        ("true", True),
        ("False", False),
        ("TRUE", True),
        ("tRUE", "tRUE"),
        ("012", 12),
        ("0o12", "0o12"),
        ("0x1F", 31),
        ("0b1", "0b1"),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("2026-01-01", "2026-01-01"),
        ("+7", 7),
        ("-", [None]),
        ("~", None),
        ("null", None),
        ("nULL", "nULL"),
        ("'1'", "1"),
        ('"true"', "true"),
        ("!!str 1", "1"),
        ("!!float 1", 1.0),
        (".inf", math.inf),
        ("-.INF", -math.inf),
        ("1.2.3", "1.2.3"),
        ("e5", "e5"),
        (".", "."),
        ("=", "="),
    ],
)
def test_scalar(text, value):
    got = read(f"[{text}]")[0] if text != "-" else read(text)
    assert got == value
    assert type(got) is type(value)


def test_empty_value_is_null():
    assert read("a:\nb: 1") == {"a": None, "b": 1}


def test_nan():
    assert math.isnan(read("[.nan]")[0])


def test_crlf_bom_free_text_and_comments():
    assert read("# c\r\na: 1 # c\r\nb:\r\n  - 2\r\n") == {"a": 1, "b": [2]}


def test_places():
    document = parse("a: 1\nb:\n  - x\n  - {c: 2,\n     d: 3}\n", "f.yaml")
    assert document.place(("b", 0)) == (3, 5)
    assert document.place(("b", 1, "d")) == (5, 9)
    assert document.place(("b", 1, "d"), key=True) == (5, 6)
    assert document.place(("b", 1, "absent")) == (4, 5)


def test_anchor_is_plain_sharing():
    assert read("a: &x [1, 2]\nb: *x") == {"a": [1, 2], "b": [1, 2]}


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("", 1, "empty"),
        ("# only a comment\n", 1, "empty"),
        ("a: 1\n\tb: 2", 2, "not tabs"),
        ("a: [1, 2", 1, "not YAML"),
        ("a: 'x", 1, "not YAML"),
        ("a: 1\n---\nb: 2", 2, "one scenario a file"),
        ("a: 1\nb: *nowhere", 2, "nowhere"),
        ("a: &x [*x]", 1, "contains itself"),
        ("a: &x {b: *x}", 1, "contains itself"),
        ("a: 1\nb: \x07", 2, "U+0007"),
        ("a: 1\nb: \x00", 2, "U+0000"),
        ("%YAML 3.0\n---\na: 1", 1, "not YAML"),
    ],
)
def test_refused(text, line, words):
    with pytest.raises(ScenarioError) as caught:
        parse(text, "f.yaml")
    assert caught.value.line == line
    assert words in str(caught.value)
    assert str(caught.value).startswith(f"f.yaml:{line}: ")


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("a: 1\nb: 2\na: 3", 3, "first given in line 1"),
        ("a:\n  x: 1\n  'x': 2", 3, "first given in line 2"),
        ("a: !!python/object/apply:os.system ['true']", 1, "never runs code"),
        ("a: !!python/name:os.system x", 1, "never runs code"),
        ("a: !custom 1", 1, "never runs code"),
        ("a: !!binary aGk=", 1, "never runs code"),
        ("a: !!set {x, y}", 1, "never runs code"),
        ("base: &b {x: 1}\na:\n  <<: *b", 3, "defaults"),
        ("a: !!int abc", 1, "cannot be read as int"),
        ("a: " + "9" * 5000, 1, "cannot be read as int"),
        ("? [1, 2]\n: 3", 1, "list or a mapping"),
    ],
)
def test_problem(text, line, words):
    (problem,) = parse(text, "f.yaml").problems
    assert problem.line == line
    assert words in problem.message


def test_billion_laughs():
    text = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 30)
    )
    with pytest.raises(ScenarioError, match=f"more than {MAX_VALUES:,} values"):
        parse(text, "f.yaml")


def test_deep_nesting():
    with pytest.raises(ScenarioError, match="nested too deeply"):
        parse("[" * 20_000, "f.yaml")


def test_too_long():
    with pytest.raises(ScenarioError, match="at most"):
        parse("#" * (1 << 21), "f.yaml")


text = st.text(st.characters(exclude_categories=["Cc", "Cf", "Cs", "Cn", "Co", "Zl", "Zp"]), max_size=20)
keys = text.filter(lambda key: key != "<<")
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**18), 10**18)
    | st.floats(allow_nan=False, allow_infinity=False)
    | text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.dictionaries(keys, json_values, min_size=1, max_size=4))
def test_json_is_read_as_json(data):
    assert read(json.dumps(data, ensure_ascii=False)) == data


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.text(max_size=200) | st.text("ab:-[]{}&*!|>'\"#%,?\n\t <0159.", max_size=60))
def test_garbage_is_refused_or_read(garbage):
    outcome = attempt(garbage)
    if isinstance(outcome, ScenarioError):
        breaks = sum(garbage.count(mark) for mark in "\n\r\x85\u2028\u2029")
        assert all(problem.line <= breaks + 1 for problem in outcome.problems)
    else:
        assert () in outcome.values


def attempt(text: str) -> Document | ScenarioError:
    try:
        return parse(text, "f.yaml")
    except ScenarioError as error:
        return error
