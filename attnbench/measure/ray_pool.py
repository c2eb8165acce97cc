"""Boards of a Ray cluster, one actor a board. Ray places actors, restarts what dies and repeats the case it was at."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from attnbench.errors import UserError
from attnbench.measure import sweep
from attnbench.measure.job import CaseJob
from attnbench.measure.pool import Station, Survey, measure_once, refuse_sharing, unfinished
from attnbench.measure.provenance import kernel_hash, versions
from attnbench.measure.schedule import longest_first
from attnbench.measure.supervisor import Supervisor
from attnbench.results.record import Record

_ALIKE = ("attnbench", "torch", "triton", "cuda-core")
_PATIENCE_S = 20.0
_RETRIES = 5  # of one case; what keeps losing its worker is not tried for ever
_ACCELERATOR = "accelerator_type:"


@dataclass(frozen=True)
class Place:
    """What an actor says of itself: its board, the machine, and the code there."""

    station: Station
    node: str
    pid: int
    kernels: str
    packages: dict[str, str]


@dataclass(frozen=True)
class Finished:
    """All records of one case, from one board; none where the case belongs to another board than the actor's."""

    place: Place
    survey: Survey
    records: list[Record]


class BoardActor:
    """The actor: a supervisor on the board that Ray gave to this process. Ray may start it again on another board."""

    def __init__(self, device: str) -> None:
        self._supervisor = Supervisor(device)
        self._locks = ExitStack()
        self._survey: Survey | None = None
        self._place: Place | None = None

    def place(self) -> Place:
        """Start the worker and hold the board's lock."""
        if self._place is None:
            hello = self._supervisor.start()
            if hello.device == "cuda":
                self._locks.enter_context(sweep.gpu_lock(hello.uuid))
            station = Station(hello, sweep.describe_gpu(hello))
            self._place = Place(station, socket.gethostname(), os.getpid(), kernel_hash(), versions())
        return self._place

    def load(self, backends: Sequence[str]) -> None:
        self.place()
        self._supervisor.load(backends)

    def survey(self, dtypes: Sequence[str]) -> Survey:
        if self._survey is None:
            self.place()
            self._survey = measure_once(self._supervisor, dtypes) if dtypes else Survey()
        return self._survey

    def run(self, job: CaseJob, dtypes: Sequence[str]) -> Finished:
        place, survey = self.place(), self.survey(dtypes)
        if job.board is not None and job.board != place.station.hello.uuid:
            return Finished(place, survey, [])
        told = replace(job, ceilings=survey.ceilings) if survey.ceilings else job
        return Finished(
            place, survey, [message for message in self._supervisor.run(told) if isinstance(message, Record)]
        )


