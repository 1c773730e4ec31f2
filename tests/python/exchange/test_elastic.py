# SPDX-License-Identifier: Apache-2.0
"""A job that its launcher starts again: the layers make their groups anew, whatever the launcher's
agents count and its store still holds."""

import os
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import syncbn
from rank_runs import join_group, new_store, run_all, run_ranks, run_written
from syncbn.exchange import failing, groups


def _attempt_before(rank: int, world: int, port: int, left: str) -> None:
    """Leaves in the store what an attempt leaves there that ends so."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  # that has no keys there

    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("fake", store=store, rank=rank, world_size=world)
    failing.INTERVAL = 0.1
    limit = 0.5 if left == "given up" else 20.0
    key = tuple(range(world)), limit, "auto", "0", ""
    if left == "made":
        own = groups.own_group(key, limit)
        failing._tell(own, "it was ended")
        time.sleep(1)
    elif rank > 0:  # rank 0 does not come
        threading.Thread(target=groups.own_group, args=(key, limit), daemon=True).start()
        time.sleep(2)
    os._exit(0)


def _attempt(rank: int, world: int, port: int, counts: tuple[int, ...], folder: str) -> None:
    """Layers of the default group and of a smaller one, made in their first steps."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(counts[rank])
    join_group(rank, world, port, 20)
    pair = dist.new_group([0, world - 1])
    began = time.monotonic()
    time.sleep(0.3 * rank)  # those that left something come first, or last
    layer = syncbn.SyncBatchNorm(1, momentum=1.0)
    layer(torch.tensor([[rank + 1.0], [rank + 2.0]]))
    means = [layer.running_mean.item()]
    if rank in (0, world - 1):
        small = syncbn.SyncBatchNorm(1, momentum=1.0, process_group=pair)
        small(torch.tensor([[rank + 1.0], [rank + 2.0]]))
        means.append(small.running_mean.item())
    Path(folder, f"{rank}.json").write_text(str([time.monotonic() - began, *means]))
    dist.barrier()
    os._exit(0)


CASES = [
    *(("nothing", (1, 1, 0)), ("waiting", (0, 0, 0)), ("waiting", (0, 2, 1))),
    *(("given up", (0, 0, 0)), ("made", (0, 0, 0)), ("made", (1, 0, 0))),
]


def _run(context, left: str, counts: tuple[int, ...]) -> dict:
    store, world = new_store(), len(counts)
    if left != "nothing":
        run_ranks(context, _attempt_before, world, (world, store.port, left), 60)
    return run_written(context, _attempt, world, world, store.port, counts)


@pytest.fixture(scope="module")
def outcomes():
    return run_all(_run, CASES)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_agents_agree_without_their_counters(outcomes, case):
    """Of restarts: a replaced node's begins at 0. The store is that of the attempt before."""
    results = outcomes[case]
    for rank, result in results.items():
        assert result is not None, f"rank {rank} has failed; {results}"
        seconds, *means = result
        assert means == ([2.5, 2.5] if rank != 1 else [2.5]), results
        assert seconds < 15, results
