# SPDX-License-Identifier: Apache-2.0
"""syncbn.join as one of the Joinables of torch's Join. Run by test_distributed.py as rank_cases.py
is.

What torch.nn.SyncBatchNorm does in torch's Join: see rank_cases_join.py.
"""

import datetime
import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import syncbn
from rank_cases import CountCollectives, raises
from rank_cases_join import Network, batch, check_uneven, numbers_of_batches, run_steps
from support import assert_same_layers, new_layer
from syncbn.exchange import groups


def in_join(model):
    return Join([syncbn.join(model)])


def case_joinable_of_ddp_exact(rank, world):
    for counts in numbers_of_batches(world):
        check_uneven(rank, world, counts, DistributedDataParallel, join=in_join)


def case_joinable_of_a_plain_model_exact(rank, world):
    for counts in numbers_of_batches(world):
        check_uneven(rank, world, counts, lambda network: network, join=in_join)


def train(rank, steps, context, **options):
    """Outputs of each step, then parameters and buffers. context: of the model, the optimizer and
    another model, which each iteration trains before."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(12, 4), new_layer(4))
    model = DistributedDataParallel(network)
    other = DistributedDataParallel(nn.Linear(3, 2))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    joined, with_other = context(model, optimizer, other)
    seen = []
    with joined:
        for step in range(steps):
            if with_other:
                other(batch(rank, step)).sum().backward()
            model.zero_grad()
            y = model(batch(rank, step))
            y.square().sum().backward()
            optimizer.step()
            seen.append(y.detach())
    assert not model._join_config.enable and not model._forward_pre_hooks
    return seen + [tensor.detach().clone() for tensor in network.state_dict().values()]


def case_joinable_beside_an_optimizer_has_the_bits_of_the_context(rank, world):
    """First in the list, second, and with the optimizer inside. torch's Join([ddp, optimizer])
    trains a model without synchronized layers in this way; it cannot have the optimizer first (see
    docs/uneven_inputs.md)."""
    for counts in numbers_of_batches(world):
        for options in ({}, {"divide_by_initial_world_size": False}):
            forms = (
                lambda m, o, _, k=options: (syncbn.join(m, o, **k), False),
                lambda m, o, _, k=options: (Join([syncbn.join(m), o], **k), False),
                lambda m, o, _, k=options: (Join([syncbn.join(m, o)], **k), False),
                lambda m, o, other, k=options: (Join([other, syncbn.join(m), o], **k), True),
            )
            expected, *others = [train(rank, counts[rank], form) for form in forms]
            for form, actual in enumerate(others):
                for a, b in zip(actual, expected, strict=True):
                    assert torch.equal(a, b), f"form {form}, {counts}, {options}"
            for tensor in expected[counts[rank] :]:  # the same on all ranks
                first = tensor.clone()
                dist.broadcast(first, 0)
                assert torch.equal(tensor, first)


def case_joinable_divides_by_ranks_with_inputs(rank, world):
    """A model that is not the first: torch's Join divides its gradients by the number of all
    ranks, whatever divide_by_initial_world_size says."""
    first = new_layer(3)
    model = DistributedDataParallel(nn.Linear(3, 2))
    inputs = batch(0, 0)[:, 0]
    with syncbn.join(first, model, divide_by_initial_world_size=False):
        for _ in range(2 if rank == 0 else 1):
            first(inputs)
            model.zero_grad()
            model(inputs).sum().backward()
    if rank == 0:  # alone in the second iteration: its own gradient, of two samples, and zeros
        assert torch.equal(model.module.weight.grad, inputs.sum(0).expand(2, 3))


def case_joinable_throws_on_early_termination(rank, world):
    model = DistributedDataParallel(Network())
    done = []

    def loop():
        with Join([syncbn.join(model)], throw_on_early_termination=True):
            for _ in range(1 if rank == 1 else 3):
                done.extend(run_steps(model, rank, 1))

    raises(RuntimeError, "exhausted", loop)
    assert len(done) == 1
    assert not model._forward_pre_hooks
    run_steps(model, rank, 1)


def case_joinable_costs(rank, world):
    """In each iteration one notification of torch's Join and one agreement."""
    model = Network()
    run_steps(model, rank, 1)
    with CountCollectives() as count, in_join(model):
        run_steps(model, rank, 2)
    # Two layers, two directions; agreement; notification, and one more of these at the end.
    assert count.names == ["all_reduce"] * (2 * (4 + 1 + 1) + 1), count.names


def case_joinable_leaves_nothing_behind(rank, world):
    """torch's Join leaves DistributedDataParallel notifying; after an error too."""
    model = DistributedDataParallel(Network())
    run_steps(model, rank, 1)
    before = set(groups._own_groups)

    def loop(joined, steps, fail):
        with Join([joined]):
            run_steps(model, rank, steps)
            if fail:
                raise KeyError("sample 7")

    gc.disable()  # a count of references is enough
    try:
        joined = syncbn.join(model)
        for steps, fail in ((1 + rank, False), (2, True), (2 - rank % 2, False)):
            if fail:
                raises(KeyError, "sample 7", lambda: loop(joined, 2, True))
            else:
                loop(joined, steps, False)
            assert set(groups._own_groups) == before
            assert not model._join_config.enable
            assert not model._forward_pre_hooks
            new_layer(4)(batch(rank, 0))  # of no context: all ranks
    finally:
        gc.enable()


def case_joinable_error_on_one_rank_ends_at_the_limits(rank, world):
    """Ranks with inputs: the layers' limit, with where the others are. Those without wait for
    torch's notification, until their process group's own limit, as with torch's layers alone."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=3))
    network = Network(timeout=1.25)
    model = DistributedDataParallel(network, process_group=group)

    def loop():
        with in_join(model):
            for step in range(0 if rank == world - 1 else 5):
                run_steps(model, rank, 1)
                if rank == 0 and step == 1:
                    raise KeyError("sample 7")

    if rank == 0:
        raises(KeyError, "sample 7", loop)
    elif rank == world - 1:
        raises(RuntimeError, "Timed out|closed", loop)
    else:
        raises(syncbn.ExchangeTimeout, r"syncbn.join, call 3, next input.*rank 0", loop)
    assert not model._forward_pre_hooks
    new_layer(4)(batch(rank, 0))


def case_joinable_refuses(rank, world):
    model, other = (DistributedDataParallel(Network()) for _ in range(2))
    own = dist.new_group(list(range(world)))
    apart = DistributedDataParallel(nn.Linear(2, 2), process_group=own)

    def enter(*joinables):
        with Join(list(joinables)):
            raise AssertionError("entered")

    raises(
        ValueError,
        "options inside of torch's Join, expected them as arguments of Join",
        lambda: enter(syncbn.join(model, throw_on_early_termination=True)),
    )
    raises(
        RuntimeError, "inside another one", lambda: enter(syncbn.join(model), syncbn.join(other))
    )
    raises(ValueError, "several process groups", lambda: enter(syncbn.join(model, apart)))
    raises(ValueError, "multiple process groups", lambda: enter(syncbn.join(model), apart))
    with Join([syncbn.join(model)], enable=False):
        assert not model._join_config.enable and not model._forward_pre_hooks
        run_steps(model, rank, 1)
    run_steps(other, rank, 1)
    assert_same_layers(model.module.first, other.module.first)
