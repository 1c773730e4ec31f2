# SPDX-License-Identifier: Apache-2.0
"""Groups that do not fit what torch.distributed lists, that it does not list, or whose ranks are
simulated. torch.nn.SyncBatchNorm takes each of them for what it says."""

import datetime
import importlib
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import syncbn
from syncbn.exchange import callers, groups, turn
from syncbn.exchange.call import Peers

LISTED = "expected one that torch.distributed's init_process_group or new_group made"


class Elastic(dist.ProcessGroup):
    """A group as torchft makes it: of as many ranks as there are now. It is registered as one of
    this rank alone."""

    ranks, own_rank, name = 2, 0, None

    def __init__(self):
        super().__init__(0, 1)

    def size(self):
        return self.ranks

    def rank(self):
        return self.own_rank

    @property
    def group_name(self):
        if self.name is None:
            raise ValueError("ProcessGroup name not set")
        return self.name

    def _set_group_name(self, name):
        self.name = name


numbers = iter(range(1000))


def registered(ranks: int = 2) -> Elastic:
    group = Elastic()
    group.ranks = ranks
    backend = f"elastic{next(numbers)}"
    dist.Backend.register_backend(backend, lambda *_: group, devices=["cpu"])
    assert dist.new_group([0], backend=backend) is group
    return group


def refused(text: str, *uses, kind=RuntimeError):
    for use in uses:
        begin = time.monotonic()
        with pytest.raises(kind, match=text):
            use()
        assert time.monotonic() - begin < 10  # and not the limit of a group


def uses_of(group) -> tuple:
    layer, name = nn.BatchNorm1d(2), callers.group_name(group)
    sharing = callers.Sharing(name)

    def train():
        own = syncbn.SyncBatchNorm(2, process_group=group)
        own(torch.randn(4, 2))

    def strict():
        syncbn.report(nn.Sequential(syncbn.SyncBatchNorm(2, process_group=group)), strict=True)

    return (
        lambda: syncbn.convert_sync_batchnorm(layer, group),
        lambda: syncbn.set_group(syncbn.SyncBatchNorm(2), group),
        lambda: syncbn.prepare(syncbn.SyncBatchNorm(2, process_group=name)),
        lambda: syncbn.parallel.all_reduce(torch.ones(2), group),
        lambda: syncbn.ops.batch_norm(
            torch.randn(4, 2), *torch.ones(4, 2), torch.tensor([0]), group=group
        ),
        lambda: groups.peers(sharing),
        train,
        strict,
    )


def test_a_group_of_two_that_is_registered_as_one_of_this_rank(one_rank):
    group = registered()
    text = rf"process_group: got '{group.name}' of 2 ranks with this process as rank 0, but "
    text += r"torch.distributed lists its ranks as \[0\] and this process as rank 0; expected"
    refused(text, *uses_of(group))
    row = syncbn.report(syncbn.SyncBatchNorm(2, process_group=group))[0]
    assert row.engine == "none" and row.note.startswith("process_group: got")


@pytest.mark.parametrize(
    "size, rank, ranks",
    [
        *((2, 0, [0]), (0, 0, [0]), (1, 0, [0, 1]), (3, 0, [0, 1]), (1, 0, [])),
        *((2, 0, [0, 0]), (2, 1, [0, 1]), (1, 1, [0]), (1, 0, [1]), (2, 0, [0, 7])),
    ],
    ids=str,
)
def test_members_size_and_rank_are_compared(one_rank, monkeypatch, size, rank, ranks):
    group = registered(1)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group=None: list(ranks))
    monkeypatch.setattr(group, "ranks", size)
    monkeypatch.setattr(group, "own_rank", rank)
    refused("process_group: got .*; expected", lambda: groups.peers_of(group.name))


def test_groups_that_fit(one_rank):
    for group in (None, dist.group.WORLD, dist.new_group([0]), registered(1)):
        layer = syncbn.convert_sync_batchnorm(nn.BatchNorm1d(2), group)
        assert syncbn.report(layer, strict=True)[0].note == "one rank"


