# SPDX-License-Identifier: Apache-2.0
"""Hugging Face Accelerate with synchronized batch norm:

    torchrun --nproc-per-node 2 examples/11_accelerate.py

Exits with 1 if the ranks' running statistics differ or training does not.
"""

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import syncbn


def main() -> int:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    x = torch.randn(64, 3, 8, 8)
    data = TensorDataset(x, x.mean((1, 2, 3)).gt(0).long())
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)),
    )
    model = syncbn.convert_sync_batchnorm(model)  # before prepare(), which wraps it in DDP
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = DataLoader(data, batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    losses = []
    for _ in range(5):
        for inputs, labels in loader:  # four samples on each rank
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())

    layer = accelerator.unwrap_model(model)[1]
    means = accelerator.gather(layer.running_mean[None])
    first, last = (sum(part) / 8 for part in (losses[:8], losses[-8:]))
    accelerator.print(syncbn.report(model))
    accelerator.print(
        f"{accelerator.num_processes} ranks: loss {first:.3f} at first, {last:.3f} at last"
    )
    wrong = not (means == means[0]).all() or not last < first
    accelerator.end_training()
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
