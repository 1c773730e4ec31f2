# SPDX-License-Identifier: Apache-2.0
"""The layer as torch.nn.SyncBatchNorm, over the ranks of a process group; run by
test_distributed.py as rank_cases.py is."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import syncbn
from rank_cases import raises


def own(rank: int) -> torch.Tensor:
    return torch.randn(2 + rank, 4, generator=torch.Generator().manual_seed(rank))


def of_all(world: int) -> int:
    return sum(range(2, 2 + world))


def count_of(layer: nn.Module, rank: int) -> int:
    """Over how many samples a training call of the layer has its statistics."""
    layer(own(rank))
    return syncbn.report(layer)[0].count


def group_of_one(rank: int, world: int) -> dist.ProcessGroup:
    return [dist.new_group([r]) for r in range(world)][rank]


def case_a_process_group_that_is_set_shares_statistics(rank, world):
    """As with torch.nn.SyncBatchNorm, whose forward reads the attribute."""
    alone = group_of_one(rank, world)
    layer = syncbn.SyncBatchNorm(4, timeout=27, engine="process_group")
    assert count_of(layer, rank) == of_all(world)
    layer.process_group = alone
    assert layer.process_group is alone and copy.deepcopy(layer).process_group is alone
    kept = syncbn.SyncBatchNorm(4, process_group=alone, timeout=27, engine="process_group")
    assert layer.state.sharing == kept.state.sharing
    assert count_of(layer, rank) == 2 + rank
    layer.process_group = None
    assert count_of(layer, rank) == of_all(world)
    nn.SyncBatchNorm.convert_sync_batchnorm(layer, alone)
    assert count_of(layer, rank) == 2 + rank


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4))


def trained(ddp: nn.Module, rank: int, converted: bool) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    if not converted:
        parameters = list(map(id, ddp.parameters()))
        buffers = [name for name, _ in ddp.named_buffers()]
        assert syncbn.convert_sync_batchnorm(ddp) is ddp
        assert type(ddp.module[1]) is syncbn.SyncBatchNorm
        assert list(map(id, ddp.parameters())) == parameters
        assert [name for name, _ in ddp.named_buffers()] == buffers
    for _ in range(3):
        optimizer.zero_grad()
        ddp(own(rank)).square().mean().backward()
        optimizer.step()
    return [value.clone() for value in ddp.state_dict().values()]


def case_conversion_after_ddp_is_conversion_before_it_exact(rank, world):
    """PyTorch's own tests convert in that order."""
    for options in (
        {},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"gradient_as_bucket_view": True},
    ):
        before = DistributedDataParallel(syncbn.convert_sync_batchnorm(network()), **options)
        expected = trained(before, rank, converted=True)
        after = DistributedDataParallel(network(), **options)
        for a, b in zip(trained(after, rank, converted=False), expected, strict=True):
            assert torch.equal(a, b)
        syncbn.revert_sync_batchnorm(after)
        assert type(after.module[1]) is nn.BatchNorm1d
        after(own(rank)).sum().backward()


def case_a_group_without_this_rank_is_an_error_of_an_exchange_alone(rank, world):
    """torch.nn.SyncBatchNorm accepts it too, and then trains on this rank's statistics alone."""
    group = dist.new_group([0])
    ways = {
        "made": lambda: syncbn.SyncBatchNorm(4, process_group=group),
        "converted": lambda: syncbn.convert_sync_batchnorm(nn.BatchNorm1d(4), group),
        "set": lambda: syncbn.set_group(syncbn.SyncBatchNorm(4), group),
    }
    for make in ways.values():
        layer = make()
        if rank == 0:
            assert count_of(layer, rank) == 2
            continue
        assert layer.process_group is dist.GroupMember.NON_GROUP_MEMBER
        (row,) = syncbn.report(layer)
        assert row.note == "this rank is not a member of the process group"
        before = {name: value.clone() for name, value in layer.state_dict().items()}
        text = "^process_group: got a group that this rank is not a member of, expected one with"
        raises(RuntimeError, text, layer, own(rank))
        assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
        assert torch.isfinite(layer.eval()(own(rank))).all()
        syncbn.prepare(layer)
    # It belongs to the layer, not to the rank.
    syncbn.report(layer, strict=True)
    layer = syncbn.SyncBatchNorm(4, process_group=group)
    layer.process_group = None
    assert count_of(layer, rank) == of_all(world)
    reverted = syncbn.revert_sync_batchnorm(
        syncbn.convert_sync_batchnorm(nn.SyncBatchNorm(4, process_group=group))
    )
    assert reverted.process_group is group
    syncbn.reset_groups(syncbn.SyncBatchNorm(4, process_group=group))


