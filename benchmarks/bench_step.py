# SPDX-License-Identifier: Apache-2.0
"""What synchronizing costs in a training step under DistributedDataParallel.

Networks: the demo's (12 batch norms, 64 x 64 pictures), ResNet-20 (19, 32 x 32) and ResNet-50 (53,
224 x 224). Ranks are processes of one thread each. Variants take turns within each round, so that
other programs on the machine touch all of them; medians and quartiles over the rounds.
"""

import sys
from collections.abc import Callable
from typing import NamedTuple

import common
import processes
import recipe
import torch
import torch.distributed as dist
from resnet20 import build_resnet20
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchvision.models import resnet50

import syncbn

sys.path.append(str(common.FOLDER.parent / "examples" / "segmentation"))
from network import build_network

PLAIN = "BatchNorm2d, not synchronized"
OURS = "syncbn, shared memory"
VARIANTS = {
    PLAIN: lambda model: model,
    "recipe, Gloo": recipe.convert,
    "syncbn, not synchronized": lambda m: syncbn.convert_sync_batchnorm(m, sync=False),
    "syncbn, Gloo": lambda m: syncbn.convert_sync_batchnorm(m, engine="process_group"),
    OURS: syncbn.convert_sync_batchnorm,
}


class Network(NamedTuple):
    build: Callable[[], nn.Module]
    size: int  # of its pictures
    batches: list[int]  # a rank
    variants: tuple[str, ...] = tuple(VARIANTS)
    layout: torch.memory_format = torch.contiguous_format


NETWORKS = {
    "demo": Network(lambda: build_network(11, 0), 64, [1, 4, 8]),
    "ResNet-20": Network(build_resnet20, 32, [8, 32]),
    "ResNet-50": Network(resnet50, 224, [4], (PLAIN, OURS)),
    "ResNet-50, channels-last": Network(resnet50, 224, [4], (PLAIN, OURS), torch.channels_last),
}
BATCHES = {name: network.batches for name, network in NETWORKS.items()}


class Trainer:
    def __init__(self, model: nn.Module, pictures: torch.Tensor):
        self.model = DistributedDataParallel(model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.pictures = pictures

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.pictures).square().mean().backward()
        self.optimizer.step()


def measure_steps(batches: dict[str, list[int]], seconds: float, least: int) -> list[dict]:
    rows = []
    for network, batch in [(n, b) for n, all_of_it in batches.items() for b in all_of_it]:
        build, size, _, variants, layout = NETWORKS[network]
        pictures = torch.randn(batch, 3, size, size).to(memory_format=layout)
        trainers = {}
        for name in variants:
            torch.manual_seed(0)
            model = VARIANTS[name](build()).to(memory_format=layout)
            trainers[name] = Trainer(model, pictures)

        def play(clock: common.Clock, trainers=trainers) -> None:
            for name, trainer in trainers.items():
                dist.barrier()
                clock(name, trainer.step)

        times = processes.in_turns(play, seconds, least)
        for name, values in times.items():
            row = {"network": network, "batch": batch, "variant": name, "rounds": len(values)}
            row["milliseconds"] = common.quartiles(values)
            rows.append(row | {"ratio": common.ratio(values, times[PLAIN])})
    return rows
