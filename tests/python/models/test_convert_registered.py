# SPDX-License-Identifier: Apache-2.0
"""register_conversion: what becomes of layers whose class is registered."""

import copy
import warnings

import pytest
import torch
from torch import nn

import syncbn
from convert_support import (
    BatchNormSilu,
    FrozenBatchNorm,
    OwnBatchNorm,
    SyncBatchNormSilu,
    refused,
    registry,  # noqa: F401
    state_of,
)
from syncbn.models.classes import registered


def test_a_registered_subclass_exact():
    """The subclass keeps its activation; state_dict and round trip as for plain layers."""
    syncbn.register_conversion(BatchNormSilu, lambda layer, sync: sync(layer, SyncBatchNormSilu))
    net = nn.Sequential(BatchNormSilu(4), nn.BatchNorm2d(4))
    reference = copy.deepcopy(net)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        syncbn.convert_sync_batchnorm(net, statistics="welford")
    assert type(net[0]) is SyncBatchNormSilu and net[0].statistics == "welford"
    assert net[0].state.name == "0" and list(net.state_dict()) == list(reference.state_dict())
    x = torch.randn(6, 4, 5, 5)
    # y is relative to 1; a few roundings each in PyTorch's sums of 150 terms.
    torch.testing.assert_close(net[0](x), reference[0](x), rtol=0, atol=150 * 2**-23)
    net.load_state_dict(reference.state_dict())
    assert torch.equal(net.eval()(x), reference.eval()(x))
    syncbn.revert_sync_batchnorm(net)
    assert [type(m) for m in net] == [BatchNormSilu, nn.BatchNorm2d]
    assert set(vars(net[0])) == set(vars(reference[0]))
    assert torch.equal(net(x), reference(x))


def test_a_registered_fusion_exact():
    """sync(activation=) fuses what the class does; reverting gives it back."""

    class BatchNormLeaky(BatchNormSilu):
        def __init__(self, channels):
            super().__init__(channels)
            self.act = nn.LeakyReLU(0.5)

    def make(layer, sync):
        return sync(layer, activation="leaky_relu", negative_slope=layer.act.negative_slope)

    syncbn.register_conversion(BatchNormLeaky, make)
    net = nn.Sequential(nn.ReLU(), BatchNormLeaky(4)).eval()
    x = torch.randn(2, 4, 3, 3)
    expected = net(x)
    syncbn.convert_sync_batchnorm(net)
    assert type(net[1]) is syncbn.SyncBatchNorm and torch.equal(net(x), expected)
    other = copy.deepcopy(net)
    other[1].activation = "relu"
    with pytest.raises(ValueError, match=r"^1: got a layer with activation 'relu', which BatchN"):
        syncbn.revert_sync_batchnorm(other)
    assert torch.equal(syncbn.revert_sync_batchnorm(net)(x), expected)
    assert type(net[1]) is BatchNormLeaky


def test_a_registered_replacement_and_its_inverse_exact():
    """A class that is not derived from batch norm: another object takes its place."""

    def make(layer, sync):
        plain = nn.BatchNorm2d(4)
        for name in ("weight", "bias"):
            getattr(plain, name).data = getattr(layer, name)
        plain.running_mean, plain.running_var = layer.running_mean, layer.running_var
        return sync(plain.eval())

    def revert(layer):
        result = FrozenBatchNorm(4)
        for name in ("weight", "bias", "running_mean", "running_var"):
            setattr(result, name, getattr(layer, name).detach())
        return result

    syncbn.register_conversion(FrozenBatchNorm, make, revert)
    frozen = FrozenBatchNorm(4)
    net = nn.ModuleDict({"a": nn.Sequential(frozen), "b": frozen})
    frozen.running_var.fill_(3)
    syncbn.convert_sync_batchnorm(net)
    assert type(net["b"]) is syncbn.SyncBatchNorm and net["a"][0] is net["b"]
    assert net["b"].running_var is frozen.running_var and net["b"].state.name == "a.0"
    syncbn.revert_sync_batchnorm(net)
    assert type(net["b"]) is FrozenBatchNorm and net["a"][0] is net["b"]
    assert torch.equal(net["b"].running_var, frozen.running_var)


@pytest.mark.parametrize(
    "make, text",
    (
        (lambda layer, sync: 1 / 0, "division by zero"),
        (lambda layer, sync: None, "^register_conversion: got None from make for BatchNormSilu"),
        (lambda layer, sync: sync(layer, activation="gelu"), "^activation: got 'gelu', expected"),
        (lambda layer, sync: sync(layer, slope=1), "^slope: got an option of that name, expected"),
        (lambda layer, sync: sync(layer, nn.SyncBatchNorm), "^cls: got .*SyncBatchNorm'>, expect"),
        (lambda layer, sync: sync(layer.act), "^layer: got torch.nn.*SiLU for 1.1, expected"),
    ),
)
def test_an_error_of_a_registered_conversion_undoes_everything(make, text):
    syncbn.register_conversion(BatchNormSilu, make)
    net = nn.Sequential(nn.BatchNorm2d(4), nn.Sequential(nn.Identity(), BatchNormSilu(4)))
    refused(net, text, (ValueError, ZeroDivisionError))


def test_an_error_of_a_registered_inverse_undoes_everything():
    def make(layer, sync):
        return sync(nn.BatchNorm2d(4))

    syncbn.register_conversion(BatchNormSilu, make, lambda layer: 1 / 0)
    net = syncbn.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(4), BatchNormSilu(4)))
    before = state_of(net)
    with pytest.raises(ZeroDivisionError):
        syncbn.revert_sync_batchnorm(net)
    assert state_of(net) == before


def test_registering_nonsense_is_refused():
    for arguments, text in (
        ((nn.BatchNorm2d(4), print), "^cls: got BatchNorm2d"),
        ((int, print), "^cls: got <class 'int'>, expected a subclass of torch.nn.Module"),
        ((syncbn.SyncBatchNorm, print), "^cls: got SyncBatchNorm, expected a class that is not"),
        ((OwnBatchNorm, "make"), "^make: got 'make', expected a function"),
        ((OwnBatchNorm, print, 1), "^revert: got 1, expected a function"),
    ):
        with pytest.raises(ValueError, match=text):
            syncbn.register_conversion(*arguments)
    assert OwnBatchNorm not in registered
