# SPDX-License-Identifier: Apache-2.0
"""Small networks and training loops whose end is a hash, for any number of processes."""

import copy
import random

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
    return syncbn.convert_sync_batchnorm(network), draw.choice((3, 4, 5, 6))


class Pictures(torch.utils.data.Dataset):
    """With an augmentation that draws from PyTorch's and Python's generators."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        x = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(index))
        return x + 0.1 * torch.randn(3, 8, 8) + 0.01 * random.random(), index % 5


def train(training: syncbn.Shares, optimizer, steps: int, **loop) -> None:
    """As a user writes it; loop: a penalty, autocast, a scaler."""
    scaler = loop.get("scaler") or torch.amp.GradScaler("cpu", enabled=False)
    loader = training.loader(Pictures(), 2 * training.shares)
    loader.batch_sampler.set_epoch(0, start=training.steps)
    batches = iter(loader)
    for _ in range(steps):
        x, target = next(batches)
        with torch.autocast("cpu", torch.bfloat16, enabled=loop.get("autocast", False)):
            outputs = training(x)
            losses = [
                F.cross_entropy(y.float(), t) for y, t in zip(outputs, training.split(target))
            ]
        if loop.get("penalty"):
            losses = [x + 1e-3 * next(training.module.parameters()).square().sum() for x in losses]
        training.backward([scaler.scale(x) for x in losses])
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(training.module.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def trained(seed: int, steps: int = 4, make=torch.optim.AdamW, **loop) -> str:
    network, shares = random_network(seed)
    training = syncbn.Shares(network, shares, seed=seed)
    optimizer = make(network.parameters(), lr=1e-2)
    average = torch.optim.swa_utils.AveragedModel(copy.deepcopy(network))
    for _ in range(steps):
        train(training, optimizer, 1, **loop)
        average.update_parameters(network)
    return syncbn.fingerprint(network, optimizer, average)
