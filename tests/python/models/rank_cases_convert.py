# SPDX-License-Identifier: Apache-2.0
"""Conversion and reports over the ranks of a process group; run by test_distributed.py as
rank_cases.py is."""

import torch
import torch.distributed as dist
from torch import nn

import syncbn
from rank_cases import raises
from syncbn.exchange import groups


class OwnBatchNorm(nn.BatchNorm1d):
    pass


def case_an_error_of_one_rank_s_conversion_is_raised_on_all(rank, world):
    """torch.nn.SyncBatchNorm's converter is local: the other ranks would wait in the first step."""
    net = nn.Sequential(nn.BatchNorm1d(4), nn.Identity())
    if rank == 1:
        net[1] = nn.LazyBatchNorm1d()
    own, other = "^module: got 1, a LazyBatchNorm1d", "^rank 1: .*module: got 1, a Lazy"
    raises(ValueError, own if rank == 1 else other, syncbn.convert_sync_batchnorm, net)
    assert type(net[0]) is nn.BatchNorm1d and "state" not in vars(net[0])
    net[1] = nn.Identity()
    assert type(syncbn.convert_sync_batchnorm(net)[0]) is syncbn.SyncBatchNorm


def case_a_wrong_option_of_one_rank_is_raised_on_all(rank, world):
    statistics = "median" if rank == 1 else "reproducible"
    own, other = "^statistics: got 'median'", "^rank 1: .*statistics: got 'median'"
    net = nn.Sequential(nn.BatchNorm1d(4))
    text, options = own if rank == 1 else other, {"statistics": statistics, "timeout": 5}
    raises(ValueError, text, syncbn.convert_sync_batchnorm, net, **options)
    assert type(net[0]) is nn.BatchNorm1d


def case_conversion_with_sync_false_is_local(rank, world):
    if rank == 0:
        syncbn.convert_sync_batchnorm(nn.BatchNorm1d(4), sync=False)


def case_report_shows_the_group_and_the_last_count(rank, world):
    net = syncbn.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4)))
    pair = dist.new_group([0, 1])
    if rank < 2:
        syncbn.set_group(net[1], pair)
        x = net[0](torch.randn(2 + rank, 4, 3))
        net[1](x)
        rows = syncbn.report(net)
        assert [(r.group, r.ranks) for r in rows] == [("world", world), (pair.group_name, 2)]
        assert [r.count for r in rows] == [3 * sum(range(2, 2 + world)), 15]
        assert rows[0].rank == rank and rows[0].engine != "none"
    else:
        net[0](torch.randn(2 + rank, 4, 3))
    dist.barrier()


def case_strict_report_is_the_same_error_on_every_rank(rank, world):
    net = syncbn.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(4)))
    assert len(syncbn.report(net, strict=True)) == 1
    begin = r"^synchronization cannot happen.*to leave\):"
    net.add_module("own", OwnBatchNorm(4))
    line = "\n  own: rank_cases_convert.OwnBatchNorm: not synchronized by syncbn$"
    raises(RuntimeError, begin + line, syncbn.report, net, strict=True)
    if rank != 1:
        del net.own
    line = "\n  on rank 1:\n  own: rank_cases_convert.OwnBatchNorm: not synchronized by syncbn$"
    raises(RuntimeError, begin + line, syncbn.report, net, strict=True)
    # On the last rank alone another converter has been at work.
    theirs = syncbn.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(4)))
    if rank == world - 1:
        theirs[0] = nn.SyncBatchNorm(4)
    line = f"\n  on rank {world - 1}:\n  0: torch.SyncBatchNorm: not synchronized by syncbn: .*$"
    raises(RuntimeError, begin + line, syncbn.report, theirs, strict=True)


class OwnSync(nn.SyncBatchNorm):
    pass


def case_a_group_that_pytorch_s_layer_has_is_kept(rank, world):
    """PyTorch's converter gives a torch.nn.SyncBatchNorm the default group, whatever it had."""
    own = [dist.new_group([r]) for r in range(world)][rank]
    syncbn.register_conversion(OwnSync, lambda layer, sync: sync(layer))
    net = nn.Sequential(
        nn.SyncBatchNorm(4, process_group=own), OwnSync(4, process_group=own), nn.SyncBatchNorm(4)
    )
    syncbn.convert_sync_batchnorm(net, timeout=7)
    assert [r.ranks for r in syncbn.report(net)] == [1, 1, world]
    assert {layer.state.sharing.timeout for layer in net} == {7}
    syncbn.revert_sync_batchnorm(net)
    assert [type(layer) for layer in net] == [nn.SyncBatchNorm, OwnSync, nn.SyncBatchNorm]
    assert net[0].process_group is own and net[1].process_group is own
    assert net[2].process_group is None
    # A group that the call asks for is for all layers.
    syncbn.convert_sync_batchnorm(net, dist.group.WORLD)
    assert [r.ranks for r in syncbn.report(net)] == [world] * 3
    # The groups exist before a first step that is compiled.
    pair = dist.new_group([0, 1])
    theirs = nn.SyncBatchNorm(4, process_group=pair if rank < 2 else own)
    syncbn.convert_sync_batchnorm(theirs)
    made = len(groups._own_groups)
    syncbn.prepare(theirs)
    assert len(groups._own_groups) == made
    dist.barrier()
