# SPDX-License-Identifier: Apache-2.0
"""convert_sync_batchnorm: what it keeps, leaves and refuses."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import syncbn
from convert_support import BatchNormSilu, FrozenBatchNorm, OwnBatchNorm, refused


class Double(nn.Module):
    def forward(self, weight):
        return 2 * weight


def test_layers_stay_the_same_objects():
    """torch.nn.SyncBatchNorm.convert_sync_batchnorm makes new ones: references in lists go stale,
    and hooks are lost."""
    layer = nn.BatchNorm2d(4)
    net = nn.ModuleDict({"a": layer, "b": nn.Sequential(layer)})
    net.in_a_list = [layer]
    calls = []
    handle = layer.register_forward_hook(lambda *_: calls.append("forward"))
    layer.register_state_dict_pre_hook(lambda *_: calls.append("state_dict"))
    layer.register_load_state_dict_pre_hook(lambda module, *_: calls.append(module))
    syncbn.convert_sync_batchnorm(net)
    assert net["a"] is layer and net["b"][0] is layer and net.in_a_list[0] is layer
    assert type(layer) is syncbn.SyncBatchNorm and layer.state.name == "a"
    x = torch.randn(2, 4, 3, 3)
    layer(x)
    handle.remove()
    layer(x)
    layer.load_state_dict(layer.state_dict())
    assert calls == ["forward", "state_dict", layer]


@pytest.mark.parametrize("cls", (nn.BatchNorm1d, nn.SyncBatchNorm))
def test_parametrizations_are_kept_exact(cls):
    """torch.nn.SyncBatchNorm's converter raises a TypeError, with the layers before replaced."""
    layer = cls(4)
    parametrize.register_parametrization(layer, "weight", Double())
    net = nn.Sequential(layer)
    before = type(layer).__name__
    names = list(net.state_dict())
    syncbn.convert_sync_batchnorm(net)
    assert isinstance(layer, syncbn.SyncBatchNorm) and parametrize.is_parametrized(layer, "weight")
    assert list(net.state_dict()) == names
    plain = syncbn.SyncBatchNorm(4)
    nn.init.constant_(plain.weight, 2)
    x = torch.randn(5, 4)
    for each in (layer, copy.deepcopy(layer), plain):
        each.zero_grad()
        each(x).square().sum().backward()
    original = layer.parametrizations.weight.original
    assert torch.equal(layer(x), plain(x)) and torch.equal(original.grad, 2 * plain.weight.grad)
    syncbn.revert_sync_batchnorm(net)
    assert type(layer).__name__ == before and type(layer).__bases__ == (cls,)
    assert layer.parametrizations.weight.original is original and list(net.state_dict()) == names
    parametrize.remove_parametrizations(layer, "weight")
    assert type(layer) is cls and torch.equal(layer.weight, plain.weight)


