# SPDX-License-Identifier: Apache-2.0
"""Small networks and training loops whose end is a hash, for any number of processes."""

import contextlib
import copy
import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import syncbn


class Branches(nn.Module):
    """Branches with and without a batch norm: the gradients of their input have many terms, which
    are added in the order in which backward comes to the branches."""

    def __init__(self, channels: int):
        super().__init__()
        kinds = (1, 3, 5, 1)
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Conv2d(channels, 4, k, padding=k // 2, bias=False), *norm, nn.ReLU())
            for k, norm in zip(kinds, ([], [nn.BatchNorm2d(4)], [nn.BatchNorm2d(4)], []))
        )
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(torch.cat([branch(x) for branch in self.branches] + [x], 1))


class Attention(nn.Module):
    """Over places, with a buffer that forward writes to."""

    def __init__(self, channels: int):
        super().__init__()
        self.attention = nn.MultiheadAttention(channels, 2, dropout=0.1, batch_first=True)
        self.register_buffer("average", torch.zeros(channels))
        self.register_buffer("seen", torch.zeros((), dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        places = x.flatten(2).transpose(1, 2)
        if self.training:
            self.seen.fill_(True)
            self.average.mul_(0.9).add_(places.detach().mean((0, 1)), alpha=0.1)
        y, _ = self.attention(places, places, places, need_weights=False)
        return x + y.transpose(1, 2).view_as(x) - self.average[:, None, None]


class Sometimes(nn.Module):
    """Stochastic depth; one of its parameters is never used, and one is not trained."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner, self.unused = inner, nn.Parameter(torch.ones(3))
        self.scale = nn.Parameter(torch.full((1,), 0.5), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.inner(x) if torch.rand(()) < 0.6 else x


def random_network(seed: int) -> tuple[nn.Module, int]:
    """A converted network for (N, 3, 8, 8) with 5 outputs, and a number of shares."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    width = 8
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
    for _ in range(draw.randint(2, 4)):
        kind = draw.randrange(6)
        if kind == 0:
            layers += [Branches(width), nn.Conv2d(width + 16, width, 1)]
        elif kind == 1:
            layers.append(Attention(width))
        elif kind == 2:
            layers.append(
                Sometimes(nn.Conv2d(width, width, 3, padding=1, groups=draw.choice((1, 2, 8))))
            )
        elif kind == 3:
            layers += [nn.GroupNorm(2, width), nn.Conv2d(width, width, 3, padding=2, dilation=2)]
        elif kind == 4:
            layers += [nn.Conv2d(width, width, 2, stride=2), nn.ConvTranspose2d(width, width, 2, 2)]
        else:
            layers += [nn.AvgPool2d(3, 1, 1), nn.Dropout2d(0.3)]
        layers += [nn.BatchNorm2d(width), draw.choice((nn.ReLU(), nn.GELU(), nn.SiLU(True)))]
    layers += [nn.AdaptiveAvgPool2d(draw.choice((1, 2))), nn.Flatten(), nn.LazyLinear(5)]
    network = nn.Sequential(*layers)
    network(torch.zeros(2, 3, 8, 8))  # makes the lazy layer
    return syncbn.convert_sync_batchnorm(network), draw.choice((4, 5, 6, 7))


class Drawn(nn.Module):
    """Parts that are drawn at random: what a forward may have, from all generators, in any order
    around synchronized layers."""

    def __init__(self, seed: int):
        super().__init__()
        draw = random.Random(seed)
        kinds = (
            "buffer",
            "written",
            "counted",
            "method",
            "hook",
            "numpy",
            "python",
            "tied",
            "noise",
        )
        self.kinds = draw.choices(kinds, k=draw.randint(3, 6))
        self.stem, self.head = nn.Conv2d(3, 6, 3), nn.Linear(6, 5)
        self.parts = nn.ModuleList(nn.Conv2d(6, 6, 1) for _ in self.kinds)
        self.norms = nn.ModuleList(
            nn.BatchNorm2d(6) if draw.random() < 0.6 else nn.GroupNorm(2, 6) for _ in self.kinds
        )
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 6)[:, None, None])
        self.register_buffer("mean", torch.zeros(6, 1, 1))
        self.calls, self.run = 0, self.one
        if draw.random() < 0.5:
            self.parts[0].requires_grad_(False)
        last = self.parts[-1]
        self.head.register_forward_pre_hook(lambda m, given: (given[0] * last.bias.mean().exp(),))

    def one(self, i: int, x: Tensor) -> Tensor:
        return x + self.norms[i](self.parts[i](F.silu(x)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for i, kind in enumerate(self.kinds):
            if kind == "buffer":
                x = x * self.scale
            elif kind == "written":
                self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 2, 3))[:, None, None]
                x = x - self.mean
            elif kind == "counted":
                self.calls += 1
                x = x * (1 + 1 / self.calls)
            elif kind == "hook":
                self.last = self.one(i, x)
                x = x + self.last.mean()
            elif kind == "numpy":
                x = x * np.random.uniform(0.5, 1.5)
            elif kind == "python" and random.random() < 0.5:
                continue
            elif kind == "tied":
                x = F.conv2d(x, self.parts[0].weight)
            elif kind == "noise":
                x = F.dropout(x + 0.1 * torch.randn_like(x), 0.2)
            x = self.run(i, x)
        return self.head(x.mean((2, 3)))