def test_groups_without_a_name(one_rank, tmp_path):
    unnamed = Elastic()
    plain = dist.ProcessGroup(dist.FileStore(str(tmp_path / "other"), 1), 0, 1)
    empty = Elastic()
    empty.name = ""
    for group in (unnamed, plain, empty):
        refused(
            f"process_group: got .*, which has no name, {LISTED}",
            lambda group=group: syncbn.convert_sync_batchnorm(nn.BatchNorm1d(2), group),
            lambda group=group: syncbn.set_group(syncbn.SyncBatchNorm(2), group),
            lambda group=group: syncbn.SyncBatchNorm(2, process_group=group),
            lambda group=group: setattr(syncbn.SyncBatchNorm(2), "process_group", group),
            lambda group=group: syncbn.parallel.all_reduce(torch.ones(2), group),
            kind=ValueError,
        )


def test_a_group_that_has_a_name_and_is_not_listed(one_rank):
    group = Elastic()
    group.name = "managed"
    torch._C._distributed_c10d._register_process_group("managed", group)
    try:
        text = f"process_group: got 'managed', which torch.distributed does not list, {LISTED}"
        refused(text, *uses_of(group))
    finally:
        torch._C._distributed_c10d._unregister_process_group("managed")


@pytest.fixture
def simulated():
    fake = importlib.import_module("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", rank=0, world_size=2, store=fake.FakeStore())
    yield
    dist.destroy_process_group()


def uses_of_the_world() -> tuple:
    def layer():
        return nn.Sequential(syncbn.SyncBatchNorm(2))

    def join():
        with syncbn.join(layer()):
            pass

    return (
        *uses_of(None),
        lambda: syncbn.convert_sync_batchnorm(nn.BatchNorm1d(2), group_size=2),
        lambda: syncbn.set_group(layer(), group="node"),
        lambda: syncbn.set_group(layer(), dist.new_group([0, 1])),
        join,
    )


FAKE = "process_group: got '.*', whose backend is 'fake' and exchanges nothing, expected"


def test_simulated_ranks(simulated):
    refused(FAKE, *uses_of_the_world())
    alone = syncbn.convert_sync_batchnorm(nn.BatchNorm1d(2), sync=False)
    assert alone(torch.randn(4, 2)).shape == (4, 2)
    assert syncbn.report(syncbn.SyncBatchNorm(2))[0].note.startswith("process_group: got")


def test_ranks_that_a_local_tensor_mode_simulates(simulated):
    local = pytest.importorskip("torch.distributed._local_tensor")
    with local.LocalTensorMode(2):
        refused(FAKE, *uses_of_the_world()[:5])


@pytest.mark.parametrize("debug", (False, True))
def test_the_limit_is_that_of_the_group(one_rank, monkeypatch, debug):
    """Also where TORCH_DISTRIBUTED_DEBUG=DETAIL wraps backends."""
    if debug:
        monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
        dist.set_debug_level_from_env()
    try:
        group = dist.new_group([0], timeout=datetime.timedelta(seconds=77))
    finally:
        monkeypatch.undo()
        dist.set_debug_level_from_env()
    assert callers.limit_of(group) == 77


def test_the_limit_of_a_group_that_tells_none_is_that_of_the_default_group(one_rank):
    assert callers.limit_of(registered()) == 55


@pytest.mark.parametrize(
    "config, nccl, alone",
    [
        *((f"cuda:{name}", True, True) for name in ("nccl", "nccl2", "nccl-lazy", "nccl-legacy")),
        ("cuda:ncclx,cpu:gloo", True, False),
        ("cpu:gloo,cuda:gloo", False, False),
        ("cpu:nccl2test", False, False),
    ],
)
def test_backends_that_exchange_over_nccl(one_rank, monkeypatch, config, nccl, alone):
    """Names of PyTorch 2.15 and of torchcomms."""
    group = dist.group.WORLD
    monkeypatch.setitem(dist.distributed_c10d._world.pg_backend_config, group, config)
    name = callers.nccl_name(group)
    assert name == (group.group_name if nccl else "")
    assert callers.is_nccl_alone(name) == alone


def test_a_refusal_over_nccl_goes_by_the_device_that_the_group_is_bound_to(one_rank, monkeypatch):
    """From PyTorch 2.15 on each NCCL group is; another device is an error there."""
    group = dist.group.WORLD
    monkeypatch.setitem(dist.distributed_c10d._world.pg_backend_config, group, "cuda:nccl2")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    peers = Peers("", 2, 0, 1.0, cuda=group.group_name)
    assert turn._device_of_others(peers, None, None, None) == torch.device("cuda", 0)
    bound = group.bound_device_id
    group.bound_device_id = torch.device("cuda", 3)
    try:
        assert turn._device_of_others(peers, None, None, None) == torch.device("cuda", 3)
    finally:
        group.bound_device_id = bound
