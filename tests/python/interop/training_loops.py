# SPDX-License-Identifier: Apache-2.0
"""Other people's training loops, on a model of theirs with this package's layer; run on ranks by
test_training_loops.py, and longer by curves.py.

A loop is a function loop_*(convert, rank, world) that trains on batches of 8 samples of all ranks
together and returns the tensors that came of it. They are those of one process that trains plain
nn.BatchNorm2d: both compute the same sums in float64, in other orders.
"""

import functools
import os
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import syncbn
from snippets import blocks
from support import PROJECT, library

BATCH, STEPS = 8, int(os.environ.get("LOOPS_STEPS", 3))
LOSSES: list[float] = []  #: of a loop's steps, on this rank


class Pictures(Dataset):
    """Noise that is brighter in the colour of its label. As pairs, or as the dictionaries of
    transformers."""

    def __init__(self, pairs: bool = True, batches: int = STEPS) -> None:
        generator = torch.Generator().manual_seed(11)
        size = BATCH * batches
        self.x = torch.randn(size, 3, 32, 32, generator=generator, dtype=torch.float64)
        self.labels = torch.randint(3, (size,), generator=generator)
        self.x[torch.arange(size), self.labels] += 1
        self.pairs = pairs

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i):
        if self.pairs:
            return self.x[i], self.labels[i]
        return {"pixel_values": self.x[i], "labels": self.labels[i]}


def small_network() -> nn.Sequential:
    torch.manual_seed(12)
    return nn.Sequential(
        *(nn.Conv2d(3, 6, 3, 2, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3, 2)),
        *(nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)),
    ).double()


def snippet(page: str, kind: str) -> dict:
    """The names that the one block of its kind on a page defines."""
    names = {}
    (block,) = (block for block in blocks(PROJECT / page) if block.kind == kind)
    exec(compile(block.text, page, "exec"), names)
    return names


