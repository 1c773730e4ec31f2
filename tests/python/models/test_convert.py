# SPDX-License-Identifier: Apache-2.0
"""convert_sync_batchnorm and revert_sync_batchnorm on one rank."""

import copy

import pytest
import torch
from torch import nn

import syncbn

PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def model() -> nn.Module:
    shared = nn.BatchNorm2d(4)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), shared, nn.ReLU(), nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
    )
    net.also = shared
    return net


@pytest.mark.parametrize("cls", PLAIN)
def test_a_layer_keeps_everything_but_its_class(cls):
    layer = cls(4, eps=0.01, momentum=None).eval().double()
    layer.bias.requires_grad_(False)
    layer.qconfig = "kept"
    calls = []
    layer.register_forward_hook(lambda *_: calls.append(1))
    state = copy.deepcopy(layer.state_dict())
    converted = syncbn.convert_sync_batchnorm(layer)
    assert type(converted) is syncbn.SyncBatchNorm
    assert converted.weight is layer.weight and converted.running_var is layer.running_var
    assert (converted.eps, converted.momentum, converted.training) == (0.01, None, False)
    assert not converted.bias.requires_grad and converted.qconfig == "kept"
    converted(torch.randn(2, 4, 3, 3, dtype=torch.float64))
    assert calls == [1]
    assert list(converted.state_dict()) == list(state)
    reverted = syncbn.revert_sync_batchnorm(converted)
    assert type(reverted) is cls and reverted.weight is layer.weight
    assert set(vars(reverted)) == set(vars(cls(4))) | {"qconfig"}
    assert [name for name, _ in reverted.named_buffers()] == [n for n, _ in layer.named_buffers()]


def test_layers_made_by_hand_revert_to_the_default():
    assert type(syncbn.revert_sync_batchnorm(syncbn.SyncBatchNorm(4))) is nn.BatchNorm2d
    layer = syncbn.revert_sync_batchnorm(syncbn.SyncBatchNorm(4), default=nn.BatchNorm1d)
    assert type(layer) is nn.BatchNorm1d


@pytest.mark.parametrize(
    "default", ("BatchNorm2d", nn.BatchNorm2d(4), nn.Linear, nn.InstanceNorm2d, nn.LazyBatchNorm2d)
)
def test_a_default_that_is_no_batch_norm_class_is_refused(default):
    """A layer of such a class would not be what it says: not initialized, or another operation.
    torch.nn.SyncBatchNorm has no inverse."""
    layer = syncbn.SyncBatchNorm(4)
    with pytest.raises(ValueError, match="^default: got .*, expected .*BatchNorm1d"):
        syncbn.revert_sync_batchnorm(layer, default=default)
    assert type(layer) is syncbn.SyncBatchNorm


def test_revert_changes_nothing_if_one_layer_cannot_be_reverted():
    net = syncbn.convert_sync_batchnorm(model())
    net[3][1].activation = "relu"
    layers = list(net.modules())
    with pytest.raises(ValueError, match=r"^3\.1: got a layer with activation 'relu'"):
        syncbn.revert_sync_batchnorm(net)
    assert all(a is b for a, b in zip(net.modules(), layers, strict=True))


def test_revert_changes_nothing_if_a_group_is_gone():
    """torch.nn.SyncBatchNorm holds the group itself, so it must be there."""
    net = nn.Sequential(nn.BatchNorm2d(4), nn.SyncBatchNorm(4))
    syncbn.convert_sync_batchnorm(net)
    net[1].share(net[1].state.sharing._replace(name="gone"))
    layers = list(net.modules())
    with pytest.raises(RuntimeError, match="no process group named 'gone'"):
        syncbn.revert_sync_batchnorm(net)
    assert all(a is b for a, b in zip(net.modules(), layers, strict=True))


def layers_of(net: nn.Module) -> list[syncbn.SyncBatchNorm]:
    return [m for m in net.modules() if isinstance(m, syncbn.SyncBatchNorm)]


def test_options_go_to_every_layer():
    options = {"affine_grad": "global", "statistics": "welford", "sync": False}
    layers = layers_of(syncbn.convert_sync_batchnorm(model(), **options))
    assert len(layers) == 2
    for layer in layers:
        by_hand = syncbn.SyncBatchNorm(4, **options)
        assert layer.options() == by_hand.options()
    for layer in layers_of(syncbn.convert_sync_batchnorm(model())):
        default = syncbn.SyncBatchNorm(4)
        assert layer.options() == default.options()
        assert layer.state.sharing == default.state.sharing
