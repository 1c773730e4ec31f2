# SPDX-License-Identifier: Apache-2.0
"""Conversion of models of timm and torchvision, and of modules for quantization."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

import syncbn
from convert_support import registry  # noqa: F401


def norms_of(net):
    return [m for m in net.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]


def outputs_of(net, x):
    """In evaluation and in training mode; dropout from one seed."""
    with torch.no_grad():
        torch.manual_seed(0)
        return copy.deepcopy(net).eval()(x), copy.deepcopy(net).train()(x)


def check_round_trip(net, x, count):
    """Evaluation is PyTorch's own operator, so equal bits; the state_dict stays the same. Training
    differs by the rounding of PyTorch's float32 sums: only that values are finite is checked here,
    the layers' accuracy is test_layer.py's."""
    expected, trained = outputs_of(net, x)
    names, types = list(net.state_dict()), [type(m) for m in net.modules()]
    tensors = [*net.parameters(), *net.buffers()]
    converted = syncbn.convert_sync_batchnorm(net)
    assert converted is net and len(norms_of(net)) == count
    assert all(isinstance(m, syncbn.SyncBatchNorm) for m in norms_of(net))
    assert list(net.state_dict()) == names
    evaluated, own = outputs_of(net, x)
    assert torch.equal(evaluated, expected)
    assert own.shape == trained.shape and own.isfinite().all()
    syncbn.revert_sync_batchnorm(net)
    assert [type(m) for m in net.modules()] == types
    assert all(a is b for a, b in zip(tensors, [*net.parameters(), *net.buffers()], strict=True))
    again, retrained = outputs_of(net, x)
    assert torch.equal(again, expected) and torch.equal(retrained, trained)


@pytest.mark.parametrize("name, count", (("resnet18", 20), ("mobilenet_v2", 52)))
def test_torchvision(name, count):
    models = pytest.importorskip("torchvision.models")
    torch.manual_seed(1)
    check_round_trip(models.get_model(name, num_classes=4), torch.randn(2, 3, 32, 32), count)


def test_timm_without_activation():
    timm = pytest.importorskip("timm")
    torch.manual_seed(1)
    check_round_trip(timm.create_model("test_resnet", num_classes=4), torch.randn(2, 3, 32, 32), 15)


@pytest.mark.parametrize(
    "name, count, fused", (("test_efficientnet", 13, 0), ("darknet17", 16, 16))
)
def test_timm_norm_and_activation(name, count, fused):
    """torch.nn.SyncBatchNorm's converter drops the activations of these layers, silently.
    test_efficientnet has SiLU, which is not fused; darknet17 has leaky ReLU, which is."""
    timm = pytest.importorskip("timm")
    torch.manual_seed(1)
    net = timm.create_model(name, num_classes=4)
    converted = syncbn.convert_sync_batchnorm(copy.deepcopy(net))
    assert sum(m.activation == "leaky_relu" for m in norms_of(converted)) == fused
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_round_trip(net, torch.randn(2, 3, 64, 64), count)


def timm_layers(act_layer=nn.ReLU, **options):
    """A layer with statistics of its own, and what it gives for x, evaluating and training."""
    layers = pytest.importorskip("timm.layers")
    layer = layers.BatchNormAct2d(4, act_layer=act_layer, **options)
    layer.train()(torch.randn(8, 4, 3, 3))
    return layers, layer


def test_timm_s_synchronized_layer_is_converted_and_given_back_exact():
    layers, layer = timm_layers(nn.SiLU)
    x = torch.randn(2, 4, 3, 3)
    expected = copy.deepcopy(layer).eval()(x)
    theirs = layers.convert_sync_batchnorm(nn.Sequential(layer))
    assert type(theirs[0]) is layers.SyncBatchNormAct
    syncbn.convert_sync_batchnorm(theirs)
    assert isinstance(theirs[0], syncbn.SyncBatchNorm)
    assert torch.equal(theirs.eval()(x), expected)
    syncbn.revert_sync_batchnorm(theirs)
    assert type(theirs[0]) is layers.SyncBatchNormAct and torch.equal(theirs(x), expected)


@pytest.mark.parametrize("act_layer", (nn.ReLU, nn.SiLU))
def test_a_converted_layer_of_timm_trains_as_timm_s(act_layer):
    """Copied, pickled, and as one call for a tracer, too."""
    _, layer = timm_layers(act_layer, drop_layer=nn.Identity)
    reference = copy.deepcopy(layer)
    converted = syncbn.convert_sync_batchnorm(nn.Sequential(layer))
    assert torch.fx.symbolic_trace(converted).graph.find_nodes(op="call_module", target="0")
    x = torch.randn(6, 4, 5, 5)
    expected = reference(x)
    for each in (copy.deepcopy(converted), pickle.loads(pickle.dumps(converted)), converted):
        # y is relative to 1; a few roundings each in PyTorch's sums of 150 terms.
        torch.testing.assert_close(each(x), expected, rtol=0, atol=150 * 2**-23)


def test_what_is_registered_goes_before_what_is_known_of_timm():
    layers, layer = timm_layers()
    syncbn.register_conversion(layers.BatchNormAct2d, lambda layer, sync: layer)
    assert type(syncbn.convert_sync_batchnorm(layer)) is layers.BatchNormAct2d
