# SPDX-License-Identifier: Apache-2.0
"""init_process_group again, on the same port, after destroy_process_group, with as many ranks or
another number: nothing of the layers' groups may hold the old store."""

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import syncbn
from rank_runs import free_port, quick_context, run_ranks


def _batch(rank: int, turn: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * turn + rank))


def _rank(rank: int, port: int, worlds: tuple[int, ...], folder: str) -> None:
    layer = syncbn.convert_sync_batchnorm(torch.nn.BatchNorm1d(4))
    for turn, world in enumerate(worlds):
        if rank < world:
            dist.init_process_group(
                "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
            )
            if len(set(worlds)) > 1:  # a rank was away, and made fewer calls
                syncbn.reset_groups(layer)
            layer(_batch(rank, turn).requires_grad_()).square().sum().backward()
            assert syncbn.report(layer)[0].ranks == world
            whole = torch.cat([_batch(r, turn) for r in range(world)])
            expected = syncbn.SyncBatchNorm(4, sync=False)(whole)[3 * rank :][:3]
            assert torch.equal(layer(_batch(rank, turn)), expected)
            dist.barrier()
            dist.destroy_process_group()
            assert syncbn.report(layer)[0].note == "no process group"
        # Or a rank may find another's old store, which is about to close.
        Path(folder, f"{turn}.{rank}").touch()
        while not all(Path(folder, f"{turn}.{r}").exists() for r in range(max(worlds))):
            time.sleep(0.01)


@pytest.mark.parametrize("worlds", ((2, 2, 2), (3, 2, 3)), ids=str)
def test_same_port_three_times(tmp_path, worlds):
    arguments = (free_port(), worlds, str(tmp_path))
    assert run_ranks(quick_context(), _rank, max(worlds), arguments, 200) == [0] * max(worlds)
