"""Conversion of models of timm and torchvision, of modules for quantization, and what other
people's converters do to converted models."""

import copy
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import syncbn
from syncbn._classes import registered

PAGE = Path(__file__).resolve().parents[2] / "docs" / "conversion.md"


@pytest.fixture(autouse=True)
def registry():
    """What a test registers is gone after it."""
    before = dict(registered)
    yield
    registered.clear()
    registered.update(before)


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


def test_torchvision_frozen_batch_norm_is_left_with_a_warning():
    """Detection models freeze the backbone's layers; constants need no synchronization."""
    ops = pytest.importorskip("torchvision.ops")
    net = nn.Sequential(nn.Conv2d(3, 4, 1), ops.FrozenBatchNorm2d(4), nn.BatchNorm2d(4))
    with pytest.warns(UserWarning, match=r"FrozenBatchNorm2d: 1\n"):
        syncbn.convert_sync_batchnorm(net)
    assert type(net[1]) is ops.FrozenBatchNorm2d and type(net[2]) is syncbn.SyncBatchNorm


def test_timm_without_activation():
    timm = pytest.importorskip("timm")
    torch.manual_seed(1)
    check_round_trip(timm.create_model("test_resnet", num_classes=4), torch.randn(2, 3, 32, 32), 15)


def test_timm_norm_and_activation_is_left_with_a_warning():
    """torch.nn.SyncBatchNorm's converter drops the activations of these layers, silently."""
    timm = pytest.importorskip("timm")
    net = timm.create_model("test_efficientnet", num_classes=4)
    types = [type(m) for m in net.modules()]
    with pytest.warns(UserWarning) as caught:
        syncbn.convert_sync_batchnorm(net)
    (warning,) = caught
    assert "BatchNormAct2d: bn1, blocks.0.0.bn1, " in str(warning.message)
    assert [type(m) for m in net.modules()] == types


@pytest.mark.parametrize(
    "name, count, fused", (("test_efficientnet", 13, 4), ("darknet17", 16, 16))
)
def test_timm_with_the_documented_registration(name, count, fused):
    """test_efficientnet has SiLU, which is not fused, and layers without an activation; darknet17
    has leaky ReLU, which is."""
    timm = pytest.importorskip("timm")
    (snippet,) = re.findall(r"```python timm\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(compile(snippet, str(PAGE), "exec"), {})
    torch.manual_seed(1)
    net = timm.create_model(name, num_classes=4)
    converted = syncbn.convert_sync_batchnorm(copy.deepcopy(net))
    assert sum(type(m) is syncbn.SyncBatchNorm for m in norms_of(converted)) == fused
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_round_trip(net, torch.randn(2, 3, 64, 64), count)


def test_modules_fused_for_quantization():
    """Layers inside are converted, as torch.nn.SyncBatchNorm's converter does; the fused module
    reads their parameters and calls them."""
    intrinsic = pytest.importorskip("torch.ao.nn.intrinsic.qat")
    quantization = pytest.importorskip("torch.ao.quantization")
    fused = intrinsic.ConvBn2d(3, 4, 3, qconfig=quantization.get_default_qat_qconfig("fbgemm"))
    net = nn.Sequential(fused)
    plain = copy.deepcopy(net)
    net[0].bn.qconfig = "kept"
    syncbn.convert_sync_batchnorm(net)
    assert type(net[0]) is intrinsic.ConvBn2d and type(net[0].bn) is syncbn.SyncBatchNorm
    x = torch.randn(4, 3, 8, 8)
    assert torch.isfinite(net(x)).all()
    net.load_state_dict(plain.state_dict())
    syncbn.revert_sync_batchnorm(net)
    assert type(net[0].bn) is nn.BatchNorm2d and net[0].bn.qconfig == "kept"
    assert torch.equal(net(x), plain(x))


def test_quantized_batch_norm_is_left_with_a_warning():
    quantized = pytest.importorskip("torch.ao.nn.quantized")
    net = nn.Sequential(quantized.BatchNorm2d(4))
    with pytest.warns(UserWarning, match=r"BatchNorm2d: 0\n"):
        syncbn.convert_sync_batchnorm(net)
    assert type(net[0]) is quantized.BatchNorm2d


def test_torch_s_own_converter_replaces_layers_silently_exact():
    """A fact about PyTorch that docs/conversion.md states: activations are lost without a word.
    report() shows it, and converting again mends what is not lost."""
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    syncbn.convert_sync_batchnorm(net)
    weight = net[1].weight
    net[1].activation = "relu"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    assert type(net[1]) is nn.SyncBatchNorm and net[1].weight is weight
    (row,) = syncbn.report(net)
    assert row.layer == "torch.SyncBatchNorm" and "not synchronized by syncbn" in row.note
    with pytest.raises(RuntimeError, match=r"\n  1: torch.SyncBatchNorm"):
        syncbn.report(net, strict=True)
    syncbn.convert_sync_batchnorm(net)
    assert type(net[1]) is syncbn.SyncBatchNorm and net[1].activation == "none"


def test_lightning_s_sync_batchnorm_replaces_layers_silently():
    """The plugin that Trainer(sync_batchnorm=True) applies before it wraps the model."""
    layer_sync = pytest.importorskip("lightning.pytorch.plugins.layer_sync")
    net = syncbn.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(4)))
    net = layer_sync.TorchSyncBatchNorm().apply(net)
    assert type(net[0]) is nn.SyncBatchNorm
    with pytest.raises(RuntimeError, match=r"\n  0: torch.SyncBatchNorm"):
        syncbn.report(net, strict=True)
