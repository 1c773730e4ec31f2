# SPDX-License-Identifier: Apache-2.0
"""Other libraries' code that asks for the classes of layers, on a model with this package's layer:
what docs/conversion.md says. It does what it does with torch.nn.SyncBatchNorm, and where a
library takes that for no batch norm, the page says what to do.

A library that is not installed is skipped by name; `make interop` installs all of them, also those
of test_class_checks_frameworks.py.
"""

import copy
import warnings

import pytest
import torch
from torch import nn

import syncbn
from support import library

THEIRS = nn.SyncBatchNorm  # and not what a test puts into its place


def fresh_network() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU()),
        *(nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    )


def network() -> nn.Sequential:
    """With running statistics that are not those at the start."""
    torch.manual_seed(3)
    net = fresh_network()
    net(torch.randn(5, 3, 9, 9))
    return net


def norms_of(net, cls=syncbn.SyncBatchNorm):
    return [m for m in net.modules() if isinstance(m, cls)]


def names_of(net, parameters) -> list[str]:
    names = {id(p): name for name, p in net.named_parameters()}
    return sorted(names[id(p)] for p in parameters)


def decays_of(groups):
    return [(group["weight_decay"], group["params"]) for group in groups]


def same_groups(groups_of, make=network) -> list[tuple]:
    """groups_of(net): something and the parameters for which it holds."""
    made = make(), syncbn.convert_sync_batchnorm(make())
    plain, ours = ([(key, names_of(net, group)) for key, group in groups_of(net)] for net in made)
    assert ours == plain
    return ours


def evaluated(net) -> torch.Tensor:
    torch.manual_seed(5)
    with torch.no_grad():
        return copy.deepcopy(net).eval()(torch.randn(2, 3, 32, 32))


def statistics(net) -> list[torch.Tensor]:
    return [b.clone() for b in net.buffers()]


def trained(net) -> None:
    torch.manual_seed(6)
    net.train()
    loss = net(torch.randn(4, 3, 32, 32)).square().sum()
    if loss.requires_grad:
        loss.backward()


# PyTorch


def test_torch_fuse_conv_bn_exact():
    plain, net = network().eval(), syncbn.convert_sync_batchnorm(network()).eval()
    expected = nn.utils.fusion.fuse_conv_bn_eval(plain[0], plain[1])
    fused = nn.utils.fusion.fuse_conv_bn_eval(net[0], net[1])
    assert torch.equal(fused.weight, expected.weight) and torch.equal(fused.bias, expected.bias)
    net[1].activation = "relu"  # is lost
    again = nn.utils.fusion.fuse_conv_bn_eval(net[0], net[1])
    assert torch.equal(again.weight, expected.weight) and torch.equal(again.bias, expected.bias)


def test_torch_func_removes_running_statistics():
    plain, net = network(), syncbn.convert_sync_batchnorm(network())
    for model in (plain, net):
        torch.func.replace_all_batch_norm_modules_(model)
    assert not list(net.buffers())
    x = torch.randn(4, 3, 9, 9)
    for mode in (True, False):
        torch.testing.assert_close(net.train(mode)(x), plain.train(mode)(x))


# torchvision


def test_torchvision_weight_decay():
    """Its training reference takes these groups."""
    split = library("torchvision.ops._utils").split_normalization_params
    same_groups(lambda net: enumerate(split(net)))


# timm


def timm_model(name="test_efficientnet"):
    """With BatchNormAct2d layers, which have an activation."""
    torch.manual_seed(7)
    net = library("timm").create_model(name, num_classes=4)
    trained(net)
    net.zero_grad()
    return net


def test_timm_weight_decay():
    factory = library("timm.optim")
    for make in (network, timm_model):
        same_groups(lambda net: decays_of(factory.param_groups_weight_decay(net, 0.1)), make)


@pytest.mark.parametrize("name", ("test_resnet", "test_efficientnet", "darknet17"))
def test_timm_freeze(name):
    """No activation is lost, also none that was fused into a layer (darknet17's leaky ReLU)."""
    model = library("timm.utils.model")
    net = syncbn.convert_sync_batchnorm(timm_model(name))
    expected = evaluated(net)
    model.freeze(net)
    assert not norms_of(net, nn.modules.batchnorm._BatchNorm)
    frozen = [m for m in net.modules() if type(m).__name__ == "FrozenBatchNormAct2d"]
    with warnings.catch_warnings():  # constants need no synchronization
        warnings.simplefilter("error")
        assert all(syncbn.convert_sync_batchnorm(m) is m for m in frozen)
    assert not any(p.requires_grad for p in net.parameters())
    torch.testing.assert_close(evaluated(net), expected)
    before = statistics(net)
    trained(net)
    assert all(torch.equal(a, b) for a, b in zip(before, statistics(net), strict=True))
    model.unfreeze(net)
    assert not norms_of(net)  # timm makes nn.BatchNorm2d: convert again
    syncbn.convert_sync_batchnorm(net)
    assert all(isinstance(m, syncbn.SyncBatchNorm) for m in norms_of(net, nn.BatchNorm2d))
    torch.testing.assert_close(evaluated(net), expected)


# Lightning


def test_lightning_freeze():
    finetuning = library("lightning.pytorch.callbacks").BaseFinetuning
    for train_bn in (True, False):
        plain, net = network(), syncbn.convert_sync_batchnorm(network())
        for model in (plain, net):
            finetuning.freeze(model, train_bn=train_bn)
        flags = [[p.requires_grad for p in m.parameters()] for m in (net, plain)]
        assert flags[0] == flags[1] and any(flags[0]) == train_bn
        before = statistics(net)
        trained(net)
        changed = [not torch.equal(a, b) for a, b in zip(before, statistics(net), strict=True)]
        assert changed == [train_bn] * 6
        finetuning.make_trainable(net)
        trained(net)
        assert all(p.requires_grad for p in net.parameters())
        assert not any(map(torch.equal, before, statistics(net)))


# Converters and their inverses


@pytest.mark.parametrize("path", ("timm.layers", "mmengine.model"))
def test_their_converters_make_pytorchs_layers(path):
    """report() shows it, a conversion mends it."""
    net = library(path).convert_sync_batchnorm(syncbn.convert_sync_batchnorm(network()))
    assert not norms_of(net) and len(norms_of(net, THEIRS)) == 2
    with pytest.raises(RuntimeError, match="not synchronized by syncbn"):
        syncbn.report(net, strict=True)
    assert len(norms_of(syncbn.convert_sync_batchnorm(net))) == 2


@pytest.mark.parametrize("path", ("lightning.pytorch.plugins.layer_sync", "mmengine.model"))
def test_their_reverts_give_plain_layers_without_an_activation(path):
    """They know torch.nn.SyncBatchNorm's attributes only. This package's revert keeps it."""
    module = library(path)
    revert = getattr(module, "revert_sync_batchnorm", None) or module.TorchSyncBatchNorm().revert
    net = syncbn.convert_sync_batchnorm(network())
    expected = evaluated(net)
    reverted = revert(net)
    assert not norms_of(reverted, THEIRS) and torch.equal(evaluated(reverted), expected)
    layer = syncbn.SyncBatchNorm(3, activation="relu")
    (reverted,) = revert(nn.Sequential(layer))
    x = torch.randn(4, 3, 2, 2)
    assert torch.equal(layer.eval()(x), reverted.eval()(x).relu()) and (reverted(x) < 0).any()
