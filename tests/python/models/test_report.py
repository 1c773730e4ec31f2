# SPDX-License-Identifier: Apache-2.0
"""syncbn.report on one process; on several ranks: rank_cases_convert.py. torch.nn.SyncBatchNorm
tells nothing: without a process group it computes this process's statistics, silently."""

import copy
import pickle

import pytest
import torch
from torch import nn

import syncbn
from syncbn.models.classes import Conversion, registered
from syncbn.parallel import SelfDataParallel


class OwnBatchNorm(nn.BatchNorm2d):
    pass


def model():
    return syncbn.convert_sync_batchnorm(
        nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.InstanceNorm2d(4))
    )


def test_rows_and_table():
    net = model()
    net.add_module("plain", nn.BatchNorm1d(2))
    net.add_module("theirs", nn.SyncBatchNorm(2))
    net.eval()
    net[1].train()
    rows = syncbn.report(net)
    assert [(r.path, r.layer) for r in rows] == [
        ("1", "syncbn.SyncBatchNorm"),
        ("plain", "torch.BatchNorm1d"),
        ("theirs", "torch.SyncBatchNorm"),
    ]
    assert rows[0][2:6] == ("", 1, 0, "none")
    assert rows[0].statistics == "reproducible" and rows[0].kernels == syncbn.cpu_instruction_set()
    assert rows[0].count is None and rows[0].note == "no process group"
    assert rows[1].note == "not synchronized by syncbn"
    assert rows[2].note.startswith("not synchronized by syncbn: not converted, or replaced")
    heading, *lines = str(rows).splitlines()
    assert heading.split() == list(rows[0]._fields) and len(lines) == 3
    assert lines[1].startswith("plain   torch.BatchNorm1d") and "None" not in lines[1]


@pytest.mark.parametrize("options", ({}, {"statistics": "welford"}, {"sync": False}))
def test_the_last_count(options):
    """Elements per channel: samples times pixels."""
    net = syncbn.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(3)), **options)
    assert syncbn.report(net)[0].count is None
    for samples in (2, 5):
        net(torch.randn(samples, 3, 4, 6))
        assert syncbn.report(net)[0].count == samples * 24
    net.eval()(torch.randn(7, 3, 4, 6))
    assert syncbn.report(net)[0].count == 120
    net.train()(torch.empty(0, 3, 4, 6))
    assert syncbn.report(net)[0].count == 0
    net[0]([torch.randn(n, 3, 2, 2) for n in (1, 2)]) if options == {} else None
    assert syncbn.report(net)[0].count == (12 if options == {} else 0)


def test_the_last_count_is_no_state_of_the_model_and_copies_have_none_yet():
    net = model()
    names = list(net.state_dict())
    net(torch.randn(2, 3, 4, 4))
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert syncbn.report(other)[0].count is None
    assert list(net.state_dict()) == names == list(syncbn.revert_sync_batchnorm(net).state_dict())


def failing(net):
    with pytest.raises(RuntimeError, match="^synchronization cannot happen in these layers") as e:
        syncbn.report(net, strict=True)
    return str(e.value).splitlines()[1:]


def test_strict_without_a_process_group():
    assert failing(model()) == ["  1: syncbn.SyncBatchNorm: no process group"]
    assert failing(model()[1]) == ["  the model: syncbn.SyncBatchNorm: no process group"]
    assert len(syncbn.report(SelfDataParallel(model(), ["cpu"] * 2), strict=True)) == 1
    assert failing(SelfDataParallel(model(), ["cpu"])) != []
    net = syncbn.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(4)), sync=False)
    assert syncbn.report(net, strict=True)[0].note == "sync=False"


def test_strict_with_one_rank(one_rank):
    """One rank has all statistics; other layers and groups that are gone are refused."""
    net = model()
    assert syncbn.report(net, strict=True)[0].note == "one rank"
    net.add_module("own", OwnBatchNorm(4))
    net.add_module("lazy", nn.LazyBatchNorm2d())
    net[1].share(net[1].state.sharing._replace(name="gone"))
    first, own, lazy = failing(net)
    assert first.startswith("  1: syncbn.SyncBatchNorm: process_group: no process group named 'gon")
    assert own == "  own: test_report.OwnBatchNorm: not synchronized by syncbn"
    assert lazy == "  lazy: torch.LazyBatchNorm2d: not synchronized by syncbn"


def test_layers_that_fsdp_has_sharded(one_rank, monkeypatch):
    """fully_shard gives a layer a class of its own, of PyTorch's package: torch.FSDPBatchNorm2d."""
    monkeypatch.setitem(registered, OwnBatchNorm, Conversion(lambda layer, sync: layer, None))
    net = nn.Sequential(syncbn.SyncBatchNorm(4), OwnBatchNorm(4), nn.SyncBatchNorm(4))
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    for layer in net:
        torch.distributed.fsdp.fully_shard(layer, mesh=mesh)
    own, left, theirs = syncbn.report(net)
    names = [row.layer for row in (own, left, theirs)]
    assert names == ["syncbn.SyncBatchNorm", "test_report.OwnBatchNorm", "torch.SyncBatchNorm"]
    assert left.note == "left as registered" and "another converter" in theirs.note
    assert [line.split(":")[0] for line in failing(net)] == ["  2"]


def test_strict_takes_what_is_registered_to_be_left(one_rank, monkeypatch):
    monkeypatch.setitem(registered, OwnBatchNorm, Conversion(lambda layer, sync: layer, None))
    net = nn.Sequential(OwnBatchNorm(4))
    assert syncbn.report(net, strict=True)[0].note == "left as registered"
