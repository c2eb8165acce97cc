"""Bad scenarios: one message a mistake, with its place, what was wanted and the nearest right word."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnbench.scenario import Scenario, ScenarioError, load, loads

HEAD = "name: t\nbackends: [eager]\n"
CASE = "heads: 4, head_dim: 64, seqlen: 128"


def refused(text: str) -> ScenarioError:
    with pytest.raises(ScenarioError) as caught:
        loads(text, "f.yaml")
    assert caught.value.exit_code == 2
    return caught.value


def test_the_base_is_good():
    assert len(loads(HEAD + f"cases: [{{{CASE}}}]").plan()) == 1


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("heads: 4, head_dims: 64, seqlen: 8", ["unknown key 'head_dims'", "Did you mean 'head_dim'?"]),
        ("heads: 4, head_dim: 60, seqlen: 8", ["60 is not a multiple of 8", "56 or 64"]),
        ("heads: 4, head_dim: 264, seqlen: 8", ["264", "less than or equal to 256"]),
        ("heads: 4, head_dim: 0, seqlen: 8", ["0", "greater than or equal to 8"]),
        ("heads: 4, head_dim: 64, value_head_dim: 20, seqlen: 8", ["20 is not a multiple of 8"]),
        ("heads: 16, kv_heads: 5, head_dim: 64, seqlen: 8", ["kv_heads 5 does not divide heads 16", "1, 2, 4, 8, 16"]),
        ("heads: 4, head_dim: 64, seqlen: 16k", ["text '16k'", "whole number, 16384"]),
        ("heads: 4, head_dim: 64, seqlen: '128'", ["text '128'", "without quotes"]),
        ("heads: 4, head_dim: 64, seqlen: 128.0", ["128.0", "whole number"]),
        ("heads: true, head_dim: 64, seqlen: 128", ["true", "whole number"]),
        ("heads: 4, head_dim: 64, seqlen: [128]", ["a list of 1", "whole number"]),
        ("heads: 4, head_dim: 64, seqlen: 0", ["greater than or equal to 1"]),
        ("heads: 4, head_dim: 64, seqlen: -5", ["-5"]),
        ("heads: 4, head_dim: 64, seqlen: 99999999999999999999", ["less than or equal to"]),
        ("heads: 4, head_dim: 64, seqlen: 8388608, batch: 64", ["536,870,912 tokens"]),
        (f"{CASE}, causal: yes", ["text 'yes'", "true or false"]),
        (f"{CASE}, dtype: bf61", ["fp32, fp16, bf16", "Did you mean 'bf16'?"]),
        (f"{CASE}, op: atention", ["Did you mean 'attention'?"]),
        (f"{CASE}, softmax_scale: .inf", ["finite"]),
        (f"{CASE}, softmax_scale: .nan", ["finite"]),
        (f"{CASE}, tokens: 1000", ["tokens 1000 is not a multiple of seqlen 128"]),
        (f"{CASE}, tokens: 1024, batch: 8", ["both `tokens` and `batch`"]),
        (f"{CASE}, lens: [1]", ["not both"]),
        (f"{CASE}, seqlen_q: 5", ["wanted `seqlen`, or `seqlen_q` and `seqlen_k`"]),
        (f"{CASE}, rows: 5", ["`rows` does not belong to attention"]),
        ("heads: 4, head_dim: 64, seqlen_q: 5", ["`seqlen_q` alone"]),
        ("heads: 4, head_dim: 64", ["`seqlen`", "none is given"]),
        ("seqlen: 64", ["missing: `heads`, `head_dim`"]),
        ("heads: 4, head_dim: 64, lens_q: [1, 2], lens_k: [3]", ["2 query lengths but 1 key lengths"]),
        ("heads: 4, head_dim: 64, lens_q: [1, 2]", ["`lens_q`; wanted `lens`"]),
        ("heads: 4, head_dim: 64, lens: [1, -2]", ["-2"]),
        ("heads: 4, head_dim: 64, lens: []", ["empty; wanted at least one"]),
        ("heads: 4, head_dim: 64, lens: [5], batch: 2", ["`batch` belongs to dense batches"]),
        ("heads: 4, head_dim: 64, lens: [16000000, 16000000, 16000000, 16000000, 16000000]", ["80,000,000 tokens"]),
        (
            "heads: 4, head_dim: 64, lengths: {distribution: lognormal, max: 9, tokens: 5}",
            ["wants `mean`"],
        ),
        (
            "heads: 4, head_dim: 64, lengths: {distribution: uniform, mean: 4, max: 9, tokens: 5}",
            ["belong to lognormal"],
        ),
        ("heads: 4, head_dim: 64, lengths: {distribution: uniform, max: 9}", ["either `tokens` or `sequences`"]),
        (
            "heads: 4, head_dim: 64, lengths: {distribution: uniform, min: 9, max: 2, tokens: 9}",
            ["min 9 is above max 2"],
        ),
        (
            "heads: 4, head_dim: 64, lengths: {distribution: lognormal, mean: 1e-9, min: 0, max: 9, tokens: 9}",
            ["more than 65,536 sequences"],
        ),
        ("op: attnres_phase1, rows: 4, hidden: 8", ["missing: `blocks`, `queries`"]),
        ("op: attnres_phase2, rows: 4, hidden: 8, blocks: 2", ["`blocks` does not belong to attnres_phase2"]),
        ("op: attnres_phase2, rows: -1, hidden: 8", ["-1"]),
        (f"{CASE}, backends: [trition]", ["unknown backend 'trition'", "Did you mean 'triton'?"]),
        (f"{CASE}, backends: [liger]", ["liger does not compute attention", "attnres_phase1"]),
        (f"{CASE}, backends: [eager, eager]", ["'eager' is given twice"]),
        (f"{CASE}, backends: []", ["empty; wanted at least one"]),
        (f"{CASE}, backends: eager", ["text 'eager'; wanted a list, as in [eager]"]),
        (f"{CASE}, passes: [foward]", ["Did you mean 'forward'?"]),
        (f"{CASE}, check: {{rtol: 1e-3}}", ["wanted both"]),
        (f"{CASE}, check: {{repeat: 3}}", ["unknown key 'repeat'", "Did you mean 'repeats'?"]),
        (f"{CASE}, matrix: {{seqlen: [1, 2]}}", ["`seqlen` is also an axis"]),
        (f"{CASE}, matrix: {{causal: true}}", ["true; wanted a list, as in [true]"]),
        (f"{CASE}, matrix: {{seed: []}}", ["empty; wanted at least one"]),
        (f"{CASE}, matrix: {{sed: [1]}}", ["unknown key 'sed'", "Did you mean 'seed'?"]),
        (f"{CASE}, exclude: [{{seqlen: 128}}]", ["`exclude` without `matrix`"]),
        (f"{CASE}, matrix: {{seed: [1, 2]}}, exclude: [{{seed: 3}}]", ["leaves out nothing"]),
        (f"{CASE}, matrix: {{seed: [1, 2]}}, exclude: [{{seed: [1, 2]}}]", ["leaves no case"]),
        (f"{CASE}, matrix: {{seed: [1, 2]}}, exclude: [{{seed: [1, x]}}]", ["text 'x'; wanted a whole number"]),
        (f'{CASE}, name: "a\\nb"', ["wanted text of one line"]),
        (f"{CASE}, tags: [{', '.join('abcdefghijklmnopqrstu')}]", ["a list of 21; wanted at most 20"]),
        (f"{CASE}, name: ''", ["empty; wanted some text"]),
        (f"{CASE}, tags: ['a b']", ["'a b'; wanted one word without spaces"]),
        ("just text", ["text"]),
    ],
)
def test_bad_case(entry, words):
    text = HEAD + "cases:\n" + (f"  - {{{entry}}}\n" if ":" in entry else f"  - {entry}\n")
    error = refused(text)
    (problem,) = error.problems
    assert problem.line == 4
    assert str(error).startswith("f.yaml:4: cases[0]")
    for word in words:
        assert word in str(error)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        (f"name: t\nbackends: [eager, tritn]\ncases: [{{{CASE}}}]", 2, ["backends[1]", "Did you mean 'triton'?"]),
        (f"name: t\nbackends: [eager]\nbaseline: sdpa_cudn\ncases: [{{{CASE}}}]", 3, ["Did you mean 'sdpa_cudnn'?"]),
        (f"name: t\nbackends: [eager]\nbaseline: liger\ncases: [{{{CASE}}}]", 3, ["computes none"]),
        (f"name: ../../etc\nbackends: [eager]\ncases: [{{{CASE}}}]", 1, ["leave the results folder"]),
        (f"name: a/b\nbackends: [eager]\ncases: [{{{CASE}}}]", 1, ["leave the results folder"]),
        (f"name: .\nbackends: [eager]\ncases: [{{{CASE}}}]", 1, ["name for a folder"]),
        (f'name: "a\\nb"\nbackends: [eager]\ncases: [{{{CASE}}}]', 1, ["name for a folder"]),
        (f"name: {'x' * 65}\nbackends: [eager]\ncases: [{{{CASE}}}]", 1, ["65 characters; wanted at most 64"]),
        (f"name: 12\nbackends: [eager]\ncases: [{{{CASE}}}]", 1, ["wanted text (put it into quotes)"]),
        (f"backends: [eager]\ncases: [{{{CASE}}}]", 1, ["name: missing"]),
        (f"name: t\ncases: [{{{CASE}}}]", 1, ["backends: missing"]),
        ("name: t\nbackends: [eager]", 1, ["cases: missing"]),
        ("name: t\nbackends: [eager]\ncases: []", 3, ["cases: empty; wanted at least one"]),
        ("name: t\nbackends: [eager]\ncases:", 3, ["nothing; wanted a list"]),
        (f"name: t\nbackends: [eager]\ncase: [{{{CASE}}}]\ncases: [{{{CASE}}}]", 3, ["Did you mean 'cases'?"]),
        (f"name: t\nbackends: [eager]\nmeasure: {{sample: 9}}\ncases: [{{{CASE}}}]", 3, ["Did you mean 'samples'?"]),
        (f"name: t\nbackends: [eager]\nmeasure: 5\ncases: [{{{CASE}}}]", 3, ["wanted a mapping of samples"]),
        (f"name: t\nbackends: [eager]\nmeasure: {{max_seconds: .inf}}\ncases: [{{{CASE}}}]", 3, ["finite"]),
        (f"name: t\nbackends: [sm90]\ncases: [{{{CASE}}}]\ndefaults: {{op: attnres_phase2}}", 3, ["does not belong"]),
        ("name: t\nbackends: [sm90]\ncases: [{op: attnres_phase2, rows: 4, hidden: 8}]", 3, ["no backend"]),
        ("[1, 2]", 1, ["a list of 2; wanted a mapping"]),
        ("hello", 1, ["wanted a mapping"]),
        ("name: !!python/object/apply:os.system ['touch pwned']", 1, ["never runs code"]),
    ],
)
def test_bad_scenario(text, line, words):
    error = refused(text)
    assert error.problems[0].line == line
    for word in words:
        assert word in str(error)


def test_python_tags_run_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(HEAD + "cases: !!python/object/apply:os.system ['touch pwned']\n")
    refused(HEAD + "cases: !!python/object/new:os.mkdir [pwned]\n")
    assert os.listdir(tmp_path) == []


def test_all_problems_in_line_order():
    text = """name: t
