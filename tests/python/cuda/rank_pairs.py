# SPDX-License-Identifier: Apache-2.0
"""Cases of two ranks, in pairs of processes. A case that fails, or hangs, on one rank leaves the
other in the middle of an exchange: both are ended then, and a fresh pair goes on behind it."""

import datetime
import faulthandler
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

WORLD = 2
PASSED = "passed"
START, END = "start", "end"  # cases, too: the group is made, and left
GRACE = 5  # seconds for the other rank's own words

# Over sockets of the loopback, whatever adapters the machine has.
NCCL_ON_ONE_MACHINE = {
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
}


class Limits(NamedTuple):
    """Seconds: to import PyTorch and make the group, for a case, and until the last pair starts."""

    start: float = 40
    case: float = 20
    total: float = 60


def run_here(
    cases: dict[str, Callable[[], None]], names: Sequence[str], rank: int, folder: Path
) -> None:
    """On a rank: the cases in turn, what came of each into a file, until one fails."""
    faulthandler.register(signal.SIGUSR1, (folder / f"stack.{rank}").open("w"))
    for name in names:
        outcome = PASSED
        try:
            cases[name]()
        except BaseException:
            outcome = traceback.format_exc()
        part = folder / f".{name}.{rank}"
        part.write_text(outcome)
        part.rename(folder / f"{name}.{rank}")
        if outcome != PASSED:
            os._exit(1)  # nothing that waits for the device or the other rank


def join_group(rank: int, backend: str, folder: Path) -> None:
    """This rank's process group; its first exchange is what connects."""
    import torch
    import torch.distributed as dist

    os.environ.update(NCCL_ON_ONE_MACHINE)
    if torch.cuda.device_count() < WORLD:
        os.environ["NCCL_HOSTID"] = f"host {rank}"  # else NCCL refuses two ranks on one GPU
    torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=Limits().case - 5)
    store = dist.FileStore(str(folder / "store"), WORLD)
    dist.init_process_group(backend, store=store, rank=rank, world_size=WORLD, timeout=limit)
    one = torch.ones(1, device="cuda")
    dist.all_reduce(one)
    assert one.item() == WORLD


def read(folder: Path, name: str, rank: int) -> str:
    path = folder / f"{name}.{rank}"
    return path.read_text() if path.exists() else ""


def wait(processes: list, names: Sequence[str], folder: Path, limits: Limits) -> str:
    """Until all have ended, or one has failed and the other had its grace, or a case takes too
    long; why, if that is not the end of all cases."""
    at, until = 0, time.monotonic() + limits.start
    while any(process.is_alive() for process in processes):
        while at < len(names) and all(read(folder, names[at], r) for r in range(WORLD)):
            at, until = at + 1, time.monotonic() + limits.case
        if any(process.exitcode for process in processes):
            until = min(until, time.monotonic() + GRACE)
            return wait_for_end(processes, until)
        if time.monotonic() > until:
            return "hung"
        time.sleep(0.05)
    return ""


def wait_for_end(processes: list, until: float) -> str:
    for process in processes:
        process.join(max(0, until - time.monotonic()))
    return "ended: the other rank had failed"


def run_pair(target: Callable, names: Sequence[str], folder: Path, limits: Limits, more) -> list:
    """Runs target(rank, names, folder, *more) on each rank, and ends what is still there; why each
    ended that did not by itself."""
    context = multiprocessing.get_context("spawn")
    arguments = (list(names), folder, *more)
    processes = [context.Process(target=target, args=(r, *arguments)) for r in range(WORLD)]
    for process in processes:
        process.start()
    why, reasons = wait(processes, names, folder, limits), []
    for rank, process in enumerate(processes):
        if process.is_alive():
            reasons.append(f"{why}\n{stack(process, folder / f'stack.{rank}')}".strip())
            process.kill()
            process.join(5)  # one that is stuck in a driver stays
        else:
            reasons.append(f"exit code {process.exitcode}")
    return reasons


def stack(process, path: Path) -> str:
    """Where the process is; empty if it did not come as far as run_here()."""
    if path.exists():
        os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.2)
    return path.read_text() if path.exists() else ""


def run_cases(
    target: Callable,
    names: Sequence[str],
    folder: Path,
    more: tuple = (),
    limits: Limits = Limits(),  # noqa: B008 (a tuple)
) -> dict[str, list[str]]:
    """{case: [one outcome per rank]}. On each rank target(rank, names, folder, *more) gives its
    cases, START and END among them, to run_here()."""
    left, until, found, pair = list(names), time.monotonic() + limits.total, {}, 0
    while left:
        if time.monotonic() > until:
            return found | {name: [f"not run: {limits.total} s are over"] * WORLD for name in left}
        at, pair = folder / str(pair), pair + 1
        at.mkdir()
        wanted = [START, *left, END]
        reasons = run_pair(target, wanted, at, limits, more)
        outcomes = {n: [read(at, n, r) or reasons[r] for r in range(WORLD)] for n in wanted}
        if outcomes[START] != [PASSED] * WORLD:
            return found | dict.fromkeys(left, outcomes[START])
        bad = next((name for name in left if outcomes[name] != [PASSED] * WORLD), None)
        done = left if bad is None else left[: left.index(bad) + 1]
        found |= {name: outcomes[name] for name in done}
        left = left[len(done) :]
        if bad is None:
            found[END] = outcomes[END]
    return found


def check(outcomes: list[str]) -> None:
    """Fails as the ranks did."""
    text = "\n".join(f"rank {r}:\n{o}" for r, o in enumerate(outcomes) if o != PASSED)
    if "Duplicate GPU detected" in text:
        pytest.skip("not possible here: NCCL refuses two ranks on one GPU")
    assert not text, text
