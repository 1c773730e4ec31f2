"""Starts processes, one per rank, that run many cases one after the other, and reads what came of
each: a start costs seconds for importing PyTorch."""

import datetime
import faulthandler
import json
import os
import socket
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from syncbn.exchange import groups

#: Of the group, and of the layers' exchanges.
TIMEOUT = datetime.timedelta(seconds=30)
Cases = dict[str, Callable[[int, int], None]]


def _rank_main(
    rank: int, world: int, engine: str, port: int, results: Path, load: Callable[[], Cases]
) -> None:
    groups.use_shared_memory = engine == "shared memory"
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=TIMEOUT)
    traces = open(results / f"hangs.{rank}", "w")
    for name, case in load().items():
        faulthandler.dump_traceback_later(120, exit=True, file=traces)
        try:
            case(rank, world)
            outcome = "passed"
        except pytest.skip.Exception as reason:
            outcome = f"skipped: {reason}"
        except BaseException:
            outcome = traceback.format_exc()
        (results / f"{name}.{rank}").write_text(json.dumps(outcome))
        # A case that fails on one rank alone leaves the others in the middle of an exchange; their
        # timeout ends it, and this wait keeps the ranks together.
        dist.monitored_barrier(timeout=2 * TIMEOUT)
    dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run_cases(load: Callable[[], Cases], world: int, engine: str, folder: Path) -> dict:
    """{case: {rank: "passed", "skipped: why" or a traceback}}. load: a function of a module, called
    on each rank; it returns functions case(rank, world), which raise if something is wrong there.
    """
    context = mp.get_context("spawn")
    arguments = (world, engine, _free_port(), folder, load)
    processes = [
        context.Process(target=_rank_main, args=(rank, *arguments)) for rank in range(world)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(900)
        if process.is_alive():
            process.kill()
    found: dict = {}
    hangs = [path for path in folder.iterdir() if path.name.startswith("hangs.")]
    found["hangs"] = "\n".join(path.read_text() for path in hangs)
    for path in set(folder.iterdir()) - set(hangs):
        name, rank = path.name.rsplit(".", 1)
        found.setdefault(name, {})[int(rank)] = json.loads(path.read_text())
    found["exit codes"] = [process.exitcode for process in processes]
    found["world"] = world
    return found


def check_case(results: dict, case: str) -> None:
    """Fails or skips as the ranks did."""
    outcomes = results.get(case, {})
    failures = [f"rank {r}:\n{o}" for r, o in sorted(outcomes.items()) if o != "passed"]
    missing = sorted(set(range(results["world"])) - set(outcomes))
    if failures and not missing and all(o.startswith("skipped: ") for o in outcomes.values()):
        pytest.skip(outcomes[0].removeprefix("skipped: "))
    assert not failures and not missing, "\n".join(
        [*failures, f"no result from ranks {missing}; exit codes {results['exit codes']}"]
        + [results["hangs"] if missing else ""]
    )
