# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing on several ranks; as rank_cases.py. In all of these
torch.nn.SyncBatchNorm updates its running statistics in both runs of a segment and exchanges in
both, where it runs at all: it refuses the CPU."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import syncbn
from checkpoint_support import FORMS, Net, recomputing, reentrant
from rank_cases import CountCollectives, raises
from support import assert_same_step
from test_static_graph import Graphs


def share(rank, world, step=0, empty=None):
    """Uneven shares."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    samples = 0 if rank == empty else 3 + rank
    return torch.randn(samples, 5, generator=generator)


def case_checkpoint_exchanges_once_exact(rank, world):
    Net()(share(rank, world))  # makes the group
    for form, (outer, inner) in FORMS.items():
        models, x = (Net(outer, inner), Net()), share(rank, world)
        forward, backward = assert_same_step(*models, x, CountCollectives)
        # Six of them compare three layers with those of equal paths before.
        assert forward.names == ["all_reduce"] * 10, (form, forward.names)
        assert backward.names == ["all_reduce"] * 4, (form, backward.names)


def case_checkpoint_modes_exact(rank, world):
    """An empty rank, of another dtype than the group, and the welford mode."""
    for form in (recomputing, reentrant):
        for options in ({}, {"statistics": "welford"}, {"activation": "leaky_relu"}):
            x = share(rank, world, empty=1)
            assert_same_step(Net(form, **options), Net(**options), x)
            with torch.autocast("cpu", torch.bfloat16):
                assert_same_step(Net(form, **options), Net(**options), x)


class Once(nn.Module):
    """Its second run makes a call that the first did not."""

    def __init__(self, run):
        super().__init__()
        self.run, self.runs = run, 0
        self.bn, self.extra = (syncbn.SyncBatchNorm(5) for _ in range(2))
        self.extra.state.name = "extra"

    def body(self, x):
        self.runs += 1
        if self.runs == 2:
            x = self.extra(x)
        return self.bn(x).exp()

    def forward(self, x):
        return self.run(self.body, x)


def case_checkpoint_that_runs_otherwise_is_an_error(rank, world):
    """On the rank where it happens, and without an exchange, so that the group stays usable."""
    for form in (recomputing, reentrant):
        y = Once(form)(share(rank, world).requires_grad_())
        with CountCollectives() as counted:
            raises(RuntimeError, "^extra: the recomputation", y.sum().backward)
        assert counted.names == []
        syncbn.SyncBatchNorm(5)(share(rank, world))


def case_checkpoint_under_ddp_exact(rank, world):
    for form, options in (
        (recomputing, {}),
        (recomputing, {"static_graph": True}),
        # Needs a static graph, because its parameters become ready inside of a nested backward.
        (reentrant, {"static_graph": True}),
    ):
        model = DistributedDataParallel(Net(form, form), **options)
        reference = DistributedDataParallel(Net(), **options)
        for number in range(2):
            assert_same_step(model, reference, share(rank, world, number))


def case_compiled_checkpoint_exact(rank, world):
    """One graph with one exchange per layer and direction; buffers change once."""
    if world != 2:  # compiling costs seconds, and the graph is the same
        return
    graphs, reference = Graphs(), Net()
    model = Net(recomputing, recomputing)
    model.compile(backend=graphs.backend, fullgraph=True)
    for number in range(2):
        assert_same_step(model, reference, share(rank, world, number))
    assert graphs.forward == graphs.backward == [4], (graphs.forward, graphs.backward)
