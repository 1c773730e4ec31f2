# SPDX-License-Identifier: Apache-2.0
"""A rank goes missing or disagrees: every surviving rank gets one error, in time, that names layer,
call and ranks. Real processes, over shared memory and over Gloo; fault_cases.py has the scenarios.
"""

import datetime
import json
import os
import re
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import fault_cases
from rank_runs import exchange_over, outcome_of, quick_context, run_ranks, written
from syncbn.exchange import failing

SCENARIOS = {
    name.removeprefix("scenario_"): function
    for name, function in vars(fault_cases).items()
    if name.startswith("scenario_")
}
#: From the first rank that fails to the last one's error: the limit, the question where the others
#: are, and what two busy cores need.
IN_TIME = fault_cases.TIMEOUT + 12


def _rank_main(rank: int, world: int, engine: str, folder: str, name: str) -> None:
    exchange_over(engine)
    failing.INTERVAL = 0.3
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=60),
    )
    run = fault_cases.Run(rank, world)
    dist.barrier()
    result = outcome_of(lambda: SCENARIOS[name](run))
    Path(folder, f"{rank}.json").write_text(json.dumps(result))
    # Others may still ask where this rank is; ending is a fault of its own.
    time.sleep(0.5 if result["outcome"] in ("passed", "KeyError") else 2)
    os._exit(0)


#: What an error begins with.
CALL = (
    r"(stem|head|SyncBatchNorm), call \d+, (forward|backward)"
    r"|syncbn.join, call \d+, (next input|no more inputs)"
)

#: Every scenario over both engines, on 2 and 3 ranks by turns, and three of them on 4.
ENGINES = ("shared memory", "gloo")
RUNS = [(n, 2 + (i + j) % 2, e) for i, n in enumerate(SCENARIOS) for j, e in enumerate(ENGINES)]
RUNS += [(n, 4, "shared memory") for n in ("other_order", "killed_in_forward", "eval_mode")]


def _run(context, name: str, world: int, engine: str) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(context, _rank_main, world, (world, engine, folder, name), 60)
        return written(folder, world)


@pytest.fixture(scope="module")
def outcomes():
    """All runs, eight at a time: they mostly wait."""
    context = quick_context()
    with ThreadPoolExecutor(8) as pool:
        return dict(zip(RUNS, pool.map(lambda run: _run(context, *run), RUNS), strict=True))


@pytest.mark.parametrize(("name", "world", "engine"), RUNS)
def test_fault(outcomes, name, world, engine):
    results = outcomes[name, world, engine]
    for rank, result in results.items():
        expected = fault_cases.EXPECTED[name][0 if rank == world - 1 else 1]
        if expected == "killed":
            assert result is None
            continue
        assert result is not None, f"rank {rank} hangs or died; {results}"
        allowed = (expected,) if isinstance(expected, str) else expected
        assert result["outcome"] in allowed, f"rank {rank}: {result}"
        assert result["seconds"] < IN_TIME, f"rank {rank}: {result}"
        if result["outcome"] in ("DivergenceError", "ExchangeTimeout", "PeerLost"):
            text = result["text"]
            assert re.match(CALL, text), text
            assert f"rank {rank} of {world}" in text
            if expected == "DivergenceError":  # on which ranks each field is what
                told = re.findall(r" on ranks? (\d+(?:, \d+)*)", text)
                told = {int(r) for ranks in told for r in ranks.split(", ")}
                assert set(range(world)) <= told, text
            else:
                assert all(f"rank {r}: " in text for r in range(world) if r != rank), text
            assert re.search(fault_cases.NAMES.get(name, ""), text), text
