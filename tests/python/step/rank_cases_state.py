# SPDX-License-Identifier: Apache-2.0
"""Layers whose state is no buffer, over ranks; run by test_distributed.py as rank_cases.py is."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import syncbn
from rank_cases import diverges
from rank_cases_paths import share
from support import assert_same_step


def net(**options) -> nn.Module:
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, **options), nn.Linear(4, 2))
    return syncbn.convert_sync_batchnorm(plain)


def case_evaluation_of_one_rank_alone_under_ddp(rank, world):
    """A model without buffers: DDP has nothing to broadcast. PyTorch's layer, which has none
    either, evaluates on one rank alone, too."""
    model = DistributedDataParallel(net(track_running_stats=False))
    model(share(rank)).sum().backward()
    if rank == 0:
        with torch.no_grad():  # with gradients DDP rearranges its buckets, on all ranks
            model.eval()(share(rank))
        model.train()
    dist.barrier()
    model(share(rank)).sum().backward()


def case_two_evaluations_under_ddp_then_a_backward_of_the_first_exact(rank, world):
    """DDP writes to the buffers between them. torch.nn.SyncBatchNorm saves buffers for backward,
    which is an error then."""
    model = DistributedDataParallel(net())
    model(share(rank)).sum().backward()
    model.eval()
    a, b = (share(rank, 1).requires_grad_() for _ in range(2))
    first = model(a)
    model(share(rank, 2))
    first.square().sum().backward()
    model.module(b).square().sum().backward()
    assert torch.equal(a.grad, b.grad)


def case_equal_blocks_compile_once_exact(rank, world):
    """Of layers with paths and groups of their own, whose calls may differ between ranks: errors
    name the layer."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph

    # Each rank makes all groups, and uses those that it is in.
    groups = [dist.group.WORLD, *(dist.new_group([0, 1]) for _ in range(2))]
    model = nn.Sequential(*(nn.Sequential(nn.BatchNorm1d(3), nn.ReLU()) for _ in range(6)))
    model = syncbn.convert_sync_batchnorm(model)
    if rank < 2:
        syncbn.set_group(model[2], groups[1])
        syncbn.set_group(model[4], groups[2], timeout=17)
    else:
        del model[4], model[2]
    reference = copy.deepcopy(model)
    for block in model:
        block.compile(fullgraph=True, backend=backend)
    for seed in range(10):
        assert_same_step(model, reference, share(rank, seed))
    assert 1 <= len(graphs) <= 2, len(graphs)
    model[1][0].eps = 1e-3 if rank == 0 else 1e-5
    expected = f"^1.0, call 10, forward, 3 channels, float32, rank {rank} of {world}: "
    diverges(expected, model, share(rank))


def case_a_first_step_that_is_compiled_makes_its_group_exact(rank, world):
    layer, reference = (syncbn.SyncBatchNorm(3, timeout=47) for _ in range(2))
    step = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(step(share(rank)), reference(share(rank)))


def case_meta_tensors_exchange_nothing(rank, world):
    if rank == 0:
        layer = syncbn.SyncBatchNorm(3, device="meta")
        assert layer(torch.empty(4, 3, device="meta")).shape == (4, 3)
    dist.barrier()
