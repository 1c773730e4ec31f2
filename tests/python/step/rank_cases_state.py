# SPDX-License-Identifier: Apache-2.0
"""Layers whose state is no buffer, over ranks; run by test_distributed.py as rank_cases.py is."""

import contextlib
import copy
import itertools
import time

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.nn.parallel import DistributedDataParallel

import syncbn
from rank_cases import diverges, raises
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


@contextlib.contextmanager
def _on_rank_0(rank):
    """What rank 0 does alone exchanges nothing: nobody is there who would answer."""
    began = time.monotonic()
    yield rank == 0
    assert time.monotonic() - began < 5
    dist.barrier()


def _network(device=None):
    return nn.Sequential(nn.Linear(5, 3, device=device), nn.BatchNorm1d(3, device=device))


def _trains(model, rank, world):
    """As a step of all ranks."""
    x = torch.randn(4 * world, 5, generator=torch.Generator().manual_seed(3))
    model(x[4 * rank :][:4]).sum().backward()
    assert model[1].state.count == 4 * world and model[1].num_batches_tracked == 1


WITHOUT_VALUES = {
    "fake": FakeTensorMode,
    "fake, of others' tensors": lambda: FakeTensorMode(allow_non_fake_inputs=True),
    "functional": FunctionalTensorMode,
    "meta": contextlib.nullcontext,
    "made on meta": lambda: torch.device("meta"),
}


def case_what_has_no_values_exchanges_nothing(rank, world):
    """Converting, making, training, reporting and resetting; and then the real model works, in a
    group that was there before, and in one that was not."""
    for (what, mode), limit in itertools.product(WITHOUT_VALUES.items(), (None, 61.5, 62.5)):
        options = {"timeout": limit and limit + len(what)}
        if limit is None:
            _trains(syncbn.convert_sync_batchnorm(_network(), **options), rank, world)
        real = syncbn.convert_sync_batchnorm(_network(), timeout=47)
        with _on_rank_0(rank) as alone:
            if alone:
                model = _network()
                with mode():
                    if what != "functional":
                        model = _network("meta" if what == "meta" else None)
                    model = syncbn.convert_sync_batchnorm(model, **options)
                    layer = syncbn.SyncBatchNorm(3, timeout=limit, device=model[0].weight.device)
                    syncbn.prepare(model)
                    syncbn.set_group(model, **options)
                    if what != "functional":
                        x = torch.empty(4, 5, device=model[0].weight.device)
                        y = layer(model(x))
                        assert y.shape == (4, 3)
                        y.sum().backward()
                        summed = syncbn.parallel.all_reduce([x, x])
                        assert [s.shape for s in summed] == [(4, 5)] * 2
                        raises(NotImplementedError, "without values", model[1], [y, y])
                    assert "no values" in syncbn.report(model, strict=True)[0].note
                    syncbn.check(model)
                    syncbn.reset_groups(model)
                    if "fake" in what:  # also of a model that is real
                        syncbn.report(real, strict=True)
                        syncbn.check(real)
                        syncbn.reset_groups(real)
                        syncbn.convert_sync_batchnorm(_network(), **options)
        _trains(syncbn.convert_sync_batchnorm(_network(), **options), rank, world)
        _trains(real, rank, world)
        syncbn.report(real, strict=True)


def case_a_model_of_meta_trains_when_it_has_values(rank, world):
    """Its first step makes the group."""
    with torch.device("meta"):
        model = syncbn.convert_sync_batchnorm(_network(), timeout=63.5)
    model.to_empty(device="cpu")
    for layer in model:
        layer.reset_parameters()
    _trains(model, rank, world)


def case_parts_of_the_group_are_made_while_tensors_are_fake(rank, world):
    """By all ranks: the layer must know them."""
    with FakeTensorMode():
        model = syncbn.convert_sync_batchnorm(_network(), group_size=1)
    assert model[1].state.sharing.name
