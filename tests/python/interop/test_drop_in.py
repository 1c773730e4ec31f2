# SPDX-License-Identifier: Apache-2.0
"""The layer under code that asks for torch.nn.SyncBatchNorm: PyTorch's and that of libraries."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import syncbn


def network() -> nn.Module:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Sequential(nn.BatchNorm2d(4)))
    return syncbn.convert_sync_batchnorm(net)


def test_the_layer_is_pytorchs_for_code_that_checks_classes():
    for layer in (syncbn.SyncBatchNorm(4), network()[1]):
        assert isinstance(layer, nn.SyncBatchNorm)


@pytest.mark.parametrize("group", (7, [0, 1]))
def test_setting_a_process_group_checks_it_as_the_constructor_does(group):
    """torch.nn.SyncBatchNorm takes anything here and fails in the first training step."""
    layer = syncbn.SyncBatchNorm(4, timeout=7, engine="process_group")
    text = "^process_group: got .*, expected a process group, its name, a DeviceMesh"
    with pytest.raises(ValueError, match=text):
        layer.process_group = group
    assert layer.process_group is None


# PyTorch's conversion and DistributedDataParallel. If a PyTorch has not the two names any more,
# these tests say so; the consequence is that PyTorch's conversion replaces the layers, and that
# DistributedDataParallel refuses them on the CPU.


def test_pytorchs_conversion_leaves_the_layers_alone_exact():
    """Before the exception for them it replaced them, without activation and hooks."""
    net = network()
    net[1].activation = "relu"
    net.append(nn.BatchNorm2d(4))
    layers = [net[1], net[2][0]]
    x = torch.randn(2, 3, 8, 8)
    expected = copy.deepcopy(net).eval()(x)
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    assert converted is net and net[1] is layers[0] and net[2][0] is layers[1]
    assert type(net[3]) is nn.SyncBatchNorm  # as PyTorch's does with all others
    assert torch.equal(net.eval()(x), expected)
    assert nn.SyncBatchNorm.convert_sync_batchnorm(layers[0]) is layers[0]


class Theirs(nn.SyncBatchNorm):
    pass


def test_pytorchs_conversion_of_other_layers_is_pytorchs():
    original = nn.SyncBatchNorm.convert_sync_batchnorm.__func__._syncbn_original
    net = nn.Sequential(nn.BatchNorm1d(4), Theirs(4))
    weight = net[0].weight
    for cls in (nn.SyncBatchNorm, Theirs):
        converted = cls.convert_sync_batchnorm(copy.deepcopy(net))
        assert [type(m) for m in converted] == [nn.SyncBatchNorm] * 2
    assert nn.SyncBatchNorm.convert_sync_batchnorm(net)[0].weight is weight
    assert nn.SyncBatchNorm.convert_sync_batchnorm.__doc__ == original.__doc__


def test_ddp_refuses_pytorchs_layers_on_the_cpu_and_takes_these(one_rank):
    DistributedDataParallel(network())(torch.randn(2, 3, 8, 8)).sum().backward()
    for other in (nn.SyncBatchNorm(4), Theirs(4)):
        with pytest.raises(ValueError, match="only work with GPU modules"):
            DistributedDataParallel(network().append(other))


# Arguments and attributes of PyTorch's layer.


class Sub(syncbn.SyncBatchNorm):
    pass


def test_the_class_method_converts_as_pytorchs_does():
    """A subclass's makes layers of the class itself: PyTorch's makes torch.nn.SyncBatchNorm."""
    assert type(Theirs.convert_sync_batchnorm(nn.BatchNorm2d(4))) is nn.SyncBatchNorm
    for cls in (syncbn.SyncBatchNorm, Sub):
        net = nn.Sequential(nn.BatchNorm2d(4))
        assert cls.convert_sync_batchnorm(module=net, process_group=None) is net
        assert type(net[0]) is syncbn.SyncBatchNorm


def test_a_layer_without_a_bias_exact():
    """An argument of PyTorch from 2.15 on. Affine is the weight alone then."""
    torch.manual_seed(0)
    x = torch.randn(6, 4, 3, 3)
    layer, reference = syncbn.SyncBatchNorm(4, bias=False), syncbn.SyncBatchNorm(4)
    for each in (layer, reference):
        nn.init.uniform_(each.weight, generator=torch.Generator().manual_seed(1))
    assert layer.bias is None and "bias" not in layer.state_dict() and layer.weight is not None
    assert "bias=False" in repr(layer)
    outputs = [each(x) for each in (layer, reference)]
    assert torch.equal(*outputs)
    for y in outputs:
        y.square().sum().backward()
    assert torch.equal(layer.weight.grad, reference.weight.grad)
    assert torch.equal(layer.eval()(x), reference.eval()(x))
    layer.reset_parameters()
    assert (layer.weight == 1).all() and layer.bias is None
    neither = syncbn.SyncBatchNorm(4, affine=False, bias=True)
    assert neither.weight is None and neither.bias is None


def without_bias(cls) -> nn.Module:
    """cls(4, bias=False), on every PyTorch."""
    layer = cls(4)
    layer.bias = None
    return layer


@pytest.mark.parametrize("cls", (nn.BatchNorm2d, nn.SyncBatchNorm))
def test_conversion_keeps_a_layer_without_a_bias_exact(cls):
    net = nn.Sequential(nn.Conv2d(3, 4, 1), without_bias(cls))
    x = torch.randn(4, 3, 3, 3)
    expected = copy.deepcopy(net).eval()(x)
    syncbn.convert_sync_batchnorm(net)
    assert net[1].bias is None and torch.equal(net.eval()(x), expected)
    net.train()(x).sum().backward()
    expected = net.eval()(x)
    syncbn.revert_sync_batchnorm(net)
    assert type(net[1]) is cls and net[1].bias is None
    assert torch.equal(net(x), expected)


def state(layer: nn.Module) -> dict:
    return {name: value.clone() for name, value in layer.state_dict().items()}


@pytest.mark.parametrize("momentum", (0.1, None))
def test_tracking_that_is_switched_off_later_is_pytorchs(momentum):
    """Nothing is updated then, and evaluation goes on with the statistics that are there."""
    x = torch.randn(6, 4, 3, 3)
    ours = syncbn.SyncBatchNorm(4, momentum=momentum)
    theirs = nn.BatchNorm2d(4, momentum=momentum)
    theirs(x)
    ours.load_state_dict(theirs.state_dict())
    for layer in (ours, theirs):
        layer.track_running_stats = False
        before = state(layer)
        layer(2 * x)
        assert all(torch.equal(value, before[name]) for name, value in state(layer).items())
    assert torch.equal(ours.eval()(x), theirs.eval()(x))
    before = state(ours)
    ours.train()([x, 2 * x])
    assert all(torch.equal(value, before[name]) for name, value in state(ours).items())
    ours.track_running_stats = True
    ours(x)
    assert ours.num_batches_tracked == 2
    without = syncbn.SyncBatchNorm(4, track_running_stats=False)
    without.track_running_stats = True  # there is nothing to update
    assert torch.isfinite(without(x)).all()
