# SPDX-License-Identifier: Apache-2.0
"""Many processes and many steps on one machine, through shared memory."""

import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import syncbn
from rank_runs import join_group, new_store, quick_context, run_ranks

WORLD, STEPS, CHANNELS = 16, 1000, 8


def _samples(rank: int):
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        yield torch.randn(2, CHANNELS, generator=generator)


def _rank_main(rank: int, folder: str, port: int) -> None:
    join_group(rank, WORLD, port)
    layer = syncbn.SyncBatchNorm(CHANNELS, timeout=60)
    assert syncbn.report(layer)[0].engine == "shared memory"
    began = time.process_time()
    for x in _samples(rank):
        layer(x.requires_grad_()).square().sum().backward()
    result = {"seconds": time.process_time() - began, **layer.state_dict()}
    torch.save(result, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results():
    store = new_store()
    with tempfile.TemporaryDirectory() as folder:
        codes = run_ranks(quick_context(), _rank_main, WORLD, (folder, store.port), 300)
        assert codes == [0] * WORLD
        return [torch.load(Path(folder, f"{rank}.pt")) for rank in range(WORLD)]


def test_statistics_are_those_of_one_process_exact(results):
    alone = syncbn.SyncBatchNorm(CHANNELS)
    for xs in zip(*(_samples(rank) for rank in range(WORLD)), strict=True):
        alone(torch.cat(xs))
    for rank, result in enumerate(results):
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            assert torch.equal(result[name], getattr(alone, name)), f"{name} of rank {rank}"


def test_many_steps_take_seconds(results):
    """Of the processors' time, which other programs do not take: about 5 in all. Ranks that spin
    while others have their cores take minutes."""
    assert sum(result["seconds"] for result in results) < 60