class RayPool:
    """A sweep over the cluster. A case's records are stored when all of them are there, from one board.

    Args:
        device: `cuda`, one board an actor, or `cpu`, one actor a node.
        address: `auto`, `host:port` or `ray://…`; None: RAY_ADDRESS, a cluster of this machine, else a new one.
        count: how many boards; None takes all.
        accelerator: Ray's accelerator type (`H100`, `H200`); may be left out where the cluster has only one.
    """

    def __init__(
        self, device: str, *, address: str | None = None, count: int | None = None, accelerator: str | None = None
    ) -> None:
        self._device = device
        self._address = address
        self._count = count
        self._accelerator = accelerator
        self._ours = False
        self._actors: list[Any] = []
        self._places: list[Place] = []
        self._seen: dict[tuple[str, str | None], Station] = {}
        self._dtypes: tuple[str, ...] = ()

    def __enter__(self) -> RayPool:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._actors and not self._ours:
            return
        ray = _ray()
        for actor in self._actors:
            ray.kill(actor, no_restart=True)
        self._actors = []
        if self._ours:
            ray.shutdown()

    def start(self) -> list[Station]:
        ray = _ray()
        if not ray.is_initialized():
            self._connect(ray)
        # An actor that dies is started again, elsewhere if need be, and its unfinished call is made again.
        remote = ray.remote(max_restarts=-1, max_task_retries=_RETRIES)(BoardActor)
        self._actors = [remote.options(**options).remote(self._device) for options in self._options(ray)]
        self._places = self._all(lambda actor: actor.place.remote())
        refuse_sharing(place.station.hello.uuid for place in self._places)
        _refuse_other_code(self._places)
        _refuse_other_models(self._places)
        for place in self._places:
            self._see(place)
        return self.stations

    @property
    def stations(self) -> list[Station]:
        return list(self._seen.values())

    def _see(self, place: Place) -> None:
        """Note a board with the machine that it stands in; one node's CPU counts once."""
        station = place.station
        gpu = {**station.gpu, "node": place.node} if station.gpu is not None else None
        self._seen.setdefault((place.node, station.hello.uuid), Station(station.hello, gpu))

    @property
    def places(self) -> list[Place]:
        """Where each actor was when last heard of."""
        return list(self._places)

    def load(self, backends: Sequence[str]) -> None:
        self._all(lambda actor: actor.load.remote(backends))

    def survey(self, dtypes: Sequence[str]) -> list[Survey]:
        self._dtypes = tuple(dtypes)
        return self._all(lambda actor: actor.survey.remote(self._dtypes))

    def execute(self, jobs: Sequence[CaseJob], store: sweep.Store) -> None:
        ray = _ray()
        waiting = longest_first(jobs)
        running: dict[Any, int] = {}
        left = len(jobs)

        def give(index: int) -> None:
            uuid = self._places[index].station.hello.uuid
            found = next((job for job in waiting if job.board is not None and job.board == uuid), None)
            found = found or next((job for job in waiting if job.board is None), None)
            if found is None:
                # A lost actor may be waiting for a board with its case: this one is free now.
                ray.kill(self._actors[index], no_restart=True)
                return
            waiting.remove(found)
            running[self._actors[index].run.remote(found, self._dtypes)] = index

        with sweep.bar(jobs) as advance:
            for index in range(len(self._actors)):
                give(index)
            while running:
                (done,), _ = ray.wait(list(running), num_returns=1)
                index = running.pop(done)
                case = self._get(done)
                self._places[index] = case.place
                self._see(case.place)
                for record in case.records:
                    store(record)
                    advance(record)
                left -= bool(case.records)
                give(index)
        if left:
            raise unfinished(left, None)

    def _connect(self, ray: Any) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            ray.init(address=self._address, log_to_driver=False, logging_level="warning")
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise UserError(f"no Ray cluster at {self._address or 'this machine'}: {error}") from None
        self._ours = True

    def _options(self, ray: Any) -> list[dict[str, Any]]:
        """One set of options an actor."""
        if self._device == "cpu":
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
            chosen = self._limited(nodes, "nodes with a CPU")
            return [
                {"num_cpus": 1, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=True)}
                for node in chosen
            ]
        resources = ray.cluster_resources()
        types = sorted(name.removeprefix(_ACCELERATOR) for name in resources if name.startswith(_ACCELERATOR))
        wanted = self._accelerator
        if wanted is not None and wanted not in types:
            raise UserError(
                f"the cluster has no {wanted}; it has {', '.join(types) or 'no GPU that Ray knows by type'}"
            )
        if wanted is None and len(types) > 1:
            raise UserError(f"the cluster has {', '.join(types)}: one run, one model; choose with --accelerator")
        wanted = wanted or (types[0] if types else None)
        total = sum(
            int(node["Resources"].get("GPU", 0))
            for node in ray.nodes()
            if node["Alive"] and (wanted is None or _ACCELERATOR + wanted in node["Resources"])
        )
        chosen = self._limited([wanted] * total, f"GPUs of type {wanted}" if wanted else "GPUs")
        return [{"num_cpus": 1, "num_gpus": 1, **({"accelerator_type": name} if name else {})} for name in chosen]

    def _limited(self, found: list[Any], what: str) -> list[Any]:
        if not found:
            raise UserError(f"the Ray cluster has no {what}")
        if self._count is not None and self._count > len(found):
            raise UserError(
                f"--gpus {self._count}: the cluster has {len(found)} {what}, and two workers are never put on one: "
                "they would time each other's work"
            )
        return found[: self._count]

    def _all(self, call: Callable[[Any], Any]) -> list[Any]:
        """`call` of every actor, side by side; says so where the cluster keeps us waiting."""
        ray = _ray()
        calls = [call(actor) for actor in self._actors]
        ready, late = ray.wait(calls, num_returns=len(calls), timeout=_PATIENCE_S)
        if late:
            print(f"{len(ready)} of {len(calls)} workers are ready; waiting for the cluster", file=sys.stderr)
        return [self._get(one) for one in calls]

    def _get(self, result: Any) -> Any:
        from ray.exceptions import RayActorError, RayTaskError

        try:
            return _ray().get(result)
        except RayTaskError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, UserError):
                raise UserError(str(cause)) from None
            raise
        except RayActorError as error:
            raise UserError(
                f"a worker was lost for good: {error}\nWhat was finished is stored; go on with --resume."
            ) from None


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise UserError("--executor ray: Ray is not installed: pip install 'attnbench[ray]'") from None
    return ray


def _refuse_other_code(places: Sequence[Place]) -> None:
    """Raises UserError where a machine has other kernels than this one, or other libraries than the rest."""
    here = kernel_hash()
    for place in places:
        if place.kernels != here:
            raise UserError(
                f"{place.node} has other kernel sources ({place.kernels}) than this machine ({here}); install the same "
                "commit of attnbench on every machine, or share its folder"
            )
        for name in _ALIKE:
            one, other = places[0].packages.get(name), place.packages.get(name)
            if one != other:
                raise UserError(f"{places[0].node} has {name} {one}, {place.node} has {other}; wanted one version")


def _refuse_other_models(places: Sequence[Place]) -> None:
    names = {str(place.station.hello.board): place.node for place in places}
    if len(names) > 1:
        found = ", ".join(f"{name} ({node})" for name, node in names.items())
        raise UserError(f"boards of different models in one run: {found}; choose with --accelerator")
