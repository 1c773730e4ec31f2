"""Real processes over Gloo: 2 and 3 ranks, started once each, run every case of rank_cases.py and
rank_cases_modes.py, rank_cases_groups.py, device_cases.py and rank_cases_op.py."""

import datetime
import json
import os
import socket
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import device_cases
import rank_cases
import rank_cases_groups
import rank_cases_modes
import rank_cases_op

CASES = {
    name: case
    for module in (rank_cases, rank_cases_modes, rank_cases_groups, device_cases, rank_cases_op)
    for name, case in vars(module).items()
    if name.startswith("case_")
}
TIMEOUT = datetime.timedelta(seconds=60)


def _rank_main(rank: int, world: int, port: int, results: Path) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=TIMEOUT)
    for name, case in CASES.items():
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


@pytest.fixture(scope="module", params=(2, 3), ids=("2 ranks", "3 ranks"))
def results(request, tmp_path_factory):
    """{case: {rank: "passed" or a traceback}}."""
    world = request.param
    context = mp.get_context("spawn")
    folder = tmp_path_factory.mktemp("ranks")
    arguments = (world, _free_port(), folder)
    processes = [
        context.Process(target=_rank_main, args=(rank, *arguments)) for rank in range(world)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(600)
        if process.is_alive():
            process.kill()
    found = {name: {} for name in CASES}
    for path in folder.iterdir():
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
    )
