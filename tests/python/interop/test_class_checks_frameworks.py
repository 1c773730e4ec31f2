# SPDX-License-Identifier: Apache-2.0
"""What test_class_checks.py says, for transformers, Ultralytics and mmengine, which `make interop`
installs."""

import types

import pytest
import torch
from torch import nn

import syncbn
from support import library
from test_class_checks import (
    THEIRS,
    decays_of,
    norms_of,
    same_groups,
)

# transformers


def resnet():
    transformers = library("transformers")
    config = transformers.ResNetConfig(
        embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic", num_labels=3
    )
    torch.manual_seed(8)
    return transformers.ResNetForImageClassification(config)


def test_transformers_weight_decay():
    """By the names of parameters, so the layer's class does not matter."""
    trainer = library("transformers").Trainer
    plain, net = resnet(), syncbn.convert_sync_batchnorm(resnet())
    names = [trainer.get_decay_parameter_names(None, m) for m in (net, plain)]
    assert names[0] == names[1] and names[0]


def test_transformers_gives_new_layers_their_values(tmp_path):
    """It initializes BatchNorm*d that a checkpoint lacks, and no SyncBatchNorm, PyTorch's neither:
    convert after from_pretrained."""
    transformers = library("transformers")
    backbone = transformers.ResNetModel(resnet().config)
    backbone.save_pretrained(tmp_path)

    class Head(transformers.ResNetPreTrainedModel):
        def __init__(self, config):
            super().__init__(config)
            self.resnet = transformers.ResNetModel(config)
            self.norm = nn.BatchNorm2d(8)
            self.post_init()

    net = syncbn.convert_sync_batchnorm(Head.from_pretrained(tmp_path))
    assert type(net.norm) is syncbn.SyncBatchNorm
    assert (net.norm.running_var == 1).all() and (net.norm.weight == 1).all()


# Ultralytics


@pytest.fixture
def ultralytics(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("YOLO_CONFIG_DIR", str(tmp_path_factory.getbasetemp()))
    monkeypatch.setenv("YOLO_OFFLINE", "true")
    monkeypatch.setenv("YOLO_AUTOINSTALL", "false")
    return library("ultralytics")


def yolo():
    from ultralytics.nn.tasks import DetectionModel

    torch.manual_seed(9)
    return DetectionModel("yolov8n.yaml", ch=3, nc=2, verbose=False)


@pytest.mark.parametrize("name", ("SGD", "AdamW", "MuSGD"))
def test_ultralytics_weight_decay(ultralytics, name):
    """57 weights of norms without decay, whose biases are in a group with the others."""
    from ultralytics.engine.trainer import BaseTrainer

    def groups_of(net):
        optimizer = BaseTrainer.build_optimizer(None, net, name=name, lr=0.01, decay=0.1)
        return decays_of(optimizer.param_groups)

    found, net = same_groups(groups_of, yolo), syncbn.convert_sync_batchnorm(yolo())
    assert len(norms_of(net)) == 57
    norms = {f"{n}.weight" for n, m in net.named_modules() if isinstance(m, syncbn.SyncBatchNorm)}
    assert norms <= {n for decay, names in found if decay == 0 for n in names}


def test_ultralytics_fuse(ultralytics):
    plain, net = yolo().eval(), syncbn.convert_sync_batchnorm(yolo()).eval()
    for model in (plain, net):
        model.fuse(verbose=False)
    assert net.is_fused() and not norms_of(net)
    for (name, a), b in zip(net.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_ultralytics_freeze(ultralytics):
    """Its trainer puts frozen BatchNorm2d layers into evaluation mode, but no SyncBatchNorm,
    PyTorch's neither; the page's trainer does."""
    from ultralytics.engine.trainer import BaseTrainer

    def modes(net, cls):
        this = types.SimpleNamespace(model=net, freeze_layer_names=["model.0.", "model.1."])
        cls._model_train(this)
        return [m.training for m in net.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]

    plain, net = yolo(), syncbn.convert_sync_batchnorm(yolo())
    theirs = THEIRS.convert_sync_batchnorm(yolo())
    assert modes(plain, BaseTrainer).count(False) == 2
    assert modes(theirs, BaseTrainer) == modes(net, BaseTrainer) == [True] * 57


# mmengine


def test_mmengine_weight_decay():
    constructor = library("mmengine.optim").DefaultOptimWrapperConstructor
    optimizer = dict(type="SGD", lr=0.1, weight_decay=0.1)

    def groups_of(net):
        options = dict(type="OptimWrapper", optimizer=optimizer), dict(norm_decay_mult=0.0)
        return decays_of(constructor(*options)(net).optimizer.param_groups)

    decays = same_groups(groups_of)
    assert (0.0, ["1.weight"]) in decays and (0.1, ["0.weight"]) in decays


# Tools that ask for the exact class


def small(make):
    """A network, and one whose layers are PyTorch's synchronized ones."""
    return nn.Sequential(nn.Conv2d(3, 4, 3), make(4), nn.ReLU())


def all_kinds():
    """PyTorch's two, converted, and made by hand."""
    library("thop"), library("ptflops"), library("opacus.validators")
    converted = syncbn.convert_sync_batchnorm(small(nn.BatchNorm2d))
    return [small(nn.BatchNorm2d), small(nn.SyncBatchNorm), converted, small(syncbn.SyncBatchNorm)]


def test_thop_and_ptflops_count_as_for_plain_layers():
    counts = [
        (
            library("ptflops").get_model_complexity_info(
                net.eval(),
                (3, 8, 8),
                as_strings=False,
                print_per_layer_stat=False,
                backend="pytorch",
            ),
            library("thop").profile(net, (torch.randn(1, 3, 8, 8),), verbose=False),
        )
        for net in all_kinds()
    ]
    assert counts[1][1] == counts[0][1] and counts[1][0] != counts[0][0]  # PyTorch's
    assert counts[2] == counts[3] == counts[0]


def test_opacus_refuses_and_replaces_as_plain_layers():
    validator = library("opacus.validators").ModuleValidator
    for net in all_kinds():
        assert [type(e).__name__ for e in validator.validate(net)] == ["ShouldReplaceModuleError"]
        assert type(validator.fix(net)[1]) is nn.GroupNorm
    fused = nn.Sequential(syncbn.SyncBatchNorm(4, activation="relu"))
    with pytest.raises(ValueError, match="got activation 'relu', which what replaces the layer"):
        validator.fix(fused)
