# SPDX-License-Identifier: Apache-2.0
"""Groups of ranks: by size, by machine, changed later; reports; Ctrl-C. Run by test_distributed.py
as rank_cases.py is."""

import functools
import os
import signal
import socket
import threading
import time
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import syncbn
from rank_cases import raises
from support import run_snippets


def check_group(model, rank, ranks) -> None:
    """The model's one layer normalizes with the batch of these ranks."""
    batches = {r: torch.randn(3, 4, generator=torch.Generator().manual_seed(r)) for r in ranks}
    alone = syncbn.SyncBatchNorm(4, momentum=1.0, sync=False)
    alone(torch.cat(list(batches.values())))
    layer = next(m for m in model.modules() if isinstance(m, syncbn.SyncBatchNorm))
    layer.momentum = 1.0
    layer(batches[rank])
    assert torch.equal(layer.running_mean, alone.running_mean)


def case_group_size(rank, world):
    for size in (1, world):
        model = syncbn.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(4)), group_size=size)
        check_group(model, rank, range(rank - rank % size, rank - rank % size + size))
    convert = functools.partial(syncbn.convert_sync_batchnorm, nn.BatchNorm1d(4))
    for bad in (0, world + 1, 1.5):
        raises(ValueError, "group_size: got", convert, group_size=bad)
    raises(ValueError, "expected only one of them", convert, group_size=1, group="node")


def case_group_by_node(rank, world):
    """Two machines, of which the first has one rank: names decide, not a launcher's variables."""
    name = "first" if rank == 0 else "second"
    with mock.patch.object(socket, "gethostname", lambda: name):
        model = syncbn.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(4)), group="node")
    check_group(model, rank, [0] if rank == 0 else range(1, world))
    # The real machine is one.
    syncbn.set_group(model, group="node")
    check_group(model, rank, range(world))
    raises(ValueError, "group: got 'rack'", syncbn.set_group, model, group="rack")


def case_set_group_and_report(rank, world):
    model = syncbn.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(4), nn.InstanceNorm1d(4)))
    check_group(model, rank, range(world))
    rows = syncbn.report(model)
    assert [(r.path, r.ranks, r.rank, r.engine) for r in rows] == [
        ("0", world, rank, rows[0].engine)
    ]
    assert rows[0].engine != "none" and "syncbn.SyncBatchNorm" in str(rows)
    alone = dist.new_group([rank], use_local_synchronization=True)
    assert syncbn.set_group(model, alone) is model
    check_group(model, rank, [rank])
    assert syncbn.report(model)[0].note == "one rank"
    syncbn.set_group(model, timeout=7)
    assert model[0].state.sharing.timeout == 7
    for bad in (0, -1, float("nan"), "soon"):
        raises(ValueError, "timeout: got", syncbn.set_group, model, timeout=bad)


def case_interrupted_within_a_second(rank, world):
    """Ctrl-C while the others do not come."""
    layer = syncbn.SyncBatchNorm(4, timeout=60)
    check_interrupted(rank, layer, layer)


def check_interrupted(rank, layer, step):
    """step: the layer, or a compiled one, which must not compile again."""
    step(torch.randn(3, 4))
    for _ in range(3):  # a busy machine may hold a process back for longer
        delay = [_seconds_until_interrupted(step) if rank == 0 else None]
        dist.broadcast_object_list(delay)
        syncbn.reset_groups(layer)
        layer(torch.randn(3, 4))
        if delay[0] < 1:
            return
    raise AssertionError(f"interrupted after {delay[0]:.1f} seconds")


def _seconds_until_interrupted(step) -> float:
    """From Ctrl-C to its exception, in a step that waits for the others."""
    pressed = []

    def press():
        pressed.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Timer(0.5, press).start()
    try:
        step(torch.randn(3, 4))
        raise AssertionError("not interrupted")
    except KeyboardInterrupt:
        seconds = time.monotonic() - pressed[0]
    raises(syncbn.PeerLost, "interrupted", step, torch.randn(3, 4))
    return seconds


def case_later_groups_ask_no_name_server(rank, world):
    """PyTorch does for each new connection to the store, and for each new device of Gloo."""
    layer = syncbn.SyncBatchNorm(3)
    syncbn.prepare(layer)
    syncbn.reset_groups(layer)  # the first connection answers others, the second makes groups
    refused = mock.Mock(side_effect=AssertionError("a new one"))
    gloo = dist.ProcessGroupGloo
    with mock.patch.object(type(dist.distributed_c10d._get_default_store()), "clone", refused):
        with mock.patch.object(gloo, "create_default_device", refused):
            syncbn.reset_groups(layer)
    assert not refused.called
    layer(torch.ones(2, 3))


def case_page_of_groups(rank, world):
    """torch.nn.SyncBatchNorm takes groups that were made by hand only."""
    names = run_snippets("docs/groups.md")
    assert names["alone"] == 1 and names["everybody"] == world
    (row,) = syncbn.report(names["model"])
    assert row.ranks == world and row.count == world * 2 * 6 * 6  # one machine
