# SPDX-License-Identifier: Apache-2.0
"""Forked children, data loaders' workers, threads and many models of ranks. Run by
test_distributed.py as rank_cases.py is."""

import copy
import gc
import os
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

import syncbn
from forking import equal, passes_in_child, settled_held, train
from rank_cases import raises
from syncbn.exchange import failing, groups

FORKED = "was forked from rank"


def own_samples(rank: int) -> torch.Tensor:
    return torch.randn(4, 3, 2, generator=torch.Generator().manual_seed(rank))


def check_step(layer, rank, world):
    """One step, whose statistics are those of all ranks' samples."""
    whole = torch.cat([own_samples(r) for r in range(world)])
    alone = syncbn.SyncBatchNorm(3, sync=False)
    y = layer(own_samples(rank))
    assert torch.equal(y, alone(whole)[4 * rank : 4 * rank + 4])


def alone(**options):
    return syncbn.SyncBatchNorm(3, sync=False, **options)


def case_a_forked_child_has_no_part_exact(rank, world):
    """While the parent trains; the child's errors come at once and reach no other rank."""
    layer = syncbn.SyncBatchNorm(3)
    check_step(layer, rank, world)
    x = own_samples(rank).requires_grad_()
    y = layer(x)
    expected = train(alone())

    def operator(is_infer):
        mean, var, scale, bias = (torch.ones(3) for _ in range(4))
        batches = torch.zeros(1, dtype=torch.int64)
        x = own_samples(rank)
        syncbn.ops.batch_norm(x, mean, var, scale, bias, batches, is_infer=is_infer)

    def child():
        raises(RuntimeError, FORKED, layer, own_samples(rank))
        raises(RuntimeError, FORKED, y.sum().backward)
        raises(RuntimeError, FORKED, layer, torch.zeros(3, dtype=torch.int64))
        raises(RuntimeError, FORKED, syncbn.reset_groups, layer)
        raises(RuntimeError, FORKED, syncbn.parallel.all_reduce, torch.ones(2))
        plain = nn.Sequential(nn.BatchNorm1d(3))
        raises(RuntimeError, FORKED, syncbn.convert_sync_batchnorm, plain)
        passes_in_child(lambda: raises(RuntimeError, FORKED, layer, own_samples(rank)))
        raises(RuntimeError, FORKED, operator, is_infer=False)
        operator(is_infer=True)
        assert equal(train(alone()), expected)
        layer.eval()
        assert layer(own_samples(rank)).shape == (4, 3, 2)
        copy.deepcopy(layer)

    passed = []
    worker = threading.Thread(target=lambda: passed.append(passes_in_child(child)))
    worker.start()
    for _ in range(20):
        check_step(layer, rank, world)
    worker.join()
    assert passed  # else the thread's error is on standard error
    passes_in_child(child)
    y.sum().backward()
    dist.barrier()
    check_step(layer, rank, world)


class Normalized(Dataset):
    """Samples that the workers bring through a layer."""

    def __init__(self, layer):
        self.layer = layer

    def __len__(self):
        return 8

    def __getitem__(self, i):
        x = torch.full((2, 3, 2), float(i)).add_(torch.arange(2.0)[:, None, None])
        with torch.no_grad():
            return self.layer(x)


def case_a_fork_during_an_exchange_exact(rank, world):
    """By another thread, while this one waits for rank 0. The child ends before the exchange does,
    or after it."""
    layer = syncbn.SyncBatchNorm(3)
    check_step(layer, rank, world)
    for lives in (0.0, 0.4):

        def fork(lives=lives):
            time.sleep(0.1)
            child = os.fork()
            if child == 0:
                time.sleep(lives)
                os._exit(0)
            os.waitpid(child, 0)

        thread = threading.Thread(target=fork)
        thread.start()
        time.sleep(0.3 if rank == 0 else 0)
        check_step(layer, rank, world)
        thread.join()
        check_step(layer, rank, world)


