# SPDX-License-Identifier: Apache-2.0
"""Ranks as processes of one thread, over Gloo, for the benchmarks."""

import json
import tempfile
import time
from collections.abc import Callable

import common
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

#: Called on every rank with the options; what the first rank's returns counts.
Work = Callable[..., list[dict]]


def _rank(rank: int, ranks: int, works: list[tuple[Work, dict]], folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    rows = [{"ranks": ranks} | row for work, options in works for row in work(**options)]
    if rank == 0:
        with open(f"{folder}/rows", "w") as file:
            json.dump(rows, file)
    dist.destroy_process_group()


def run(ranks: int, works: list[tuple[Work, dict]]) -> list[dict]:
    """Rows of all works, which one group of processes does one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (ranks, works, folder), nprocs=ranks)
        with open(f"{folder}/rows") as file:
            return json.load(file)


def in_turns(play: Callable[[common.Clock], None], seconds: float, least: int) -> common.Times:
    """Plays rounds for about so many seconds; all ranks play the same number. The first two, in
    which groups and shared memory are made, are left out."""
    play(common.Clock())
    start = time.perf_counter()
    play(common.Clock())
    rounds = torch.tensor(common.rounds_for(seconds, time.perf_counter() - start, least, 60))
    dist.broadcast(rounds, 0)
    clock = common.Clock()
    for _ in range(int(rounds)):
        play(clock)
    return clock.times