def _cross_entropy(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    loss = nn.functional.cross_entropy(outputs, labels, ignore_index=255)
    LOSSES.append(loss.item())
    return loss


def _loss_of_pixels(y: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    pixels = labels[:, None, None].expand(-1, 32, 32).clone()
    pixels[:, 0] = 255  # void
    return _cross_entropy(y, pixels)


def _loader(world: int) -> DataLoader:
    """Batches whose samples, of all ranks together, are the same for any number of ranks."""
    data = Pictures()
    sampler = DistributedSampler(data, shuffle=False)
    return DataLoader(data, BATCH // world, sampler=sampler)


def _steps(wrapped, optimizer, world: int, after, loss_of=_cross_entropy) -> None:
    """after(step): what follows a step; loss_of(outputs, labels)."""
    for step, (x, labels) in enumerate(_loader(world)):
        loss = loss_of(wrapped.train()(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        after(step)


def _state(*models: nn.Module) -> dict[str, torch.Tensor]:
    return {f"{i}.{k}": v for i, m in enumerate(models) for k, v in m.state_dict().items()}


def loop_torchvision(convert, rank, world):
    """In the order of the library's reference for classification: conversion, groups of parameters,
    DDP, and an average of weights and buffers; its state goes through a file in the middle."""
    models = library("torchvision.models")
    split = library("torchvision.ops._utils").split_normalization_params
    torch.manual_seed(13)
    model = convert(models.mobilenet_v3_small(num_classes=3, dropout=0.0).double())
    norms, others = split(model)
    groups = [{"params": norms, "weight_decay": 0.0}, {"params": others, "weight_decay": 1e-2}]
    optimizer = torch.optim.SGD(groups, lr=0.01, momentum=0.9)
    wrapped = DistributedDataParallel(model)
    average = torch.optim.swa_utils.AveragedModel(
        model, avg_fn=lambda old, new, count: 0.5 * old + 0.5 * new, use_buffers=True
    )

    def after(step):
        average.update_parameters(model)
        if step == 1:
            model.load_state_dict(model.state_dict())
            average.load_state_dict(average.state_dict())

    _steps(wrapped, optimizer, world, after)
    with torch.no_grad():
        outputs = average.eval()(Pictures().x[:2])
    return _state(model, average) | {"outputs": outputs}


def loop_segmentation(convert, rank, world):
    """In the order of torchvision's reference for segmentation: groups of parameters, and a
    learning rate that decays in each step."""
    get_model = library("torchvision.models").get_model
    torch.manual_seed(17)
    model = get_model("lraspp_mobilenet_v3_large", weights_backbone=None, num_classes=3)
    model = convert(model.double())
    groups = [{"params": list(part.parameters())} for part in (model.backbone, model.classifier)]
    optimizer = torch.optim.SGD(groups, lr=0.02, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.PolynomialLR(optimizer, STEPS, power=0.9)
    wrapped = DistributedDataParallel(model)

    def loss_of(y, labels):
        return _loss_of_pixels(y["out"], labels)

    _steps(wrapped, optimizer, world, lambda step: schedule.step(), loss_of)
    return _state(model)


def _trained(model: nn.Module, world: int, loss_of=_cross_entropy) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    _steps(DistributedDataParallel(model), optimizer, world, lambda step: None, loss_of)
    return _state(model)


def loop_dilated_resnet(convert, rank, world):
    """A backbone of the kind of torchvision's ResNet-50, dilated as for segmentation."""
    resnet = library("torchvision.models.resnet")
    torch.manual_seed(18)
    dilated = {"replace_stride_with_dilation": (False, True, True)}
    *parts, _, _ = resnet.ResNet(resnet.Bottleneck, [1, 1, 2, 1], **dilated).children()
    model = nn.Sequential(*parts, nn.Conv2d(2048, 3, 1), nn.Upsample(scale_factor=8))
    return _trained(convert(model.double()), world, _loss_of_pixels)


def loop_densenet(convert, rank, world):
    torch.manual_seed(19)
    model = library("torchvision.models.densenet").DenseNet(8, (2, 2), 8, num_classes=3)
    return _trained(convert(model.double()), world)


def loop_timm(convert, rank, world):
    """In the order of its train.py, on a model with layers of its own that have an activation."""
    timm, utils = library("timm"), library("timm.utils")
    torch.manual_seed(14)
    model = convert(timm.create_model("test_efficientnet", num_classes=3).double())
    optimizer = library("timm.optim").create_optimizer_v2(
        model, opt="momentum", lr=0.01, weight_decay=0.01
    )
    average = utils.ModelEmaV3(model, decay=0.5)
    wrapped = DistributedDataParallel(model)
    _steps(wrapped, optimizer, world, lambda step: average.update(model))
    before = _state(model)
    for reduce in (True, False):
        utils.distribute_bn(model, world, reduce)
    if convert is not _plain:  # all ranks have the same already
        for name, value in _state(model).items():
            torch.testing.assert_close(value, before[name], rtol=1e-15, atol=0)
    return _state(model, average)


def loop_accelerate(convert, rank, world):
    Accelerator = library("accelerate").Accelerator
    accelerator = Accelerator(cpu=True)
    model = convert(small_network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(Pictures(), BATCH // world)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, labels in loader:
        model.train()
        loss = _cross_entropy(model(x), labels)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        outputs = accelerator.gather(model.eval()(Pictures().x[:2]))[:2]
    return _state(accelerator.unwrap_model(model)) | {"outputs": outputs}


def loop_lightning(convert, rank, world):
    """With the plugin of docs/engines.md, and a callback that averages weights and makes running
    statistics anew."""
    lightning = library("lightning.pytorch")
    StochasticWeightAveraging = library("lightning.pytorch.callbacks").StochasticWeightAveraging

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = small_network()

        def training_step(self, batch, number):
            self.kinds = {type(m) for m in self.modules()}
            x, labels = batch
            return _cross_entropy(self.network(x), labels)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=world,
        precision="64-true",
        max_epochs=3,
        plugins=snippet("docs/engines.md", "python lightning")["plugins"],
        callbacks=[StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    with mock.patch.object(syncbn, "convert_sync_batchnorm", convert):
        trainer.fit(module, _loader(world))
    assert (syncbn.SyncBatchNorm in module.kinds) == (convert is not _plain)
    assert type(module.network[1]) is nn.BatchNorm2d  # reverted
    return _state(module)


def loop_transformers(convert, rank, world):
    transformers = library("transformers")
    config = transformers.ResNetConfig(
        embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic", num_labels=3
    )
    torch.manual_seed(15)
    model = convert(transformers.ResNetForImageClassification(config).double())
    arguments = transformers.TrainingArguments(
        output_dir=os.environ["LOOPS_FOLDER"],
        use_cpu=True,
        num_train_epochs=1,
        per_device_train_batch_size=BATCH // world,
        train_sampling_strategy="sequential",
        optim="sgd",
        learning_rate=0.1,
        weight_decay=0.01,
        lr_scheduler_type="constant",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        average_tokens_across_devices=False,  # would double the loss of a model without tokens
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=Pictures(pairs=False))
    model.register_forward_hook(lambda model, x, outputs: LOSSES.append(outputs.loss.item()))
    trainer.train()
    assert trainer.state.global_step == STEPS
    return _state(model)


def loop_ultralytics(convert, rank, world):
    """One epoch of its detection trainer, with a frozen part, the checkpoint that it writes, and
    the prediction of that. The trainer computes in float32: what is compared are the counts."""
    if world > 1:
        pytest.skip("Ultralytics trains on several ranks with GPUs only")
    os.environ.update(YOLO_CONFIG_DIR=os.environ["LOOPS_FOLDER"], YOLO_OFFLINE="true")
    os.environ.update(YOLO_AUTOINSTALL="false")
    del os.environ["RANK"], os.environ["LOCAL_RANK"]
    library("ultralytics")
    names = snippet("docs/engines.md", "python ultralytics")
    data = _pictures_with_boxes(Path(os.environ["LOOPS_FOLDER"]) / "boxes")
    with mock.patch.object(syncbn, "convert_sync_batchnorm", convert):
        trainer = names["Trainer"](
            overrides=dict(
                model="yolov8n.yaml",
                data=str(data),
                project=str(data.parent),
                device="cpu",
                epochs=2,
                batch=4,
                imgsz=64,
                workers=0,
                plots=False,
                freeze=[0],
                exist_ok=True,
                verbose=False,
            )
        )
        trainer.train()
    kinds = {
        type(m) for m in trainer.model.modules() if isinstance(m, nn.modules.batchnorm._NormBase)
    }
    assert kinds == {nn.BatchNorm2d if convert is _plain else syncbn.SyncBatchNorm}
    assert trainer.loss.isfinite().all() and trainer.best.exists()
    predicted = (
        library("ultralytics")
        .YOLO(trainer.best)
        .predict(torch.rand(1, 3, 64, 64), device="cpu", verbose=False)
    )
    assert len(predicted) == 1
    counts = {k: v for k, v in trainer.model.state_dict().items() if "num_batches" in k}
    assert {int(v) for v in counts.values()} == {0, 4}  # those of the frozen part stay
    return counts


def _pictures_with_boxes(folder: Path) -> Path:
    """A detection dataset of its format: the path of the file that describes it."""
    image = library("PIL.Image")
    generator = torch.Generator().manual_seed(16)
    for part in ("images", "labels"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    for i in range(8):
        pixels = torch.randint(256, (64, 64, 3), generator=generator, dtype=torch.uint8)
        image.fromarray(pixels.numpy()).save(folder / "images" / f"{i}.png")
        (folder / "labels" / f"{i}.txt").write_text(f"{i % 2} 0.5 0.5 0.4 0.4\n")
    description = folder / "data.yaml"
    description.write_text(
        f"path: {folder}\ntrain: images\nval: images\nnames: {{0: one, 1: two}}\n"
    )
    return description


def loop_mmengine(convert, rank, world):
    """On one rank its runner, which reverts synchronized layers; it starts several with GPUs only,
    so there its wrapper does a step after the other."""
    model = library("mmengine.model")

    class Model(model.BaseModel):
        def __init__(self):
            super().__init__()
            self.network = convert(small_network())

        def forward(self, inputs, labels, mode="tensor"):
            return {"loss": _cross_entropy(self.network(inputs), labels)}

    options = dict(
        optimizer=dict(type="SGD", lr=0.1, weight_decay=0.01),
        paramwise_cfg=dict(norm_decay_mult=0.0),
    )
    net = Model()
    if world > 1:
        wrapped = model.MMDistributedDataParallel(net)
        optimizer = library("mmengine.optim").build_optim_wrapper(net, dict(options))
        for batch in _loader(world):
            wrapped.train_step(batch, optimizer)
        return _state(net)
    runner = library("mmengine.runner").Runner(
        model=net,
        work_dir=os.environ["LOOPS_FOLDER"],
        train_dataloader=_loader(world),
        train_cfg=dict(by_epoch=True, max_epochs=1),
        optim_wrapper=options,
        experiment_name=convert.__name__,
    )
    runner.train()
    assert not any(isinstance(m, nn.SyncBatchNorm) for m in runner.model.modules())
    return _state(runner.model)


def _plain(model: nn.Module) -> nn.Module:
    return model


def _run(loop, kind: str, folder: Path, rank: int, world: int) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        LOOPS_FOLDER=str(folder),
    )
    convert = syncbn.convert_sync_batchnorm if kind == "synchronized" else _plain
    state = loop(convert, rank, world)
    torch.save(state, folder / f"{loop.__name__}.{kind}.{world}.{rank}.pt")


LOOPS = {name: loop for name, loop in globals().items() if name.startswith("loop_")}


def cases(folder: Path, kinds: tuple[str, ...]) -> dict:
    return {
        f"{name} {kind}": functools.partial(_run, loop, kind, folder)
        for name, loop in LOOPS.items()
        for kind in kinds
    }
