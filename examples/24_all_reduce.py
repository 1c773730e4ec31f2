# SPDX-License-Identifier: Apache-2.0
"""Batch norm as PyTorch-Encoding's tutorial builds it: sums of each device, AllReduce, normalize.

Two devices of one process, and with torchrun the devices of several ranks:

    python examples/24_all_reduce.py
    torchrun --nproc-per-node 2 examples/24_all_reduce.py

Compares outputs and gradients with the layer's. Exits with 1 if they differ by more than rounding.
"""

import os
import sys

import torch
import torch.distributed as dist

import syncbn
from syncbn.parallel import all_reduce

DEVICES, CHANNELS, EPS = 2, 6, 1e-5
AXES = (0, 2, 3)


def batch_norm(xs, weight, bias):
    """Normalizes the shares of a batch that lie on several devices, here and on other ranks."""
    sums = []
    for x in xs:
        count = torch.full_like(weight, x.numel() / x.shape[1])
        sums.append(torch.stack((count, x.sum(AXES), x.square().sum(AXES))))
    ys = []
    for x, (count, total, squares) in zip(xs, all_reduce(sums)):
        mean = total / count
        std = (squares / count - mean.square() + EPS).sqrt()
        mean, std, scale, shift = (t.view(-1, 1, 1) for t in (mean, std, weight, bias))
        ys.append((x - mean) / std * scale + shift)
    return ys


def rounding_of(x: torch.Tensor) -> tuple[float, float]:
    """What errors are at most, in units of the terms that are summed, and the least deviation.

    A sum of N terms rounds N times, by 2^-53 of the sum of their sizes. The variance is a
    difference, so its error counts k = E[x^2] / (var + eps) times as much, and each gradient is of
    up to four such terms, which are at most (1 + X)^2 k with X the largest normalized |x|. The
    largest is below 16 (N + 8) k^2 (1 + X)^2 roundings.
    """
    mean, var = x.mean(AXES), x.var(AXES, unbiased=False) + EPS
    k = (x.square().mean(AXES) / var).max().item()
    largest = ((x - mean.view(-1, 1, 1)).abs().amax(AXES) / var.sqrt()).max().item()
    n = x.numel() // x.shape[1]
    return 16 * (n + 8) * k**2 * (1 + largest) ** 2 * 2.0**-53, var.min().sqrt().item()


def main() -> int:
    rank, world = 0, 1
    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    shape = (4 * world * DEVICES + 1, CHANNELS, 5, 5)  # shares of different sizes
    x, dy = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    x += 2
    layer = syncbn.SyncBatchNorm(CHANNELS, EPS, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(torch.linspace(-1, 2, CHANNELS))
        layer.bias.copy_(torch.linspace(0, 1, CHANNELS))
    weight, bias = (p.detach().clone().requires_grad_() for p in (layer.weight, layer.bias))

    own = slice(rank * DEVICES, (rank + 1) * DEVICES)
    dys, results = dy.tensor_split(world * DEVICES)[own], []
    for call in (layer, lambda xs: batch_norm(xs, weight, bias)):
        xs = [part.clone().requires_grad_() for part in x.tensor_split(world * DEVICES)[own]]
        ys = call(xs)
        torch.autograd.backward(ys, dys)  # of all devices at once, and on all ranks
        results.append([torch.cat(ys), torch.cat([part.grad for part in xs])])
    results[0] += [layer.weight.grad, layer.bias.grad]
    results[1] += [weight.grad, bias.grad]

    unit, deviation = rounding_of(x)
    most = dy.abs().max().item()  # weights are at most 2
    bounds = (3 * unit, 2 * most / deviation * unit, *[x[:, 0].numel() * most * unit] * 2)
    right = True
    for what, a, b, bound in zip(("y", "dx", "dweight", "dbias"), *results, bounds, strict=True):
        difference = (a - b).abs().max().item()
        right = right and difference <= bound
        print(f"{what:8} differs from the layer's by {difference:.1e}, at most {bound:.1e}")
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
