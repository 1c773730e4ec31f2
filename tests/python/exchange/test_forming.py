# SPDX-License-Identifier: Apache-2.0
"""A rank is late, dies or disagrees while the group is made: every surviving rank gets one error,
in time, that names layer and ranks, and ranks that are alive go on. forming_cases.py has the
scenarios."""

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

import forming_cases
from forming_cases import LIMIT
from rank_runs import exchange_over, free_port, outcome_of, quick_context, run_ranks, written

SCENARIOS = {
    name.removeprefix("scenario_"): function
    for name, function in vars(forming_cases).items()
    if name.startswith("scenario_")
}
#: From a rank's call to its error: the limit, connecting, the store's answer, and what two busy
#: cores need.
IN_TIME = LIMIT + 5 + 3 + 5
#: The same for a rank that need not wait.
AT_ONCE = 4.0


def _rank_main(rank: int, world: int, engine: str, direct: bool, port: int, folder: str, name: str):
    exchange_over(engine)
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=60)
    # The ranks' store is this process's first: a rank that ends takes nobody's store with it.
    owner = name == "store_dies" and rank == 0
    store = dist.TCPStore("127.0.0.1", port, is_master=owner, wait_for_workers=False, timeout=limit)
    if name == "late_by_node":
        limit = datetime.timedelta(seconds=LIMIT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
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
    store = None
    if name == "store_dies":
        port = free_port()
    else:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = store.port
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(context, _rank_main, world, (world, engine, direct, port, folder, name), 60)
        return written(folder, world)


@pytest.fixture(scope="module")
def outcomes():
    """All runs, eight at a time: they mostly wait."""
    context = quick_context()
    with ThreadPoolExecutor(8) as pool:
        return dict(zip(RUNS, pool.map(lambda run: _run(context, *run), RUNS), strict=True))


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
