# SPDX-License-Identifier: Apache-2.0
"""A rank goes missing or disagrees: every surviving rank gets one error, in time, that names layer,
call and ranks. Real processes, over shared memory and over Gloo; fault_cases.py has the scenarios.
"""

import json
import os
import re
import time
from pathlib import Path

import pytest
import torch.distributed as dist

import fault_cases
from rank_runs import ENGINES, functions_of, join_group, outcome_of, run_all, run_written
from syncbn.exchange import failing

SCENARIOS = functions_of(fault_cases, "scenario_")
#: From the first rank that fails to the last one's error: the limit, the question where the others
#: are, and what two busy cores need.
IN_TIME = fault_cases.TIMEOUT + 12


def _rank_main(rank: int, world: int, engine: str, name: str, folder: str) -> None:
    failing.INTERVAL = 0.3
    join_group(rank, world, f"{folder}/store", engine=engine)
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
RUNS = [(n, 2 + (i + j) % 2, e) for i, n in enumerate(SCENARIOS) for j, e in enumerate(ENGINES)]
RUNS += [(n, 4, "shared memory") for n in ("other_order", "killed_in_forward", "eval_mode")]


def _run(context, name: str, world: int, engine: str) -> dict:
    return run_written(context, _rank_main, world, world, engine, name)


@pytest.fixture(scope="module")
def outcomes():
    return run_all(_run, RUNS)


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
