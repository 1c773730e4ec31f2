# SPDX-License-Identifier: Apache-2.0
"""Starts processes, one per rank, waits for them and reads what came of each. run_cases: many cases
one after the other, as a start costs seconds for importing PyTorch."""

import datetime
import faulthandler
import gc
import json
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from support import join
from syncbn.exchange import connections

#: Of the group, and of the layers' exchanges.
TIMEOUT = datetime.timedelta(seconds=30)
Cases = dict[str, Callable[[int, int], None]]
ENGINES = ("shared memory", "gloo")


def exchange_over(engine: str) -> None:
    """Layers of this process exchange over it: over "gloo" their groups share no memory."""
    make = connections.make

    def make_over(*given):
        *others, share = given
        return make(*others, share and engine == "shared memory")

    connections.make = make_over


def _rank_main(
    rank: int,
    world: int,
    engine: str,
    port: int,
    results: Path,
    load: Callable[[], Cases],
    seconds: float,
) -> None:
    exchange_over(engine)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=TIMEOUT)
    traces = open(results / f"hangs.{rank}", "w")
    cases = load()
    gc.collect()
    gc.freeze()  # or each new layer, which looks for its path, goes by all that was imported
    for name, case in cases.items():
        faulthandler.dump_traceback_later(seconds, exit=True, file=traces)
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


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def new_store() -> dist.TCPStore:
    """Held by this process: a rank that ends takes nobody's store with it."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def join_group(
    rank: int, world: int, place: int | str, seconds: float = 60, engine=ENGINES[0], owner=False
) -> None:
    """Makes this process a rank of one thread, in a group over the store at that port, or in that
    file, to which nobody has to connect. seconds: the group's limit; owner: of the store."""
    exchange_over(engine)
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=60)
    if isinstance(place, str):
        store = dist.FileStore(place, world)
    else:
        store = dist.TCPStore("127.0.0.1", place, None, owner, limit, wait_for_workers=False)
    limit = datetime.timedelta(seconds=seconds)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)


def functions_of(module, prefix: str) -> dict[str, Callable]:
    """Those whose names begin so, by the rest of the name."""
    found = vars(module).items()
    return {name.removeprefix(prefix): f for name, f in found if name.startswith(prefix)}


def quick_context():
    """Of processes that start fast: forked from one that has imported the package, and pytest. (It
    does not look for modules beside the tests.)"""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["syncbn", "pytest"])
    return context


def run_ranks(context, target: Callable, world: int, arguments: tuple, seconds: float) -> list:
    """Runs target(rank, *arguments) on each rank, and ends those that are there after so long; the
    exit codes."""
    processes = [context.Process(target=target, args=(rank, *arguments)) for rank in range(world)]
    for process in processes:
        process.start()
    join(processes, seconds)
    return [process.exitcode for process in processes]


def outcome_of(function: Callable[[], object]) -> dict:
    """How it ended: "passed" or an error's name, the error's text, and the seconds that it took."""
    began, outcome, text = time.monotonic(), "passed", ""
    try:
        function()
    except BaseException as error:
        outcome, text = type(error).__name__, str(error)
    return {"outcome": outcome, "text": text, "seconds": time.monotonic() - began}


def written(folder: str, world: int) -> dict:
    """What each rank wrote into RANK.json, None if it wrote nothing."""
    files = [Path(folder, f"{rank}.json") for rank in range(world)]
    return {r: json.loads(f.read_text()) if f.exists() else None for r, f in enumerate(files)}


def run_written(context, target: Callable, world: int, *arguments) -> dict:
    """What target(rank, *arguments, folder) wrote into the folder on each rank."""
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(context, target, world, (*arguments, folder), 60)
        return written(folder, world)


def run_all(run: Callable, runs: Sequence[tuple]) -> dict[tuple, dict]:
    """What run(context, *one) gives of each, eight at a time: they mostly wait."""
    context = quick_context()
    with ThreadPoolExecutor(8) as pool:
        return dict(zip(runs, pool.map(lambda one: run(context, *one), runs), strict=True))


def run_cases(
    load: Callable[[], Cases], world: int, engine: str, folder: Path, seconds: float = 120
) -> dict:
    """{case: {rank: "passed", "skipped: why" or a traceback}}. load: a function of a module, called
    on each rank; it returns functions case(rank, world), which raise if something is wrong there.
    seconds: the limit of a case.
    """
    arguments = (world, engine, free_port(), folder, load, seconds)
    # The limit of all ends only what the limit of a case cannot: a slow machine takes its time.
    codes = run_ranks(quick_context(), _rank_main, world, arguments, 3000)
    found: dict = {}
    hangs = [path for path in folder.iterdir() if path.name.startswith("hangs.")]
    found["hangs"] = "\n".join(path.read_text() for path in hangs)
    for path in set(folder.iterdir()) - set(hangs):
        name, rank = path.name.rsplit(".", 1)
        found.setdefault(name, {})[int(rank)] = json.loads(path.read_text())
    found["exit codes"] = codes
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