def case_converting_again_applies_what_is_given_and_keeps_the_rest(rank, world):
    alone = group_of_one(rank, world)
    own_settings = {"timeout": 7, "engine": "process_group", "statistics": "welford"}
    net = nn.Sequential(nn.BatchNorm1d(4))
    syncbn.convert_sync_batchnorm(net, alone, affine_grad="global", **own_settings)
    before, sharing = net[0].options(), net[0].state.sharing
    for arguments, changed in (
        ({}, {}),
        ({"statistics": "reproducible"}, {"statistics": "reproducible"}),
        ({"affine_grad": "share"}, {"affine_grad": "share"}),
        ({"sync": False}, {"sync": False}),
        ({"sync": True}, {"sync": True}),
    ):
        syncbn.convert_sync_batchnorm(net, **arguments)
        before = before._replace(**changed)
        assert net[0].options() == before and net[0].state.sharing == sharing
    assert count_of(net, rank) == 2 + rank
    syncbn.convert_sync_batchnorm(net, timeout=9)
    assert net[0].state.sharing == sharing._replace(limit=9.0)
    syncbn.convert_sync_batchnorm(net, engine="auto")
    assert net[0].state.sharing == sharing._replace(limit=9.0, engine="auto")
    assert net[0].process_group is alone
    syncbn.convert_sync_batchnorm(net, dist.group.WORLD)
    assert count_of(net, rank) == of_all(world) and net[0].state.sharing.timeout == 9
    syncbn.convert_sync_batchnorm(net, group_size=1)
    assert count_of(net, rank) == 2 + rank and net[0].state.sharing.timeout == 9


def case_an_error_of_converting_again_changes_nothing(rank, world):
    net = nn.Sequential(syncbn.SyncBatchNorm(4), nn.BatchNorm1d(4))
    net[0].inplace = True
    net[0].activation = "leaky_relu"
    before, sharing = net[0].options(), net[0].state.sharing
    text = "^inplace: got True with statistics='welford'"
    raises(ValueError, text, syncbn.convert_sync_batchnorm, net, statistics="welford", timeout=5)
    assert net[0].options() == before and net[0].state.sharing == sharing
    assert type(net[1]) is nn.BatchNorm1d


def case_a_device_mesh_of_one_axis_is_a_group(rank, world):
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("outer", "inner"))
    for axis, count in (("inner", of_all(world)), ("outer", 2 + rank)):
        for layer in (
            syncbn.SyncBatchNorm(4, process_group=mesh[axis]),
            syncbn.convert_sync_batchnorm(nn.BatchNorm1d(4), mesh[axis]),
            syncbn.set_group(syncbn.SyncBatchNorm(4), mesh[axis]),
        ):
            assert count_of(layer, rank) == count
            assert layer.process_group is mesh[axis].get_group()
    layer.process_group = mesh["inner"]
    assert count_of(layer, rank) == of_all(world)
    x = own(rank)
    y = syncbn.functional.sync_batch_norm(x, None, None, training=True, process_group=mesh["inner"])
    assert torch.equal(y, syncbn.SyncBatchNorm(4, affine=False)(x))
    sums = syncbn.parallel.all_reduce(torch.ones(1), mesh["inner"])
    assert sums == world
    text = (
        r"^process_group: got a DeviceMesh of 2 axes, expected one of one axis, as mesh\['name'\]"
    )
    raises(ValueError, text, syncbn.SyncBatchNorm, 4, process_group=mesh)
    first = syncbn.SyncBatchNorm(4, process_group=DeviceMesh("cpu", [0]))
    if rank > 0:
        raises(RuntimeError, "not a member of", first, x)
    else:
        assert count_of(first, rank) == 2