def drawn_training(seed: int) -> str:
    """A program that is drawn: the network, V, the loader and the loss."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    shares = draw.choice((4, 5, 6, 8))
    network = syncbn.convert_sync_batchnorm(Drawn(seed))
    training = syncbn.Shares(network, shares, seed=seed)
    trained = [p for p in network.parameters() if p.requires_grad]
    optimizer = draw.choice((torch.optim.AdamW, torch.optim.SGD))(trained, lr=1e-2)
    mixes, penalty, losses = draw.random() < 0.5, draw.random() < 0.5, draw.choice((1, 2))

    def collate(samples):
        x, target = torch.utils.data.default_collate(samples)
        return (x.lerp(x.flip(0), random.random()) if mixes else x), target

    def loss(model, batch):
        value = F.cross_entropy(model(batch[0]), batch[1])
        if penalty:
            value = value + 1e-3 * sum(p.square().sum() for p in model.parameters())
        return {"loss": value, "mean": batch[0].mean()}

    loader = training.loader(Pictures(), draw.choice((2, 3)) * shares, collate_fn=collate)
    values = []
    for batches in loader:
        for _ in range(losses):
            with training.no_sync() if draw.random() < 0.3 else contextlib.nullcontext():
                values.append(training.step(loss, batches))
        optimizer.step()
        optimizer.zero_grad()
        if len(values) >= 3:
            break
    return syncbn.fingerprint(network, optimizer, values)


class Pictures(torch.utils.data.Dataset):
    """With an augmentation that draws from PyTorch's and Python's generators."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        x = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(index))
        return x + 0.1 * torch.randn(3, 8, 8) + 0.01 * random.random(), index % 5


def train(training: syncbn.Shares, loader, optimizer, steps: int, **loop) -> list[Tensor]:
    """As a user writes it; loop: a penalty, autocast, a scaler. The means of the losses."""
    scaler = loop.get("scaler") or torch.amp.GradScaler("cpu", enabled=False)

    def loss(model, batch):
        x, target = batch
        with torch.autocast("cpu", torch.bfloat16, enabled=loop.get("autocast", False)):
            value = F.cross_entropy(model(x).float(), target)
        if loop.get("penalty"):
            value = value + 1e-3 * next(model.parameters()).square().sum()
        return scaler.scale(value * 8)

    values: list[Tensor] = []
    while True:
        for batches in loader:
            values.append(training.step(loss, batches))
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(training.module.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if len(values) == steps:
                return values


def trained(seed: int, steps: int = 4, make=torch.optim.AdamW, **loop) -> str:
    network, shares = random_network(seed)
    training = syncbn.Shares(network, shares, seed=seed)
    optimizer = make(network.parameters(), lr=1e-2)
    average = torch.optim.swa_utils.AveragedModel(copy.deepcopy(network))
    loader, values = training.loader(Pictures(), 2 * training.shares), []
    for _ in range(steps):
        values += train(training, loader, optimizer, 1, **loop)
        average.update_parameters(network)
    return syncbn.fingerprint(network, optimizer, average, values)
