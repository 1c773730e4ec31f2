# SPDX-License-Identifier: Apache-2.0
"""Point clouds of 400, 50, 1 and 0 points on four ranks, which take turns.

    torchrun --standalone --nproc-per-node=4 examples/20_point_clouds.py [FIGURE.png]

A scan has points of the ground, of a wall and of a ball, with some noise. The network tells for
each point which of the three it belongs to. Numbers are float64, so that they come out the same on
other machines.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import syncbn

torch.set_default_dtype(torch.float64)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
SIZES, STEPS = (400, 50, 1, 0), 150


def say(text):
    if rank == 0:
        print(text)


def scan(seed, points):
    """Points (points, 3), and the surface that each belongs to."""
    generator = torch.Generator().manual_seed(seed)
    surface = torch.randint(3, (points,), generator=generator)
    u, v = 2 * torch.rand(2, points, generator=generator) - 1
    ground = torch.stack([u, v, 0 * u], 1)
    wall = torch.stack([u, 0 * u + 1, (v + 1) / 2], 1)
    across = (1 - v * v).sqrt()
    ball = 0.3 * torch.stack([across * (3 * u).cos(), across * (3 * u).sin(), v + 1], 1)
    clean = torch.stack([ground, wall, ball])[surface, torch.arange(points)]
    return clean + 0.02 * torch.randn(points, 3, generator=generator), surface


def new_network():
    torch.manual_seed(1)
    return nn.Sequential(
        *(nn.Linear(3, 32), nn.BatchNorm1d(32), nn.ReLU()),
        *(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU()),
        nn.Linear(32, 3),
    )


held_out = [scan(10**6 + i, 500) for i in range(20)]


def accuracy(network):
    """On held-out scans, with running statistics."""
    network.eval()
    with torch.no_grad():
        right = [(network(x).argmax(1) == s).double().mean().item() for x, s in held_out]
    network.train()
    return sum(right) / len(right)


def train(network, make_up):
    """The accuracy after every five steps. make_up: a single point gets a second one."""
    model = DistributedDataParallel(network)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    curve = []
    for step in range(STEPS):
        points, surface = scan(world * step + rank, SIZES[(rank + step) % world])
        extra = torch.zeros(int(make_up and len(points) == 1), 3)
        scores = model(torch.cat([points, extra]))[: len(points)]
        loss = nn.functional.cross_entropy(scores, surface, reduction="sum") * world / sum(SIZES)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 4:
            curve.append(accuracy(network))
    last = curve[-10:]
    say(f"accuracy at the end {curve[-1]:.3f}, {min(last):.3f} to {max(last):.3f} in 50 steps")
    return curve


plain = new_network()
for size in SIZES:
    try:
        plain(scan(0, size)[0])
        say(f"{size} points: trains")
    except ValueError as error:
        say(f"{size} points: {error}")
network = syncbn.convert_sync_batchnorm(new_network())
network(scan(rank, SIZES[rank])[0])
say(f"counted by the first synchronized layer: {syncbn.report(network)[0].count} points")
curves = {
    "plain, with made-up points": train(new_network(), make_up=True),
    "synchronized": train(syncbn.convert_sync_batchnorm(new_network()), make_up=False),
}
if rank == 0 and len(sys.argv) > 1:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
    for name, curve in curves.items():
        axes.plot(range(5, STEPS + 1, 5), curve, label=name)
    axes.set(xlabel="step", title="accuracy on held-out scans, with running statistics")
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(sys.argv[1])
dist.destroy_process_group()
