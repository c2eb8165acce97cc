"""The worker's side of a case: inputs and references once, then each backend built, checked, timed, checked again."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from attnbench import backends, ops
from attnbench.backends.base import Backend, Prepared
from attnbench.measure import interpreter
from attnbench.measure.alone import batched, variant
from attnbench.measure.job import CaseJob, Done, Message, Phase, Row, blank_record
from attnbench.measure.memory import free_bytes, needed
from attnbench.measure.outcome import classify, is_sticky, tail
from attnbench.measure.timer import Timed
from attnbench.measure.timing import Session, pass_call, pass_truth, time_cpu, time_device
from attnbench.measure.verify import Tolerance, Truth, Verdict, compute, deaf, judge, verify
from attnbench.results.record import Record
from attnbench.scenario.case import op_name

Emit = Callable[[Message], None]
APART = ("eager", "compile")
"""Never interleaved as the baseline unless a scenario says so: slow ones would idle the board between two samples."""


class CaseRunner:
    """Runs one `CaseJob`. Every row that was asked for is emitted exactly once, unless the process dies."""

    def __init__(self, session: Session, job: CaseJob, emit: Emit) -> None:
        self.session = session
        self.job = job
        self.emit = emit
        self._truth: Truth | None = None
        self._baseline: dict[str, Timed] = {}
        self._baseline_prepared: tuple[Truth, Prepared] | None = None
        self._baseline_usable = True
        self._open: list[tuple[str, str]] = []

    def run(self) -> None:
        """Emit a record for every row and pass, then `Done`.

        On a GPU everything runs on the clock's stream: autograd nodes stay on the stream of their forward, and memory
        is reused by stream.
        """
        if self.job.device == "cuda":
            with torch.cuda.stream(self.session.clock.stream):
                self._run()
        else:
            self._run()

    def _run(self) -> None:
        replace_worker = False
        for row in self.job.rows:
            self._open = [(row.backend, pass_) for pass_ in row.passes]
            try:
                self._row(row)
            except Exception as error:
                outcome, reason = classify(error)
                sticky = is_sticky(error)
                for backend, pass_ in list(self._open):
                    record = self._blank(backend, pass_, outcome, reason)
                    record.stderr_tail = tail(error)
                    self._emit(record)
                del error
                if sticky:
                    replace_worker = True
                    break
            self._tidy()
        self._close_baseline()
        self.emit(Done(replace=replace_worker))

    def _emit(self, record: Record) -> None:
        record.finished_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._open = [row for row in self._open if row != (record.backend, record.pass_)]
        self.emit(record)

    def _blank(self, backend: str, pass_: str, outcome: str, reason: str | None = None) -> Record:
        return blank_record(self.job, backend, pass_, outcome, reason)

    def _phase(self, name: str, row: Row | None) -> None:
        limit = self.job.measure.timeout_seconds
        if self.job.device == "cpu":
            limit = max(limit, interpreter.seconds(self.job.case))
        self.emit(Phase(name, row.backend if row else None, limit, row.passes if row else ()))

    def _end(self, row: Row, outcome: str, reason: str | None, verdict: Verdict | None = None, **fields: Any) -> None:
        """One record with the same outcome for each pass of a row that still lacks one."""
        for _, pass_ in list(self._open):
            record = self._blank(row.backend, pass_, outcome, reason)
            for name, value in fields.items():
                setattr(record, name, value)
            if verdict is not None:
                _store_verdict(record, verdict)
            self._emit(record)

    def _row(self, row: Row) -> None:
        case, device = self.job.case, self.job.device
        self._phase("prepare", row)
        backend = backends.backend(row.backend)
        reason = backend.supports(case, device)
        if reason is not None:
            return self._end(row, "unsupported", reason)
        interpreted = device == "cpu" and row.backend == "triton"
        if interpreted and (reason := interpreter.too_big(case)) is not None:
            return self._end(row, "unsupported", reason, flags=["interpreted"])
        checked = self.job.check.enabled
        short = needed(ops.operation(op_name(case)), case, row.backend, checked=checked and self._needs_reference())
        free = free_bytes(device)
        if short > free:
            words = f"needs about {short / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free"
            return self._end(row, "skipped-memory", words)
        launches = interpreter.launches()
        prepared, built = self._build(row, backend, warm=not interpreted)
        interpreted = interpreted or interpreter.launches() > launches
        built["flags"] = ["interpreted"] if interpreted else []
        truth = self._truth_for(prepared)
        verdict = None
        if checked:
            self._phase("check", row)
            verdict = self._verify(truth, prepared)
            if not verdict.passed:
                if row.backend == self.job.baseline:
                    self._baseline_usable = False
                return self._end(row, "check-failed", verdict.reason, verdict, **built)
            if self.job.alone and batched(case):
                built["batch_variant"] = variant(backend, truth, prepared)
        if interpreted or not self.job.timed:
            return self._end(row, "checked", prepared.reason, verdict, **built)
        for pass_ in row.passes:
            record = self._blank(row.backend, pass_, "ok", prepared.reason)
            for name, value in built.items():
                setattr(record, name, list(value) if isinstance(value, list) else value)
            if verdict is not None:
                _store_verdict(record, verdict)
            if pass_ != "forward" and not prepared.differentiable:
                record.outcome, record.reason = "unsupported", "has no backward"
            else:
                self._phase("time", row)
                self._time(row, truth, prepared, record)
            self._emit(record)
        return None

    def _needs_reference(self) -> bool:
        return self._truth is None or "reference" not in self._truth.__dict__

    def _shared(self) -> Truth:
        """The case's inputs and references, made on first use."""
        if self._truth is None:
            self._phase("inputs", None)
            operation = ops.operation(op_name(self.job.case))
            truth = Truth(operation, self.job.case, self.job.device, _inputs(operation, self.job))
            if self.job.check.enabled:
                self._phase("reference", None)
                _ = truth.reference, truth.yardstick  # before any backend can touch the inputs
            self._truth = truth
        return self._truth

    def _truth_for(self, prepared: Prepared) -> Truth:
        return self._shared() if prepared.lse_grad else self._shared().without_lse_grad

    def _build(self, row: Row, backend: Backend, *, warm: bool) -> tuple[Prepared, dict[str, Any]]:
        """Prepare, tune and call once, so that compilation is over; returns the fields of the record that say so."""
        shared = self._shared()
        self._phase("build", row)
        began = time.perf_counter()
        prepared = backend.prepare(self.job.case, shared.inputs)
        fields: dict[str, Any] = {"ran_by": prepared.ran_by}
        tuned_s = 0.0
        if prepared.tune is not None and warm and self.job.timed:
            self._phase("tune", row)
            start = time.perf_counter()
            fields["tuned"] = prepared.tune()
            tuned_s = fields["tune_s"] = time.perf_counter() - start
        if warm:
            self._phase("build", row)
            truth = self._truth_for(prepared)
            compute(truth.operation, truth.inputs, prepared)
            if self.job.device == "cuda":
                torch.cuda.synchronize()
        fields["build_s"] = time.perf_counter() - began - tuned_s
        return prepared, fields

    def _verify(self, truth: Truth, prepared: Prepared) -> Verdict:
        check = self.job.check
        tolerance = None
        if check.rtol is not None and check.atol is not None:
            tolerance = Tolerance(check.rtol, check.atol)
        memory = truth.operation.memory(self.job.case)
        return verify(
            truth,
            prepared,
            repeats=check.repeats,
            deterministic=prepared.deterministic,
            workspace=2 * memory.get("kernel", 1 << 28),
            tolerance=tolerance,
        )

    def _time(self, row: Row, truth: Truth, prepared: Prepared, record: Record) -> None:
        if self.job.device == "cpu":
            time_cpu(self.job, truth, prepared, record)
            self._check_skipping(truth, prepared, record)
            return
        baseline = self._baseline_for(row, record.pass_)
        result = time_device(self.session, self.job, truth, prepared, record, baseline)
        record.baseline = self.job.baseline if baseline is not None else None
        check = self.job.check
        if check.enabled and check.after:
            self._check_after(pass_truth(truth, prepared, record.pass_), result, record)
            self._check_skipping(truth, prepared, record)

    def _check_after(self, truth: Truth, result: dict[str, torch.Tensor], record: Record) -> None:
        """Judge what the timed calls wrote, and that they left the inputs alone."""
        after = judge(truth, result)
        bad = {name: check for name, check in after.items() if not check.passed}
        changed = truth.restore()
        if changed:
            record.reason = f"changed its inputs in the timed calls: {', '.join(changed)}"
        elif bad:
            name, first = next(iter(bad.items()))
            record.reason = f"wrong in the timed calls: {name}: {first.message or 'beyond its error budget'}"
        else:
            return
        record.check = {**record.check, **bad}
        record.outcome = "check-failed"
        _forget_times(record)

    def _check_skipping(self, truth: Truth, prepared: Prepared, record: Record) -> None:
        """After the timed calls other inputs must still give another result."""
        check = self.job.check
        if not (check.enabled and check.after and record.pass_ == "forward" and record.outcome == "ok"):
            return
        with torch.no_grad():
            before = prepared.forward()
        if deaf(truth, prepared.forward, before):
            record.outcome = "check-failed"
            record.reason = "after the timed calls: gave its earlier result for other inputs at the same addresses"
            _forget_times(record)

    def _baseline_for(self, row: Row, pass_: str) -> Timed | None:
        """The baseline's timed callable of this pass, None for the baseline itself, eager, or where it cannot run."""
        name = self.job.baseline
        if name is None or name == row.backend or row.backend in APART or not self._baseline_usable:
            return None
        if pass_ in self._baseline:
            return self._baseline[pass_]
        try:
            if self._baseline_prepared is None:
                backend = backends.backend(name)
                if backend.supports(self.job.case, self.job.device) is not None:
                    self._baseline_usable = False
                    return None
                prepared = backend.prepare(self.job.case, self._shared().inputs)
                self._baseline_prepared = (self._truth_for(prepared), prepared)
            truth, prepared = self._baseline_prepared
            if pass_ != "forward" and not prepared.differentiable:
                return None
            self._baseline[pass_] = self.session.clock.prepare(pass_call(truth, prepared, pass_))
        except Exception as error:
            if is_sticky(error):
                raise
            self._baseline_usable = False
            return None
        return self._baseline[pass_]

    def _close_baseline(self) -> None:
        for timed in self._baseline.values():
            timed.close()
        self._baseline.clear()
        self._baseline_prepared = None
        self._truth = None
        self._tidy()

    def _tidy(self) -> None:
        gc.collect()
        if self.job.device != "cuda":
            return
        try:
            free, total = torch.cuda.mem_get_info()
            if free < total // 2:  # giving memory back costs more than a short row
                torch.cuda.empty_cache()
        except Exception:  # a lost context; the next row will say so by its own error
            return


def _inputs(operation: Any, job: CaseJob) -> Any:
    """The case's inputs in the memory layout that the job names."""
    inputs = operation.make_inputs(job.case, job.device)
    if not job.layout:
        return inputs
    from attnbench.ops.corpus import apply_layout

    return apply_layout(inputs, job.layout)


def _store_verdict(record: Record, verdict: Verdict) -> None:
    record.check = {name: replace(check) for name, check in verdict.tensors.items()}
    record.flags = [*record.flags, *verdict.flags]


def _forget_times(record: Record) -> None:
    record.median_ms = record.ci_ms = record.kernel_ms = record.call_ms = record.warm_ms = None
    record.split_ms = record.tflops = record.tb_s = record.peak_share = record.energy_j = None
    record.baseline_median_ms = None
    record.samples_ms = []