def case_workers_of_a_loader_beside_training_exact(rank, world):
    """Persistent workers, whose layers are in evaluation mode, or train without a group."""
    layer = syncbn.SyncBatchNorm(3)
    check_step(layer, rank, world)
    for inside in (copy.deepcopy(layer).eval(), alone(momentum=0.0)):
        expected = [Normalized(inside)[i] for i in range(8)]
        loader = DataLoader(
            Normalized(inside),
            num_workers=2,
            persistent_workers=True,
            multiprocessing_context="fork",
        )
        for _ in range(2):
            for i, batch in enumerate(loader):
                assert torch.equal(batch[0], expected[i])
                check_step(layer, rank, world)
        del loader
    loader = DataLoader(Normalized(layer), num_workers=1, multiprocessing_context="fork")
    raises(RuntimeError, FORKED, list, loader)
    check_step(layer, rank, world)


def case_second_thread_in_a_group_is_an_error(rank, world):
    """Where one thread waits for the other ranks, a second one is refused and changes nothing."""
    layers = [syncbn.SyncBatchNorm(3), syncbn.SyncBatchNorm(3)]
    for layer in layers:
        check_step(layer, rank, world)
    before = copy.deepcopy(layers[1].state_dict())
    group = groups.peers(layers[0].state.sharing).group_name
    if rank == 0:
        worker = threading.Thread(target=check_step, args=(layers[0], rank, world))
        worker.start()
        while not failing.members[group].does[1]:
            time.sleep(0.001)
        text = "another thread exchanges in the same group"
        raises(RuntimeError, text, layers[1], own_samples(rank))
        assert all(map(torch.equal, before.values(), layers[1].state_dict().values()))
        dist.barrier()
        worker.join()
    else:
        dist.barrier()
        check_step(layers[0], rank, world)
    check_step(layers[1], rank, world)


def case_threads_with_groups_of_their_own_exact(rank, world):
    """Six threads, each with its layer and its group, which the thread makes in its first step, all
    at once, in an order of this rank's own; then one after the other. After a reset once more."""
    ranks = list(range(world))
    own = [*(dist.new_group(ranks) for _ in range(5)), None]
    names = range(len(own))
    layers = [syncbn.SyncBatchNorm(3, process_group=group) for group in own]
    again = [copy.deepcopy(layer) for layer in layers]
    for steps in (20, 5):
        results = [None] * len(own)

        def run(i, results=results, steps=steps):
            results[i] = train(layers[i], steps, seed=10 * rank + i, samples=2 + i)

        threads = [threading.Thread(target=run, args=(i,)) for i in names]
        for thread in threads if rank == 0 else reversed(threads):
            thread.start()
            time.sleep(0.02)
        for thread in threads:
            thread.join()
        for i in names:
            expected = train(again[i], steps, seed=10 * rank + i, samples=2 + i)
            assert equal(results[i], expected), i
        syncbn.reset_groups()
    number = len(groups._own_groups)
    syncbn.SyncBatchNorm(3, process_group=dist.group.WORLD)(own_samples(rank))
    syncbn.SyncBatchNorm(3, process_group=own[0])(own_samples(rank))
    assert len(groups._own_groups) == number


def case_many_models_share_what_a_process_holds(rank, world):
    """200 models of 10 layers need one group; without them, nothing is left but that group."""
    syncbn.prepare(syncbn.SyncBatchNorm(3))
    gc.collect()
    before, number = settled_held(), len(groups._own_groups)
    layers_before = _live_layers()

    def model():
        return nn.Sequential(*(nn.BatchNorm1d(3) for _ in range(10)))

    models = [syncbn.convert_sync_batchnorm(model()) for _ in range(200)]
    for each in models[::10]:
        each(own_samples(rank)).sum().backward()
    assert len(groups._own_groups) == number
    _assert_not_more(settled_held(), before)
    del models, each
    gc.collect()
    _assert_not_more(settled_held(), before)
    layers = _live_layers()
    assert layers <= layers_before, f"{layers} layers live, {layers_before} before"


def _assert_not_more(held, before):
    """Less may be held: the end of an earlier case's groups takes a while."""
    assert all(held[name] <= before[name] for name in before), f"{held} are held, {before} before"


def _live_layers() -> int:
    return sum(issubclass(type(o), syncbn.SyncBatchNorm) for o in gc.get_objects())
