# SPDX-License-Identifier: Apache-2.0
"""5,500 steps on one rank, and on two through shared memory and over Gloo: resident memory,
descriptors and threads stay. Live tensors and objects: test_memory.py."""

import gc
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import syncbn
from forking import held
from rank_runs import join_group, new_store, quick_context, run_ranks

STEPS, FIRST = 5_500, 1_000
PAGE, M_TOP_PAD = 4096, 128 * 1024


def resident() -> int:
    """Bytes of this process's own memory. Without what is mapped from files, and shared memory,
    whose pages count from their first use on."""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("RssAnon"))
    return 1024 * int(line.split()[1])


def train(layer: syncbn.SyncBatchNorm) -> list:
    """Memory and what is held after FIRST steps and at the end."""
    found = []
    for step in range(1, STEPS + 1):
        x = torch.randn(2 + step % 3, layer.num_features, requires_grad=True)
        layer(x).square().sum().backward()
        layer.zero_grad()
        if step in (FIRST, STEPS):
            gc.collect()
            found.append((resident(), held()))
    return found


def _rank_main(rank: int, world: int, engine: str, folder: str, port: int) -> None:
    torch.set_num_threads(1)
    if world > 1:
        join_group(rank, world, port, engine=engine)
    layer = syncbn.SyncBatchNorm(4, timeout=60)
    if world > 1:
        assert syncbn.report(layer)[0].engine == engine
    torch.save(train(layer), f"{folder}/{rank}.pt")
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "world, engine",
    (
        pytest.param(1, "none", id="1 rank"),
        pytest.param(2, "shared memory", id="2 ranks, shared memory"),
        pytest.param(2, "gloo", id="2 ranks, gloo", marks=pytest.mark.weekly),
    ),
)
def test_memory_is_flat(world, engine):
    """The allocator takes memory in pieces of 132 KiB (M_TOP_PAD and a page), for each thread in a
    heap of its own; the bound is one piece of each, 30 bytes a step and thread. Malloc's smallest
    block has 32."""
    store = new_store()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world, engine, folder, store.port)
        codes = run_ranks(quick_context(), _rank_main, world, arguments, 250)
        assert codes == [0] * world
        for rank in range(world):
            (first, held_first), (last, held_last) = torch.load(Path(folder, f"{rank}.pt"))
            assert held_first == held_last
            bound = held_first["threads"] * (M_TOP_PAD + PAGE)
            assert last - first <= bound, f"rank {rank}: {last - first} bytes more"
