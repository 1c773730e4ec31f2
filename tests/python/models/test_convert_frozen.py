# SPDX-License-Identifier: Apache-2.0
"""Conversion of models with frozen layers, whose statistics are constants, and with computed
weights (weight_norm and prune as hooks), which PyTorch cannot copy."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune, weight_norm

import syncbn


class Constants(nn.Module):
    """As DETR's and maskrcnn-benchmark's."""

    def __init__(self, channels=4):
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.ones(channels))

    def forward(self, x):
        scale = self.weight * (self.running_var + 1e-5).rsqrt()
        return x * scale.reshape(1, -1, 1, 1) + (self.bias - self.running_mean * scale).reshape(
            1, -1, 1, 1
        )


class ByOperator(Constants):
    """As detectron2's."""

    momentum = 0.1  # which nothing asks for

    def forward(self, x):
        if x.requires_grad:
            return super().forward(x)
        return F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, training=False, eps=1e-5
        )


class Learnt(Constants):
    """Frozen parameters of the usual kind, and a helper."""

    def __init__(self):
        super().__init__()
        del self.weight
        self.weight = nn.Parameter(torch.ones(4), requires_grad=False)

    def _scale(self):
        return self.weight / (self.running_var + 1e-5).sqrt()

    def forward(self, x):
        return (x - self.running_mean[:, None, None]) * self._scale()[:, None, None]


class Trains(Constants):
    def forward(self, x):
        return F.batch_norm(x, self.running_mean, self.running_var, training=self.training)


class TrainsItsWeight(Constants):
    def __init__(self):
        super().__init__()
        del self.weight
        self.weight = nn.Parameter(torch.ones(4))


class Averages(Constants):
    def _update(self, x):
        self.running_mean.mul_(0.9).add_(0.1 * x.sum((0, 2, 3)))

    def forward(self, x):
        self._update(x)
        return super().forward(x)


class ByFunction(torch.autograd.Function):
    """Could do anything."""


class Elsewhere(Constants):
    def forward(self, x):
        return ByFunction.apply(x, self.running_mean, self.running_var)


def convert(*layers):
    net = nn.Sequential(nn.BatchNorm2d(4), *layers)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        syncbn.convert_sync_batchnorm(net)
    assert type(net[0]) is syncbn.SyncBatchNorm
    return net, [str(warning.message) for warning in caught]


@pytest.mark.parametrize("cls", (Constants, ByOperator, Learnt))
def test_frozen_layers_are_left_without_an_alarm(cls):
    net, caught = convert(cls())
    assert not caught and type(net[1]) is cls
    assert [row.path for row in syncbn.report(net)] == ["0"]


def test_frozen_layers_of_libraries():
    ops = pytest.importorskip("torchvision.ops")
    timm = pytest.importorskip("timm.layers.norm_act")
    net, caught = convert(ops.FrozenBatchNorm2d(4), timm.FrozenBatchNormAct2d(4))
    assert not caught and type(net[1]) is ops.FrozenBatchNorm2d
    assert [row.path for row in syncbn.report(net)] == ["0"]


@pytest.mark.parametrize("cls", (Trains, TrainsItsWeight, Averages, Elsewhere))
def test_others_are_named(cls):
    net, (text,) = convert(cls())
    assert f"{cls.__name__}: 1\n" in text
    assert [row.path for row in syncbn.report(net)] == ["0", "1"]


@pytest.mark.parametrize("place", (0, 1), ids=("convolution", "batch norm"))
@pytest.mark.parametrize("kind", ("norm", "prune"))
@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_models_with_computed_weights_are_converted_in_place(kind, place):
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).double()
    net = copy.deepcopy(plain)
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    for model in (plain, net):
        if kind == "prune":
            prune.l1_unstructured(model[place], "weight", 0.5)
        else:
            weight_norm(model[place], dim=None)
        model(x)
    with pytest.raises(RuntimeError, match="Only Tensors created explicitly by the user"):
        copy.deepcopy(net)  # in PyTorch, before this package is called
    syncbn.convert_sync_batchnorm(net)
    for model in (plain, net):
        model(x).sin().sum().backward()
    for (name, p), (other, q) in zip(net.named_parameters(), plain.named_parameters(), strict=True):
        assert name == other
        torch.testing.assert_close(p.grad, q.grad)
    syncbn.revert_sync_batchnorm(net)
    torch.testing.assert_close(net(x), plain(x))
