"""Where a run's cases go: one board, several of this machine, or those of a Ray cluster."""

from __future__ import annotations

from attnbench.errors import UserError
from attnbench.measure.jobs import choose_device
from attnbench.measure.pool import LocalPool, Pool, local_boards
from attnbench.measure.supervisor import Supervisor


def pool_of(device: str, gpus: str | None, executor: str, address: str | None, accelerator: str | None) -> Pool:
    """The pool that `run`'s options ask for, not started yet; options that contradict each other are a UserError."""
    if executor == "ray":
        from attnbench.measure.ray_pool import RayPool

        count = None if gpus in (None, "all") else _count(gpus)
        return RayPool(device, address=address, count=count, accelerator=accelerator)
    refuse_ray_options(address, accelerator)
    if gpus is None:
        return LocalPool([Supervisor(device)])
    if device == "cpu":
        raise UserError(f"--gpus {gpus}: not on the CPU; `attnbench doctor` says why there is no GPU")
    return LocalPool([Supervisor(device, board=board.uuid) for board in local_boards(gpus)])


def planned_boards(gpus: str | None, executor: str) -> int | None:
    """Boards to plan for without using any; None where nothing was said of several."""
    if gpus not in (None, "all"):
        return _count(gpus)
    if executor == "ray":
        raise UserError("--dry-run asks no cluster: say how many boards to plan for with --gpus N")
    return None if gpus is None else len(local_boards(gpus))


def device_of(device: str | None, gpus: str | None, executor: str, dry_run: bool) -> str:
    """The device of a run. Boards of a cluster, and those of a plan, need not be in this machine."""
    if device is None and (executor == "ray" or (dry_run and gpus is not None)):
        return "cuda"
    return choose_device(device)


def refuse_ray_options(address: str | None, accelerator: str | None) -> None:
    for option, value in (("--address", address), ("--accelerator", accelerator)):
        if value is not None:
            raise UserError(f"{option} {value} belongs to --executor ray")


def _count(gpus: str | None) -> int:
    if gpus is None or not gpus.isdecimal() or int(gpus) < 1:
        raise UserError(f"--gpus {gpus}: wants `all` or a number of boards")
    return int(gpus)
