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


def test_a_model_is_converted_in_place_once_per_layer():
    net = model()
    parameters = list(net.parameters())
    converted = syncbn.convert_sync_batchnorm(net)
    assert converted is net and net[1] is net.also
    assert [type(m) for m in (net[1], net[3][1])] == [syncbn.SyncBatchNorm] * 2
    assert all(a is b for a, b in zip(parameters, net.parameters(), strict=True))
    assert net[3][1].state.name == "3.1"
    syncbn.revert_sync_batchnorm(net)
    assert type(net[1]) is nn.BatchNorm2d and net[1] is net.also


def test_round_trip_gives_the_same_output_exact():
    net = model().eval()
    x = torch.randn(2, 3, 8, 8)
    expected = net(x)
    converted = syncbn.convert_sync_batchnorm(copy.deepcopy(net))
    assert torch.equal(converted(x), expected)
    assert torch.equal(syncbn.revert_sync_batchnorm(converted)(x), expected)


def test_state_dicts_are_interchangeable():
    plain, ours = nn.BatchNorm2d(4), syncbn.SyncBatchNorm(4)
    plain(torch.randn(3, 4, 5, 5))
    ours.load_state_dict(plain.state_dict(), strict=True)
    nn.BatchNorm2d(4).load_state_dict(ours.state_dict(), strict=True)
    assert torch.equal(ours.running_var, plain.running_var)


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


def test_converted_with_an_option_trains_as_a_layer_made_with_it_exact():
    x = torch.randn(5, 4, 3)
    a = syncbn.convert_sync_batchnorm(nn.BatchNorm1d(4), statistics="welford")
    b = syncbn.SyncBatchNorm(4, statistics="welford")
    for layer in (a, b):
        layer(x).square().sum().backward()
    assert torch.equal(a.running_var, b.running_var) and torch.equal(a.weight.grad, b.weight.grad)


@pytest.mark.parametrize(
    "option, value, text",
    (
        ("affine_grad", "shares", "affine_grad: got 'shares', expected one of"),
        ("statistics", "Welford", "statistics: got 'Welford', expected one of"),
        ("sync", 1, "sync: got 1, expected True or False"),
    ),
)
def test_a_wrong_option_changes_nothing(option, value, text):
    net = model()
    layers, attributes = list(net.modules()), [set(vars(m)) for m in net.modules()]
    with pytest.raises(ValueError, match="^" + text):
        syncbn.convert_sync_batchnorm(net, **{option: value})
    assert all(a is b for a, b in zip(net.modules(), layers, strict=True))
    assert [set(vars(m)) for m in net.modules()] == attributes


@pytest.mark.parametrize("group", (7, [0, 1]))
def test_something_that_is_no_group_is_refused(group):
    """torch.nn.SyncBatchNorm takes anything here and fails in the first training step."""
    text = r"^process_group: got .*, expected a process group, its name, a DeviceMesh"
    with pytest.raises(ValueError, match=text):
        syncbn.convert_sync_batchnorm(model(), group)
    with pytest.raises(ValueError, match=text):
        syncbn.SyncBatchNorm(4, process_group=group)
