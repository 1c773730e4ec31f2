# SPDX-License-Identifier: Apache-2.0
"""syncbn.join: what it costs, leaves behind, refuses, and how it fails. Run by test_distributed.py
as rank_cases.py is."""

import contextlib
import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import syncbn
from rank_cases import CountCollectives, diverges, raises
from rank_cases_join import Network, batch, run_steps
from support import assert_same_layers, new_layer
from syncbn.exchange import groups


def case_join_costs_one_exchange_per_iteration(rank, world):
    model = Network()
    run_steps(model, rank, 1)
    with CountCollectives() as count, syncbn.join(model):
        run_steps(model, rank, 2)
    # Two layers, two directions; one agreement per iteration and one at the end.
    assert count.names == ["all_reduce"] * (2 * (4 + 1) + 1), count.names


def case_join_leaves_nothing_behind(rank, world):
    model = DistributedDataParallel(Network())
    run_steps(model, rank, 1)
    before = set(groups._own_groups)
    for _ in range(2):  # epochs
        with syncbn.join(model):
            run_steps(model, rank, 1 + rank)
    assert set(groups._own_groups) == before
    assert not model._join_config.enable  # torch's Join leaves it enabled
    assert not model._forward_pre_hooks
    layer = new_layer(4)
    layer(batch(rank, 0))  # of no context: all ranks


def case_join_tells_an_error_to_all_ranks(rank, world):
    """torch's Join leaves ranks without inputs waiting for the rank that raised."""
    model = DistributedDataParallel(Network(timeout=20))

    def loop():
        with syncbn.join(model):
            for step in range(0 if rank == world - 1 else 5):
                run_steps(model, rank, 1)
                if rank == 0 and step == 1:
                    raise KeyError("sample 7")

    if rank == 0:
        raises(KeyError, "sample 7", loop)
    else:
        diverges("rank 0: syncbn.join, call 2.*KeyError: 'sample 7'", loop)
    # The group is usable.
    layer = new_layer(4, timeout=20)
    layer(batch(rank, 0))


def case_join_tells_an_error_inside_an_iteration(rank, world):
    """The group of the remaining ranks goes with the rank that raised."""
    model = Network(timeout=20)

    def fail(*_):
        if rank == 0 and model.second.num_batches_tracked == 2:
            raise KeyError("sample 7")

    model.second.register_forward_pre_hook(fail)

    def loop():
        with syncbn.join(model):
            run_steps(model, rank, 0 if rank == world - 1 else 5)

    if rank == 0:
        raises(KeyError, "sample 7", loop)
    elif rank == world - 1:
        diverges("rank 0: syncbn.join, call 3.*KeyError: 'sample 7'", loop)
    else:
        raises(syncbn.PeerLost, "call 2, forward", loop)
    new_layer(4, timeout=20)(batch(rank, 0))


def case_join_of_a_backward_pass_of_the_iteration_before(rank, world):
    """Which would need the rank that has gone since: the same error on every rank, at once."""
    model = Network(timeout=20)

    def loop():
        with syncbn.join(model):
            kept = model(batch(rank, 0))
            if rank < world - 1:
                model(batch(rank, 1))
                kept.sum().backward()

    # The rank alone is in the agreement, the others are in a layer's exchange.
    diverges("no more inputs.*backward|backward.*no more inputs", loop)


def case_join_of_a_backward_that_one_rank_skips(rank, world):
    """The others would wait for it in the all-reduce of gradients."""
    model = DistributedDataParallel(Network(timeout=20))

    def loop():
        with syncbn.join(model):
            for step in range(0 if rank == world - 1 else 3):
                y = model(batch(rank, step))
                if rank or step != 1:
                    y.sum().backward()

    diverges("direction: (next input on .*backward|backward on .*next input)", loop)
    dist.barrier()
    new_layer(4, timeout=20)(batch(rank, 0))


def case_join_throws_on_early_termination(rank, world):
    model = DistributedDataParallel(Network())
    done = []

    def loop():
        with syncbn.join(model, throw_on_early_termination=True):
            for _ in range(1 if rank == 1 else 3):
                done.extend(run_steps(model, rank, 1))

    raises(RuntimeError, r"ranks \[1\] have exhausted their inputs", loop)
    assert len(done) == 1
    dist.barrier()
    with syncbn.join(model, throw_on_early_termination=True):
        run_steps(model, rank, 2)


def case_join_of_models_that_differ(rank, world):
    model = nn.Sequential(*[new_layer(4) for _ in range(2 if rank else 1)])

    def loop():
        with syncbn.join(model):
            model(batch(rank, 0))

    diverges("same call: channels: (4 on .*8|8 on .*4) on ", loop)


def case_join_refuses(rank, world):
    model = DistributedDataParallel(Network())

    def enter(*models):
        with syncbn.join(*models):
            raise AssertionError("entered")

    raises(ValueError, "models: got nothing first", enter)
    raises(ValueError, "models: got int first", enter, 3)
    raises(ValueError, "models: got int, expected", enter, model, 3)
    raises(ValueError, "with a DistributedDataParallel inside", enter, nn.Sequential(model))
    theirs = nn.Sequential(nn.SyncBatchNorm(4))
    raises(ValueError, r"torch.nn.SyncBatchNorm \(at 0\)", enter, theirs)
    apart = DistributedDataParallel(nn.Linear(2, 2), process_group=dist.new_group())
    raises(ValueError, "several process groups", enter, model, apart)
    sharded = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (world,)))
    raises(ValueError, "which has no join hook", enter, sharded)
    pair = dist.new_group([0, 1])
    if world > 2:
        if rank < 2:
            small = DistributedDataParallel(Network(), process_group=pair)
            raises(ValueError, r"ranks \[2\], expected only ranks \[0, 1\]", enter, small)
    with syncbn.join(model):
        raises(RuntimeError, "inside another one", enter, model)
        with contextlib.suppress(RuntimeError), torch.no_grad():
            model(batch(rank, 0))
            raise AssertionError("a forward pass without a backward one")
        with torch.no_grad(), model.no_sync():
            model(batch(rank, 0))
    before = copy.deepcopy(model.module)
    with syncbn.join(model, enable=False):
        assert not model._join_config.enable and not model._forward_pre_hooks
    model.zero_grad()
    before.zero_grad()
    assert_same_layers(model.module, before)
