"""The registry, what backends support, and a user's own backend by name."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attnbench.backends import UnknownBackend, available, backend, ours
from attnbench.backends.base import Backend
from attnbench.backends.custom import LoadError, from_function, load
from attnbench.backends.names import BUILTIN
from attnbench.measure.verify import Truth, Verdict, verify
from attnbench.ops import operation
from attnbench.scenario.case import AttentionCase

ATTENTION = operation("attention")
DENSE = AttentionCase("fp16", 4, 2, 16, True, batch=1, seqlen_q=20, seqlen_k=33)
PACKED = AttentionCase("fp16", 4, 2, 16, True, layout="varlen", seqlens_q=(3, 0, 9), seqlens_k=(4, 2, 5))
EXAMPLES = Path(__file__).parents[2] / "examples" / "my_kernel"


def judged(subject: Backend, case: AttentionCase) -> Verdict:
    inputs = ATTENTION.make_inputs(case, "cpu")
    prepared = subject.prepare(case, inputs)
    truth = Truth(ATTENTION, case, "cpu", inputs)
    return verify(
        truth if prepared.lse_grad else truth.without_lse_grad, prepared, deterministic=prepared.deterministic
    )


def test_every_listed_backend_loads_without_torch() -> None:
    assert set(available()) <= set(BUILTIN)
    assert [name for name in BUILTIN if ours(name)] == ["triton", "sm90_mma", "sm90"]
    code = (
        "import sys; from attnbench.backends import available, backend; "
        "[backend(name) for name in available()]; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    for name in available():
        assert isinstance(backend(name), Backend)
        assert backend(name).name == name


def test_an_unknown_name_gets_the_nearest_one() -> None:
    with pytest.raises(UnknownBackend, match="did you mean sdpa_flash"):
        backend("sdpa_flesh")
    with pytest.raises(UnknownBackend, match="eager, compile"):
        backend("xyz")


@pytest.mark.parametrize("case", [DENSE, PACKED, replace(PACKED, dtype="fp32", causal=False)], ids=lambda c: c.label)
@pytest.mark.parametrize("name", ["eager", "triton"])
def test_backends_are_right_on_the_cpu(name: str, case: AttentionCase) -> None:
    assert backend(name).supports(case, "cpu") is None
    verdict = judged(backend(name), case)
    assert verdict.passed, verdict.reason
    assert not verdict.flags


def test_reasons_of_those_that_do_not_take_a_case() -> None:
    longer = replace(DENSE, seqlen_q=40)
    reasons = {
        ("sdpa_flash", DENSE, "cpu"): "CUDA GPU",
        ("sdpa_flash", DENSE, "cuda"): "top-left aligned",
        ("sdpa_cudnn", longer, "cuda"): "top-left aligned",
        ("sdpa_cudnn", PACKED, "cuda"): "packed",
        ("sdpa_flash", replace(DENSE, causal=False, dtype="fp32"), "cuda"): "fp16 and bf16 only",
        ("sdpa_flash", replace(DENSE, causal=False, value_head_dim=32), "cuda"): "value head dim 32",
        ("sdpa_flash", replace(DENSE, causal=False, seqlen_k=0), "cuda"): "at least one",
        ("flex", DENSE, "cpu"): "no backward on the CPU",
        ("triton", replace(DENSE, head_dim=20), "cpu"): "multiple of 8",
        ("triton", replace(DENSE, head_dim=264), "cuda"): "256",
        ("compile", replace(PACKED, seqlens_q=(1,) * 99, seqlens_k=(1,) * 99), "cuda"): "unrolled",
        ("fa4", DENSE, "cuda"): "not installed",
        ("sm90", replace(DENSE, dtype="fp32"), "cuda"): "fp32",
        ("sm90_mma", DENSE, "cpu"): "CUDA GPU",
    }
    for (name, case, device), reason in reasons.items():
        found = backend(name).supports(case, device)
        assert found is not None, name
        assert reason in found
    for name in ("sdpa_flash", "sdpa_cudnn"):
        assert backend(name).supports(replace(DENSE, seqlen_q=1), "cuda") is None  # one query sees every key
        assert backend(name).supports(replace(DENSE, seqlen_q=33), "cuda") is None
    assert backend("sdpa_flash").supports(PACKED, "cuda") is None
    assert backend("flex").supports(PACKED, "cuda") is None


def test_flex_hides_what_the_definition_hides() -> None:
    from attnbench.backends.attention_call import attention_call
    from attnbench.backends.flex import _causal_mask, _packed_mask

    case = replace(PACKED, seqlens_q=(3, 0, 4), seqlens_k=(5, 2, 2))
    for causal in (True, False):
        case = replace(case, causal=causal)
        visible = _packed_mask(case, attention_call(ATTENTION.make_inputs(case, "cpu")))
        query, key = torch.meshgrid(torch.arange(7), torch.arange(9), indexing="ij")
        got = visible(0, 0, query, key)
        want = torch.zeros(7, 9, dtype=torch.bool)
        starts_q = starts_k = 0
        for seqlen_q, seqlen_k in case.lengths:
            for i in range(seqlen_q):
                for j in range(seqlen_k):
                    want[starts_q + i, starts_k + j] = not causal or j <= i + seqlen_k - seqlen_q
            starts_q, starts_k = starts_q + seqlen_q, starts_k + seqlen_k
        assert torch.equal(got, want)
    assert [bool(_causal_mask(2)(0, 0, 1, j)) for j in range(6)] == [True, True, True, True, False, False]


def test_compile_is_right_and_unrolls_packed_sequences() -> None:
    from attnbench.backends.compiled import COMPILE, _attention

    for case in (DENSE, PACKED):
        assert COMPILE.supports(case, "cpu") is None
        inputs = ATTENTION.make_inputs(case, "cpu")
        traced = torch.compile(_attention(case, inputs), backend="aot_eager", fullgraph=True)
        got = traced(*inputs.tensors.values())
        want = ATTENTION.eager(case, inputs)
        for name in ("out", "lse"):
            torch.testing.assert_close(got[name], want[name])
        tensors, cotangents = tuple(inputs.tensors.values()), [torch.randn_like(got[name]) for name in ("out", "lse")]
        found, wanted = (torch.autograd.grad([x["out"], x["lse"]], tensors, cotangents) for x in (got, want))
        torch.testing.assert_close(found, wanted, rtol=2**-6, atol=2**-6)


# --- a user's own ---


def write(folder: Path, text: str, name: str = "mine.py") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def test_errors_of_a_user_s_own_backend_say_what_is_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "x = 1\ndef f(q, k, v): ...\nclass C:\n    def supports(self): ...\n")
    broken = write(tmp_path, "import missing_of_all_modules\n", "broken.py")
    for name, words in {
        f"{tmp_path}/none.py:BACKEND": "there is no file",
        f"{path}:BACKEND": "has no 'BACKEND'",
        f"{path}:x": r"is a int without supports and prepare: want an object with supports\(case, device\)",
        f"{path}:f": "from_function",
        f"{path}:C": "is a class.*instance",
        f"{broken}:x": "raised ModuleNotFoundError: No module named 'missing_of_all_modules'",
        "no_such_package.kernels:BACKEND": "there is no module 'no_such_package'",
        "attnbench.nothing:BACKEND": "there is no module 'attnbench.nothing'",
    }.items():
        with pytest.raises(LoadError, match=words):
            load(name)
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "import missing_of_all_modules\n", "needy_module.py")
    with pytest.raises(LoadError, match="needs 'missing_of_all_modules', which is missing"):
        load("needy_module:BACKEND")


def test_a_file_may_import_its_neighbours(tmp_path: Path) -> None:
    write(tmp_path, "def reason(case, device): return 'never'\n", "neighbour_of_mine.py")
    path = write(
        tmp_path,
        "from neighbour_of_mine import reason\n"
        "from attnbench.backends.custom import from_function\n"
        "class Holder: inner = from_function(lambda q, k, v, causal: q, supports=reason)\n",
    )
    found = backend(f"{path}:Holder.inner")
    assert found.supports(DENSE, "cpu") == "never"


def test_a_function_is_called_with_the_keywords_that_it_has() -> None:
    from attnbench.ops.attention_eager import attention

    whole = from_function(attention)
    assert whole.name == "attention"
    assert whole.supports(PACKED, "cpu") is None
    assert judged(whole, PACKED).passed
    dense_only = from_function(lambda q, k, v, causal: attention(q, k, v, causal=causal)[0], lse_grad=False)
    assert dense_only.supports(PACKED, "cpu") == "takes no cu_seqlens_q: dense input only"
    verdict = judged(dense_only, DENSE)
    assert verdict.passed, verdict.reason
    assert verdict.flags == ["without lse"]
    assert from_function(lambda q, k, v: q).supports(DENSE, "cpu") == "takes no causal: full attention only"
    assert from_function(attention, devices=("cuda",)).supports(DENSE, "cpu") == "runs on cuda only"
    assert from_function(attention, op="attnres_phase1").supports(DENSE, "cpu") == "computes attnres_phase1 only"


def test_a_wrong_function_fails() -> None:
    from attnbench.ops.attention_eager import attention

    def top_left(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
        seen = k[:, : q.shape[1]], v[:, : q.shape[1]]
        return attention(q, *seen, causal=causal)  # type: ignore[return-value]

    assert not judged(from_function(top_left), DENSE).passed


@pytest.mark.parametrize("name", ["python_function.py", "triton_kernel.py"])
@pytest.mark.parametrize(
    "case",
    [
        DENSE,
        replace(DENSE, causal=False, heads=2),
        replace(DENSE, dtype="fp32", seqlen_q=40, seqlen_k=40, batch=2),
        replace(DENSE, seqlen_q=40, seqlen_k=7),
        PACKED,
    ],
    ids=lambda c: c.label,
)
def test_examples_are_right_or_say_why_not(name: str, case: AttentionCase) -> None:
    subject = backend(f"{EXAMPLES / name}:backend")
    reason = subject.supports(case, "cpu")
    if reason is not None:
        assert case is PACKED or "sees no key" in reason
        return
    verdict = judged(subject, case)
    assert verdict.passed, verdict.reason


def test_the_example_scenario_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "attnbench", "run", str(EXAMPLES / "scenario.yaml"), "--only", "grouped*"]
    done = subprocess.run(
        [*command, "--device", "cpu", "--out", str(tmp_path)],
        cwd=EXAMPLES.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (records,) = tmp_path.glob("*/cases.jsonl")
    outcomes = {}
    for line in records.read_text().splitlines():
        record = json.loads(line)
        outcomes[Path(record["backend"]).name.split(":")[0], record["pass"]] = record["outcome"]
    assert outcomes["python_function.py", "backward"] == "ok"
    assert outcomes["triton_kernel.py", "backward"] == "checked"
    assert outcomes["cuda_kernel.py", "forward"] == "unsupported"
