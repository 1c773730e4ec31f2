# SPDX-License-Identifier: Apache-2.0
"""syncbn.reset_groups where ranks differ: in the groups that they tried to make, in the layers of
their models, and in the statistics that an interrupt left there. Run by test_distributed.py as
rank_cases.py is."""

import copy
import datetime
import functools
import time
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import syncbn
from rank_cases import LogLines, diverges, raises, unchanged
from syncbn.exchange import failing, groups
from syncbn.exchange.failing import Attempt

#: Seconds of a process group that a mistaken layer waits in.
LIMIT = 2.0
#: Seconds that a reset may take on a busy machine; no limit may end meanwhile.
SOON = 15.0


def batch(rank, step=0):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def mistaken_layers(group):
    """What one rank makes alone."""
    other = dist.new_group(timeout=datetime.timedelta(seconds=LIMIT))
    part = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=LIMIT))
    yield {"process_group": group, "timeout": 1.5}
    yield {"process_group": group, "engine": "process_group"}
    yield {"process_group": other}
    yield {"process_group": part, "timeout": 1.0}


def case_one_reset_after_a_mistaken_layer(rank, world):
    """That one rank alone called, and that is gone: what it wanted is forgotten."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=LIMIT))
    layer = syncbn.SyncBatchNorm(4, process_group=group)
    layer(batch(rank))
    made = set(groups._own_groups)
    for options in mistaken_layers(group):
        model = nn.ModuleDict({"stem": layer})
        if rank == 1:
            model["mistake"] = syncbn.SyncBatchNorm(4, **options)
            raises(syncbn.ExchangeTimeout, "mistake", lambda m=model: m["mistake"](batch(rank)))
        else:
            raises((syncbn.ExchangeTimeout, syncbn.PeerLost), "", layer, batch(rank))
        dist.barrier()
        began = time.monotonic()
        text = "ask for different exchanges: rank 1: mistake, timeout="
        diverges(text, lambda m=model: syncbn.reset_groups(m))
        del model
        syncbn.reset_groups(layer)
        layer(batch(rank)).sum()
        assert time.monotonic() - began < SOON
        assert set(groups._own_groups) == made and not groups._unmade


def case_reset_compares_layers(rank, world):
    """Before it compares their statistics."""
    model = nn.ModuleDict({"stem": syncbn.SyncBatchNorm(4), "head": syncbn.SyncBatchNorm(3)})
    model["stem"](batch(rank))
    whole = copy.deepcopy(model)
    for name, said in (
        ("more", "more: none on .*, 5 of float32, 5 of float32, 1 of int64 on rank 1"),
        ("head", "head: 3 of float32, 3 of float32, 1 of int64 on .*, no statistics on rank 1"),
        ("stem", "stem: 4 of float32, 4 of float32, 1 of int64 on .*, none on rank 1"),
    ):
        if rank == 1:
            if name == "more":
                model["more"] = syncbn.SyncBatchNorm(5)
            elif name == "head":
                model["head"] = syncbn.SyncBatchNorm(3, track_running_stats=False)
            else:
                model["stem"].sync = False
        diverges(said, functools.partial(syncbn.reset_groups, model))
        model = copy.deepcopy(whole)
    syncbn.reset_groups(model)
    assert int(model["stem"].state.call) == 0  # of a copy


def interrupted(layer, rank):
    """Ctrl-C on rank 0 when its part is under way: the exchange ends well on the others."""

    def interrupt(attempt, work):
        raise KeyboardInterrupt

    if rank > 0:
        layer(batch(rank, 1))
        return
    # The others do not look meanwhile.
    with mock.patch.object(Attempt, "wait", interrupt), mock.patch.object(failing, "_tell"):
        raises(KeyboardInterrupt, "", layer, batch(rank, 1))


def everywhere(model):
    """Each rank's buffers, as bytes."""
    own = [(n, x.double().numpy().tobytes()) for n, x in model.state_dict().items()]
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def case_statistics_after_an_interrupt_are_those_of_one_rank_exact(rank, world):
    whole = torch.cat([batch(r, 1) for r in range(world)])
    for momentum in (0.1, None):
        options = {"engine": "process_group"}
        model = nn.ModuleDict(
            {
                "stem": syncbn.SyncBatchNorm(4, **options),
                "body": syncbn.SyncBatchNorm(4, dtype=torch.float64),
                "head": syncbn.SyncBatchNorm(4, momentum=momentum, **options),
                "frozen": syncbn.SyncBatchNorm(4, dtype=torch.bfloat16, **options).eval(),
                "none": syncbn.SyncBatchNorm(4, track_running_stats=False, **options),
                "alone": syncbn.SyncBatchNorm(4, sync=False),
            }
        )
        one = syncbn.SyncBatchNorm(4, momentum=momentum, sync=False)
        for name in ("stem", "head", "none", "alone"):
            model[name](batch(rank))
        one(torch.cat([batch(r) for r in range(world)]))
        interrupted(model["head"], rank)
        one(whole)
        # Frozen, and apart by what somebody loaded.
        model["frozen"].running_var[1] = 2.0 + rank
        before, alone = everywhere(model), copy.deepcopy(model["alone"].state_dict())
        calls = int(model["head"].state.call)
        assert calls == (1 if rank == 0 else 2)

        taken = "those of rank 0 for frozen; those of rank 1 for head"
        text = f"statistics differ between ranks.* {taken}"
        reset = functools.partial(syncbn.reset_groups, model, strict=True)
        diverges(text, reset)
        assert everywhere(model) == before

        with LogLines() as log:
            syncbn.reset_groups(model)
            syncbn.reset_groups(model, strict=True)
        assert len(log.lines) == (rank == 0)
        (line,) = log.of_all_ranks
        assert f"all took {taken}" in line
        unchanged(one, model["head"].state_dict())
        assert model["frozen"].running_var.tolist() == [1, 2, 1, 1]
        after = everywhere(model)
        shared = [[x for x in own if not x[0].startswith("alone")] for own in after]
        assert all(own == shared[0] for own in shared)
        assert all(torch.equal(alone[n], x) for n, x in model["alone"].state_dict().items())
        assert int(model["head"].state.call) == 2
        y = model["head"](batch(rank, 1))
        assert torch.equal(y, one(whole)[3 * rank : 3 * rank + 3])
