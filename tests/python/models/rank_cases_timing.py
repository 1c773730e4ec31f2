# SPDX-License-Identifier: Apache-2.0
"""syncbn.timing over the ranks of a group; run by test_distributed.py as rank_cases.py is."""

import contextlib
import time
from collections import OrderedDict

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

import syncbn
from rank_cases import diverges, raises
from support import assert_same_step

STEPS = 4


class Sleep(nn.Module):
    """Keeps this rank from the next layer."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x):
        time.sleep(self.seconds)
        return x


def network(seconds: float = 0.0, **options) -> nn.Module:
    layers = {"a": nn.BatchNorm1d(4), "pause": Sleep(seconds), "b": nn.BatchNorm1d(4)}
    layers["c"] = nn.BatchNorm1d(4)
    return syncbn.convert_sync_batchnorm(nn.Sequential(OrderedDict(layers)), **options)


def steps(net: nn.Module, count: int = STEPS) -> None:
    for _ in range(count):
        net(torch.randn(3, 4, 5, requires_grad=True)).sum().backward()


def case_the_rank_that_sleeps_is_named_with_the_layer(rank, world):
    late = world - 1
    for options in ({}, {"statistics": "welford"}):
        net = network(0.05 if rank == late else 0.0, **options)
        steps(net, 1)  # of forming the group nobody is told
        with syncbn.timing(net) as times:
            steps(net)
        assert times.straggler == late, str(times)
        first, most = f"rank {late} came last in ", ", mostly at b"
        assert times.summary.startswith(first) and times.summary.endswith(most)
        a, b, c = times
        assert [row.path for row in times] == ["a", "b", "c"]
        assert b.exchanges == b.compared == sum(b.came_last.values()) >= 2 * STEPS
        assert b.came_last[late] >= STEPS and b.waited_for[late] > 0.1, str(times)
        if rank != late:
            assert b.waited > a.waited + c.waited and b.waited > b.summed + b.normalized
        assert min(b.summed, b.waited, b.normalized) > 0
        said = [None] * world
        dist.all_gather_object(said, ([row[5:] for row in times], times.summary, times.svg()))
        assert all(one == said[0] for one in said)


def case_ranks_of_a_subgroup_have_their_global_numbers(rank, world):
    pair = dist.new_group([world - 2, world - 1])
    net = network()
    syncbn.set_group(net.b, pair)
    if rank >= world - 2:
        with syncbn.timing(net.b) as times:
            steps(net.b, 2)
        (row,) = times
        assert list(row.came_last) == [world - 2, world - 1] and row.compared == row.exchanges
    dist.barrier()


def case_timing_changes_no_bit(rank, world):
    net = network()
    with syncbn.timing(net):
        assert_same_step(net, network(), torch.randn(3, 4, 5))
    assert all(layer.state.times is None for layer in (net.a, net.b, net.c))


def case_compiled_steps_are_timed_and_not_compiled_again(rank, world):
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    net = syncbn.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(4)))
    step = torch.compile(net, backend=backend, fullgraph=True)
    x = torch.randn(3, 4, 5, requires_grad=True)
    step(x).sum().backward()
    before = len(compiled)
    with syncbn.timing(net) as times:
        step(x).sum().backward()
        step(x).sum().backward()
    step(x)
    assert len(compiled) == before
    assert times[0].exchanges == times[0].compared == 4 and times[0].summed > 0


def case_the_waits_are_ranges_of_a_profile(rank, world):
    net = syncbn.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(4)))
    steps(net, 1)
    for on in (False, True):
        timing = syncbn.timing(net) if on else contextlib.nullcontext()
        with profile(activities=[ProfilerActivity.CPU]) as profiler, timing:
            steps(net, 1)
        waits = [event for event in profiler.events() if event.name == "syncbn::wait"]
        expected = {"syncbn::forward_begin", "syncbn::backward_begin"}
        noted = on and syncbn.report(net)[0].engine == "shared memory"
        assert {event.cpu_parent.name for event in waits} == (expected if noted else set())


def case_other_layers_on_one_rank_are_an_error_on_all(rank, world):
    net = network()
    steps(net, 1)

    def time_it():
        with syncbn.timing(net.b if rank == 0 else net):
            steps(net, 1)

    diverges("^syncbn.timing of . layers from .*: layer: syncbn.tim", time_it)
    steps(net, 1)


def case_a_rank_that_leaves_the_block_is_named(rank, world):
    net = network(timeout=2.25)  # a group of its own, which breaks
    steps(net, 1)

    def time_it():
        with syncbn.timing(net):
            steps(net, 1)
            if rank == 0:
                raise KeyError("left")

    if rank == 0:
        raises(KeyError, "left", time_it)
    else:
        lost = "^syncbn.timing of 3 layers from 'a', gathering, .*rank 0: in no exchange; its last"
        raises((syncbn.ExchangeTimeout, syncbn.PeerLost), lost, time_it)
    assert net.a.state.times is None
    dist.barrier()
