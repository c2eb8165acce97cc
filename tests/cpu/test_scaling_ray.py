"""A sweep over a local Ray cluster: what dies is started again, no finished case is lost, none is counted twice."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attnbench.cli import places
from attnbench.cli.run import run
from attnbench.errors import UserError
from attnbench.measure.provenance import provenance
from attnbench.measure.ray_pool import RayPool
from attnbench.results.runs import read_run

ray: Any = pytest.importorskip("ray")
SMOKE = Path(__file__).parents[2] / "scenarios" / "smoke.yaml"
QUICK = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 3}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without processors and two nodes of one; what a test removes stays removed."""
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "_system_config": QUICK})
    nodes = [found.add_node(num_cpus=1) for _ in range(2)]
    found.wait_for_nodes()
    ray.init(address=found.address, log_to_driver=False, logging_level="error")
    yield found, nodes
    ray.shutdown()
    found.shutdown()


def test_an_actor_asks_for_one_board_of_the_model(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulated board: Ray hands it out, and the actor's own words come back when CUDA knows nothing of it."""
    found, _ = cluster
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # Ray hands out no more than its nodes may see
    node = found.add_node(num_cpus=1, num_gpus=1, resources={"accelerator_type:H200": 1})
    found.wait_for_nodes()
    try:
        with RayPool("cuda", accelerator="H200", count=1) as pool, pytest.raises(UserError, match="no CUDA device"):
            pool.start()
        with (
            RayPool("cuda", count=2) as pool,
            pytest.raises(UserError, match="has 1 GPUs of type H200, and two workers"),
        ):
            pool.start()
        with RayPool("cuda", accelerator="H100") as pool, pytest.raises(UserError, match="no H100; it has H200"):
            pool.start()
    finally:
        found.remove_node(node)


def stored_lines(results: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in results.glob("*/cases.jsonl"))


def wait_for(results: Path, lines: int) -> None:
    deadline = time.monotonic() + 120
    while stored_lines(results) < lines:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_wishes_that_the_cluster_cannot_meet(cluster: Any) -> None:
    for pool, words in (
        (RayPool("cpu", count=3), "has 2 nodes with a CPU, and two workers are never put on one"),
        (RayPool("cuda"), "has no GPUs"),
        (RayPool("cuda", accelerator="H200"), "has no H200"),
    ):
        with pool, pytest.raises(UserError, match=words):
            pool.start()


def test_smoke_survives_the_loss_of_a_worker_and_of_a_node(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, nodes = cluster
    pools: list[RayPool] = []
    same = provenance()
    monkeypatch.setattr("attnbench.cli.run.provenance", lambda own: same)

    def pool(*_: object) -> RayPool:
        pools.append(RayPool("cpu"))
        return pools[-1]

    monkeypatch.setattr(places, "pool_of", pool)
    events: list[str] = []

    def disturb() -> None:
        wait_for(tmp_path, 4)
        os.kill(pools[0].places[0].pid, signal.SIGKILL)
        events.append("worker")
        wait_for(tmp_path, 12)
        found.remove_node(nodes[1], allow_graceful=False)
        events.append("node")

    thread = threading.Thread(target=disturb, daemon=True)
    thread.start()
    assert run(scenario=SMOKE, out=tmp_path, device="cpu", executor="ray") == 0
    thread.join(10)
    assert events == ["worker", "node"]
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    stored = read_run(folder)
    assert stored.finished
    assert Counter(Counter((r.case_id, r.backend, r.pass_) for r in stored.lines).values()) == {1: stored.info["rows"]}
    assert {r.outcome for r in stored.lines} == {"ok", "checked"}
    assert stored.info["gpu"] is None


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with RayPool("cpu") as pool, pytest.raises(UserError, match=r"pip install 'attnbench\[ray\]'"):
        pool.start()