backends: [eager, tritn]
measure: {duty: sustaind}
cases:
  - {heads: 4, head_dim: 63, seqlen: 8}
  - {heads: 4, kv_heads: 3, head_dim: 64, seqlen: 8}
  - {heads: 4, head_dim: 64, seqlen: 8, cusal: true}
  - {heads: 4, head_dim: 64, lens_q: [1], lens_k: [1, 2]}
"""
    error = refused(text)
    assert [problem.line for problem in error.problems] == [2, 3, 5, 6, 7, 8]
    assert [problem.field for problem in error.problems][-3:] == [
        "cases[1].kv_heads",
        "cases[2].cusal",
        "cases[3].lens_k",
    ]


def test_problem_in_defaults_points_there():
    error = refused(
        "name: t\nbackends: [eager]\ndefaults:\n  heads: 6\n  kv_heads: 4\ncases: [{head_dim: 8, seqlen: 8}]"
    )
    assert error.line == 5
    assert "defaults.kv_heads" in str(error)


def test_one_mistake_over_many_combinations_is_told_once():
    error = refused(HEAD + "cases: [{heads: 6, kv_heads: 4, head_dim: 8, matrix: {seqlen: [1, 2, 3, 4, 5, 6]}}]")
    assert len(error.problems) == 1


@pytest.mark.parametrize("axes", [3, 12])
def test_matrix_explosion_is_refused_before_it_is_made(axes):
    names = ["seed", "heads", "head_dim", "batch", "seqlen_q", "seqlen_k", "causal", "dtype", "kv_heads"]
    values = "[" + ", ".join("8" for _ in range(100)) + "]"
    matrix = ", ".join(f"{name}: {values}" for name in names[:axes] if name not in ("causal", "dtype"))
    error = refused(HEAD + f"cases: [{{matrix: {{{matrix}}}}}]")
    assert "wanted at most 20,000" in str(error)
    assert "seed 100 × heads 100 × head_dim 100" in str(error)
    if axes == 3:
        assert "1,000,000 cases" in str(error)


def test_many_packed_sequences_are_refused():
    lens = "[" + ", ".join("1" for _ in range(20_000)) + "]"
    seeds = "[" + ", ".join(str(i) for i in range(200)) + "]"
    error = refused(HEAD + f"cases: [{{heads: 4, head_dim: 64, lens: {lens}, matrix: {{seed: {seeds}}}}}]")
    assert "packed sequences" in str(error)


def test_file_that_cannot_be_read(tmp_path):
    def message(path) -> str:
        with pytest.raises(ScenarioError) as caught:
            load(path)
        return str(caught.value)

    assert "no such file" in message(tmp_path / "absent.yaml")
    assert "is a directory" in message(tmp_path)
    assert "cannot be read" in message("a\0b.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"name: t\nx: \xff\xfe\x00")
    assert "binary.yaml:2: byte 0xFF is not UTF-8" in message(tmp_path / "binary.yaml")
    (tmp_path / "utf16.yaml").write_bytes("name: t".encode("utf-16"))
    assert "not UTF-8" in message(tmp_path / "utf16.yaml")
    (tmp_path / "huge.yaml").write_bytes(b"#" * (5 << 20))
    assert "at most" in message(tmp_path / "huge.yaml")
    os.mkfifo(tmp_path / "pipe.yaml")
    assert "not a regular file" in message(tmp_path / "pipe.yaml")
    if os.geteuid():
        (tmp_path / "locked.yaml").write_text("name: t")
        (tmp_path / "locked.yaml").chmod(0)
        assert "cannot be read: Permission denied" in message(tmp_path / "locked.yaml")


def test_own_kernel_file_must_be_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "s.yaml"
    file.write_text(f"name: t\nbackends: [eager, my/kernel.py:backend]\ncases: [{{{CASE}}}]")
    with pytest.raises(ScenarioError, match=r"s.yaml:2: backends\[1\]: no file 'my/kernel.py'"):
        load(file)
    (tmp_path / "my").mkdir()
    (tmp_path / "my" / "kernel.py").write_text("raise SystemExit('validation must not import this')")
    assert load(file).backends == ("eager", "my/kernel.py:backend")


KEYS = ["name", "backends", "baseline", "measure", "check", "defaults", "cases", "x"]
FIELDS = ["op", "heads", "kv_heads", "head_dim", "seqlen", "lens", "lens_q", "lens_k", "tokens", "batch", "matrix"]
FIELDS += ["exclude", "backends", "passes", "check", "rows", "hidden", "lengths", "causal", "dtype", "tags", "nmae"]
atoms = st.sampled_from(
    [
        "null",
        "true",
        "1",
        "8",
        "64",
        "-1",
        "0",
        "1e9",
        "eager",
        "attention",
        "attnres_phase2",
        "bf16",
        "''",
        "~x",
        "[]",
        "{}",
    ]
)
values = atoms | st.lists(atoms, max_size=3).map(lambda items: "[" + ", ".join(items) + "]")


def mapping(keys):
    return st.dictionaries(keys, values, max_size=5).map(
        lambda d: "{" + ", ".join(f"{key}: {value}" for key, value in d.items()) + "}"
    )


entries = st.dictionaries(
    st.sampled_from(FIELDS),
    values | mapping(st.sampled_from(FIELDS)) | mapping(st.sampled_from(FIELDS)).map("[{}]".format),
)
scenarios = st.dictionaries(st.sampled_from(KEYS), values | mapping(st.sampled_from(FIELDS)), max_size=6)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(scenarios, st.lists(entries, max_size=3))
def test_random_scenarios_are_planned_or_refused(top, cases):
    lines = [f"{key}: {value}" for key, value in ({"name": "t", "backends": "[eager]"} | top).items() if key != "cases"]
    lines.append("cases:")
    lines += ["  - {" + ", ".join(f"{key}: {value}" for key, value in entry.items()) + "}" for entry in cases]
    outcome = attempt("\n".join(lines))
    if isinstance(outcome, ScenarioError):
        assert outcome.problems
        assert all(1 <= problem.line <= len(lines) for problem in outcome.problems)
        assert list(outcome.problems) == sorted(outcome.problems)
    else:
        assert outcome.plan()


def attempt(text: str) -> Scenario | ScenarioError:
    try:
        return loads(text)
    except ScenarioError as error:
        return error


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_random_files_are_refused(tmp_path_factory, data):
    file = tmp_path_factory.getbasetemp() / "garbage.yaml"
    file.write_bytes(data)
    with pytest.raises(ScenarioError):
        load(file)