def test_layers_of_other_classes_are_left_with_one_warning():
    """torch.nn.SyncBatchNorm's converter replaces every subclass by itself, and with it drops what
    the subclass computes; layers that are not derived from batch norm it leaves silently."""
    net = nn.Sequential(
        nn.BatchNorm2d(4), OwnBatchNorm(4), nn.Sequential(BatchNormSilu(4), OwnBatchNorm(4))
    )
    net.add_module("frozen", FrozenBatchNorm(4))
    types = [type(m) for m in net.modules()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        syncbn.convert_sync_batchnorm(net)
    (warning,) = caught
    assert warning.filename == __file__
    text = str(warning.message)
    assert "convert_support.OwnBatchNorm: 1, 2.1\n" in text
    assert "BatchNormSilu: 2.0\n" in text and "FrozenBatchNorm" not in text
    assert [type(m) for m in net.modules()] == [
        syncbn.SyncBatchNorm if t is nn.BatchNorm2d else t for t in types
    ]


def test_a_scripted_model_is_left_with_a_warning():
    """torch.nn.SyncBatchNorm's converter leaves it silently."""
    net = torch.jit.script(nn.Sequential(nn.BatchNorm2d(4)))
    with pytest.warns(UserWarning, match=r"torch.jit._script.RecursiveScriptModule: 0\n"):
        assert syncbn.convert_sync_batchnorm(net) is net
    assert net(torch.randn(2, 4, 3, 3)).shape == (2, 4, 3, 3)


def test_a_lazy_layer_is_refused_until_it_has_seen_an_input():
    """torch.nn.SyncBatchNorm's converter makes of it a layer of 0 channels, whose first call
    fails. Left as it is it would silently become a plain layer."""
    net = nn.Sequential(nn.BatchNorm2d(3), nn.Sequential(nn.LazyBatchNorm2d()))
    refused(net, r"^module: got 1\.0, a LazyBatchNorm2d that has not seen an input, expected")
    net(torch.randn(2, 3, 4, 4))
    syncbn.convert_sync_batchnorm(net)
    assert type(net[1][0]) is syncbn.SyncBatchNorm and net[1][0].num_features == 3
    assert net[1][0].weight.shape == (3,)


@pytest.mark.parametrize("called", (False, True), ids=("new", "called before"))
def test_a_compiled_model_is_converted_exact(called):
    """As torch.nn.SyncBatchNorm's converter does. Graphs are guarded by the classes of layers."""
    x = torch.randn(4, 4, 3, 3)
    expected = syncbn.convert_sync_batchnorm(nn.BatchNorm2d(4))(x)
    inner = nn.Sequential(nn.BatchNorm2d(4))
    inner.compile(backend="eager")
    for net in (torch.compile(nn.Sequential(nn.BatchNorm2d(4)), backend="eager"), inner):
        if called:
            net(x)
        layer = next(m for m in net.modules() if isinstance(m, nn.BatchNorm2d))
        assert syncbn.convert_sync_batchnorm(net) is net
        assert type(layer) is syncbn.SyncBatchNorm and torch.equal(net(x), expected)
        assert syncbn.report(net)[0].count == 36
        syncbn.revert_sync_batchnorm(net)
        assert type(layer) is nn.BatchNorm2d and net(x).shape == x.shape


def test_a_sharded_model_is_refused(one_rank):
    """fully_shard gives a layer a class of its own."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    torch.distributed.fsdp.fully_shard(net[1], mesh=mesh)
    refused(net, "^module: got 1, sharded by FSDP already, expected .* then FSDP$")
    wrapped = torch.distributed.fsdp.FullyShardedDataParallel(
        nn.Sequential(nn.BatchNorm2d(4)), device_id=torch.device("cpu"), use_orig_params=True
    )
    refused(wrapped, "a model, sharded by FSDP already")
    sharded = torch.distributed.fsdp.fully_shard(nn.Sequential(nn.Linear(4, 4)), mesh=mesh)
    net = syncbn.convert_sync_batchnorm(nn.Sequential(sharded, nn.BatchNorm1d(4)))
    assert type(net[1]) is syncbn.SyncBatchNorm  # what is not inside may change
    torch.distributed.fsdp.fully_shard(net[1], mesh=mesh)
    with pytest.raises(ValueError, match="^module: got 1, sharded by FSDP, expected the model"):
        syncbn.revert_sync_batchnorm(net)
    assert isinstance(net[1], syncbn.SyncBatchNorm)


@pytest.mark.parametrize("name", ("activation", "state", "options", "share", "process_group"))
@pytest.mark.parametrize("value", (7, nn.ReLU()))
def test_an_attribute_that_is_in_the_way_is_refused(name, value):
    """It would be lost, or be called in the place of a method. torch.nn's converter drops it."""
    net = nn.Sequential(nn.BatchNorm2d(4))
    setattr(net[0], name, value)
    refused(net, rf"^0: got a layer with {name} of its own, expected other names")
    assert getattr(net[0], name) is value
