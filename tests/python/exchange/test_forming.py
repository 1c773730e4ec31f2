# SPDX-License-Identifier: Apache-2.0
"""A rank is late, dies or disagrees while the group is made: every surviving rank gets one error,
in time, that names layer and ranks, and ranks that are alive go on. forming_cases.py has the
scenarios."""

import datetime
import json
import os
import re
import time
from pathlib import Path

import pytest
import torch.distributed as dist

import forming_cases
from forming_cases import LIMIT
from rank_runs import (
    free_port,
    functions_of,
    join_group,
    new_store,
    outcome_of,
    run_all,
    run_written,
)

SCENARIOS = functions_of(forming_cases, "scenario_")
#: From a rank's call to its error: the limit, connecting, the store's answer, and what two busy
#: cores need.
IN_TIME = LIMIT + 5 + 3 + 5
#: The same for a rank that need not wait.
AT_ONCE = 4.0


def _rank_main(rank: int, world: int, engine: str, direct: bool, name: str, port: int, folder: str):
    owner = name == "store_dies" and rank == 0
    join_group(rank, world, port, LIMIT if name == "late_by_node" else 60, engine, owner)
    group = dist.new_group(timeout=datetime.timedelta(seconds=LIMIT))
    dist.barrier()
    run = forming_cases.Run(rank, world, group, direct)
    result = outcome_of(lambda: SCENARIOS[name](run))
    if name in forming_cases.GO_ON:
        dist.barrier()
        after = outcome_of(run.go_on)
        if after["outcome"] != "passed":
            for key in ("outcome", "text"):
                result[key] += f", then {after[key]}"
        dist.barrier()
    Path(folder, f"{rank}.json").write_text(json.dumps(result))
    time.sleep(1)  # ending is a fault of its own
    os._exit(0)


#: Every scenario for conversion and for a first step, on 2 and 3 ranks and both engines by turns.
RUNS = [
    (name, world, direct, engine)
    for i, name in enumerate(SCENARIOS)
    for world, direct, engine in (
        (2 + i % 2, False, "shared memory" if i % 4 < 2 else "gloo"),
        (3 - i % 2, True, "gloo" if i % 4 < 2 else "shared memory"),
    )
    if not (direct and name == "late_by_node")
]
#: There two ranks are too few, or one engine.
RUNS = [
    (name, 3 if name == "store_dies" else w, d, "shared memory" if name == "another_engine" else e)
    for name, w, d, e in RUNS
]


def _run(context, name: str, world: int, direct: bool, engine: str) -> dict:
    store = None if name == "store_dies" else new_store()
    port = free_port() if store is None else store.port
    return run_written(context, _rank_main, world, world, engine, direct, name, port)


@pytest.fixture(scope="module")
def outcomes():
    return run_all(_run, RUNS)


@pytest.mark.parametrize(("name", "world", "direct", "engine"), RUNS)
def test_forming(outcomes, name, world, direct, engine):
    results = outcomes[name, world, direct, engine]
    odd = world - 1
    for rank, result in results.items():
        expected = forming_cases.EXPECTED[name][0 if rank == odd else 1]
        if expected == "killed" or (name == "store_dies" and rank == 0):
            assert result is None
            continue
        assert result is not None, f"rank {rank} hangs or died; {results}"
        assert result["outcome"] == expected, f"rank {rank}: {result}"
        soon = expected not in ("ExchangeTimeout", "passed")
        limit = AT_ONCE + 2 if soon else IN_TIME  # 2: seconds that ranks are apart
        if rank == odd and name in ("late", "late_by_node", "late_after_reset"):
            limit = LIMIT + 3 + AT_ONCE
        assert result["seconds"] < limit, f"rank {rank}: {result}"
        if expected in ("DivergenceError", "ExchangeTimeout", "PeerLost"):
            text = result["text"]
            who = "stem" if direct else "convert_sync_batchnorm"
            assert text.startswith(f"{who}, "), text
            assert f"rank {rank} of {world}: " in text
            if rank != odd or "{odd}" not in forming_cases.NAMES[name]:
                assert re.search(forming_cases.NAMES[name].format(odd=odd), text), text
