"""Real processes, over shared memory and over Gloo alone: 2 and 3 ranks, started once each, run
every case of the modules rank_cases*.py and device_cases.py."""

import datetime
import faulthandler
import importlib
import json
import os
import socket
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from syncbn import _groups

MODULES = ("device_cases", *sorted(p.stem for p in Path(__file__).parent.glob("rank_cases*.py")))
CASES = {
    name: case
    for module in map(importlib.import_module, MODULES)
    for name, case in vars(module).items()
    if name.startswith("case_")
}
TIMEOUT = datetime.timedelta(seconds=60)


def _rank_main(rank: int, world: int, engine: str, port: int, results: Path) -> None:
    _groups.use_shared_memory = engine == "shared memory"
    _groups.DEFAULT_TIMEOUT = 30.0
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=TIMEOUT)
    traces = open(results / f"hangs.{rank}", "w")
    for name, case in CASES.items():
        faulthandler.dump_traceback_later(120, exit=True, file=traces)
        try:
            case(rank, world)
            outcome = "passed"
        except BaseException:
            outcome = traceback.format_exc()
        (results / f"{name}.{rank}").write_text(json.dumps(outcome))
        # A case that fails on one rank alone leaves the others in the middle of an exchange; their
        # timeout ends it, and this wait keeps the ranks together.
        dist.barrier()
    dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


RUNS = [(world, engine) for engine in ("shared memory", "gloo") for world in (2, 3)]


@pytest.fixture(scope="module", params=RUNS, ids=lambda run: f"{run[0]} ranks, {run[1]}")
def results(request, tmp_path_factory):
    """{case: {rank: "passed" or a traceback}}."""
    world, engine = request.param
    context = mp.get_context("spawn")
    folder = tmp_path_factory.mktemp("ranks")
    arguments = (world, engine, _free_port(), folder)
    processes = [
        context.Process(target=_rank_main, args=(rank, *arguments)) for rank in range(world)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
        if process.is_alive():
            process.kill()
    found = {name: {} for name in CASES}
    hangs = [path for path in folder.iterdir() if path.name.startswith("hangs.")]
    found["hangs"] = "\n".join(path.read_text() for path in hangs)
    for path in set(folder.iterdir()) - set(hangs):
        name, rank = path.name.rsplit(".", 1)
        found[name][int(rank)] = json.loads(path.read_text())
    found["exit codes"] = [process.exitcode for process in processes]
    found["world"] = world
    return found


@pytest.mark.parametrize("case", CASES)
def test_ranks(results, case):
    outcomes = results[case]
    failures = [f"rank {r}:\n{o}" for r, o in sorted(outcomes.items()) if o != "passed"]
    missing = sorted(set(range(results["world"])) - set(outcomes))
    assert not failures and not missing, "\n".join(
        [*failures, f"no result from ranks {missing}; exit codes {results['exit codes']}"]
        + [results["hangs"] if missing else ""]
    )
