# SPDX-License-Identifier: Apache-2.0
"""What training by shares costs: a step of syncbn.Shares beside that of a plain program.

The plain program makes one micro-batch of each share and has local batch norm: in a loop on one
process, under DistributedDataParallel on several.

Variants take turns within each round. A time is the smallest of all rounds, and the memory is the
peak of a step's allocations over what was there before it.
"""

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import common
import processes
import torch
import torch.distributed as dist
from resnet20 import build_resnet20
from resnet50 import build_resnet50
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import syncbn

SHARES = (1, 2, 4, 8)


class Transformer(nn.Module):
    """Four layers over 64 places, without a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.1, batch_first=True)
        self.layers, self.last = nn.TransformerEncoder(layer, 4), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layers(x).mean(1))


class Network(NamedTuple):
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]  # of a share's input


NETWORKS = {
    "ResNet-20": Network(build_resnet20, (8, 3, 32, 32)),
    "ResNet-50": Network(build_resnet50, (2, 3, 64, 64)),
    "transformer": Network(Transformer, (8, 64, 128)),
}


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


class Plain:
    """A loop over micro-batches, under DistributedDataParallel on several processes."""

    def __init__(self, model: nn.Module, parts: list[Tensor]) -> None:
        self.model = DistributedDataParallel(model) if dist.get_world_size() > 1 else model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        self.parts = parts

    def step(self) -> None:
        self.optimizer.zero_grad()
        last = len(self.parts) - 1
        for i, x in enumerate(self.parts):
            waits = i < last and isinstance(self.model, DistributedDataParallel)
            with self.model.no_sync() if waits else contextlib.nullcontext():
                loss(self.model, x).div(len(self.parts)).backward()
        self.optimizer.step()


class ByShares:
    def __init__(self, model: nn.Module, parts: list[Tensor]) -> None:
        model = syncbn.convert_sync_batchnorm(model)
        self.training = syncbn.Shares(model, len(parts) * dist.get_world_size())
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        self.parts = parts

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.training.step(loss, self.parts)
        self.optimizer.step()


def measure_shares(networks: list[str], seconds: float, least: int) -> list[dict]:
    rows, ranks = [], dist.get_world_size()
    for network, shares in [(n, v) for n in networks for v in SHARES if v >= ranks]:
        build, shape = NETWORKS[network]
        parts = [torch.randn(shape) for _ in range(shares // ranks)]
        trainers = {}
        for name, kind in (("plain", Plain), ("Shares", ByShares)):
            torch.manual_seed(0)
            trainers[name] = kind(build(), parts)

        def play(clock: common.Clock, trainers=trainers) -> None:
            for name, trainer in trainers.items():
                dist.barrier()
                clock(name, trainer.step)

        times = processes.in_turns(play, seconds, least)
        best = {name: min(values) for name, values in times.items()}
        peak = {name: common.peak_of(trainer.step) for name, trainer in trainers.items()}
        rows.append(
            {
                "network": network,
                "shares": shares,
                "rounds": len(times["plain"]),
                "milliseconds": best,
                "ratio": best["Shares"] / best["plain"],
                "mebibytes": peak,
                "memory_ratio": peak["Shares"] / peak["plain"],
            }
        )
    return rows


if __name__ == "__main__":
    import report

    work = (measure_shares, {"networks": list(NETWORKS), "seconds": 2.0, "least": 6})
    found = [row for ranks in (1, 2) for row in processes.run(ranks, [work])]
    print(report.pivot_table({"shares": found}, "shares"))
