# SPDX-License-Identifier: Apache-2.0
"""DistributedDataParallel with synchronized batch norm and gradient accumulation:

    torchrun --nproc-per-node 2 examples/10_ddp.py

Runs on any number of ranks, and alone, over the same samples. Exits with 1 if the ranks' running
statistics differ or training does not.
"""

import contextlib
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import syncbn

STEPS, MICRO, BATCH = 20, 2, 8  # MICRO batches of BATCH samples, of all ranks, per step


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Stripes that run down (class 0) or across (class 1), in noise."""
    generator = torch.Generator().manual_seed(number)
    labels = torch.randint(2, (BATCH,), generator=generator)
    stripes = torch.tensor([1.0, -1.0]).repeat(4).expand(8, 8)
    x = torch.where(labels.view(-1, 1, 1) == 0, stripes, stripes.t()).unsqueeze(1)
    return x + torch.randn(x.shape, generator=generator), labels


def main() -> int:
    rank, world = 0, 1
    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)),
    )
    model = syncbn.convert_sync_batchnorm(model)  # first this, then the wrapper
    net = DistributedDataParallel(model) if world > 1 else model
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of_step = torch.zeros(())
        for i in range(MICRO):
            x, labels = (t[rank::world] for t in batch(step * MICRO + i))
            # Gradients are averaged once per step; statistics are those of each micro-batch.
            last = i == MICRO - 1
            with contextlib.nullcontext() if last or world == 1 else net.no_sync():
                loss = nn.functional.cross_entropy(net(x), labels) / MICRO
                loss.backward()
            loss_of_step += loss.detach()
        optimizer.step()
        if world > 1:
            dist.all_reduce(loss_of_step)
        losses.append(loss_of_step.item() / world)

    wrong = not losses[-1] < losses[0] / 2
    if world > 1:
        means = [torch.empty_like(model[4].running_mean) for _ in range(world)]
        dist.all_gather(means, model[4].running_mean)
        wrong = wrong or not all(torch.equal(means[0], mean) for mean in means)
    if rank == 0:
        print(syncbn.report(model))
        print(f"{world} ranks: loss {losses[0]:.4f} at first, {losses[-1]:.4f} at last")
    if dist.is_initialized():
        dist.destroy_process_group()
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
