"""What synchronizing costs in a training step under DistributedDataParallel.

python benchmarks/bench_step.py [--ranks 2] [--seconds 3]

Networks: the demo's (12 batch norms, 64 x 64 pictures) and ResNet-20 (19, 32 x 32). Ranks are
processes of one thread each. Variants take turns within each round, so that other programs on the
machine touch all of them; medians and quartiles over the rounds.
"""

import argparse
import sys
from pathlib import Path

import common
import processes
import recipe
import torch
import torch.distributed as dist
from resnet20 import build_resnet20
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import syncbn

sys.path.append(str(common.FOLDER.parent / "examples" / "segmentation"))
from network import build_network

PLAIN = "BatchNorm2d, not synchronized"
VARIANTS = {
    PLAIN: lambda model: model,
    "recipe, Gloo": recipe.convert,
    "syncbn, not synchronized": lambda m: syncbn.convert_sync_batchnorm(m, sync=False),
    "syncbn, Gloo": lambda m: syncbn.convert_sync_batchnorm(m, engine="process_group"),
    "syncbn, shared memory": syncbn.convert_sync_batchnorm,
}
#: How a network is made, and the size of its pictures.
NETWORKS = {"demo": (lambda: build_network(11, 0), 64), "ResNet-20": (build_resnet20, 32)}
#: Batches a rank.
BATCHES = {"demo": [1, 4, 8], "ResNet-20": [8, 32]}


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
        build, size = NETWORKS[network]
        pictures = torch.randn(batch, 3, size, size)
        trainers = {}
        for name, convert in VARIANTS.items():
            torch.manual_seed(0)
            trainers[name] = Trainer(convert(build()), pictures)

        def play(clock: common.Clock, trainers=trainers) -> None:
            for name, trainer in trainers.items():
                dist.barrier()
                clock(name, trainer.step)

        times = processes.in_turns(play, seconds, least)
        found = common.summarize(times, dict.fromkeys(VARIANTS, PLAIN))
        rows += [{"network": network, "batch": batch} | row for row in found]
    return rows


def table(rows: list[dict]) -> str:
    lines = []
    title = None
    for row in rows:
        if (row["network"], row["batch"]) != title:
            title = row["network"], row["batch"]
            lines.append(f"\nranks: {row['ranks']}, {title[0]}, batch {title[1]} a rank: ms a step")
        low, median, high = row["milliseconds"]
        more = 100 * (1 / row["speedup"][1] - 1)
        lines.append(f"{row['variant']:38}{median:9.1f} [{low:.1f}, {high:.1f}]  {more:+.0f} %")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3.0, help="per network and batch, about")
    parser.add_argument("--json", type=Path, help="write all figures there")
    arguments = parser.parse_args()
    options = {"batches": BATCHES, "seconds": arguments.seconds, "least": 9}
    rows = processes.run(arguments.ranks, [(measure_steps, options)])
    print(table(rows))
    common.write_json(arguments.json, rows)


if __name__ == "__main__":
    main()
