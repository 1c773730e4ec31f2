# SPDX-License-Identifier: Apache-2.0
"""A contrastive head with two pictures on each rank: plain batch norm writes the rank into a row.

    torchrun --standalone --nproc-per-node=4 examples/19_contrastive.py [FIGURE.png]

Numbers are float64, so that they come out the same on other machines.
"""

import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel

import syncbn

torch.set_default_dtype(torch.float64)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
PICTURES, STEPS = 2, 150  # pictures of a rank in a step
ROWS = 2 * PICTURES * world  # of all ranks

digits = torch.tensor(load_digits().images / 16)
numbers = torch.tensor(load_digits().target)
train, test = slice(0, 1297), slice(1297, 1797)


def say(text):
    if rank == 0:
        print(text)


def two_views(generator):
    """Two views of the pictures of a step, of all ranks: (2, pictures, 64)."""
    chosen = digits[train][torch.randint(1297, (PICTURES * world,), generator=generator)]
    shifts = torch.randint(-1, 2, (ROWS, 2), generator=generator).tolist()
    views = torch.stack([p.roll(s, (0, 1)) for p, s in zip([*chosen, *chosen], shifts)])
    return (views + 0.2 * torch.randn(views.shape, generator=generator)).reshape(2, -1, 64)


def new_network():
    torch.manual_seed(1)
    encoder = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU())
    projector = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32))
    return nn.Sequential(encoder, projector)


def project(model, views):
    """The projections of all ranks, (2, pictures, 32); each rank computes its own."""
    mine = views[:, rank * PICTURES : (rank + 1) * PICTURES]
    return torch.cat(all_gather(model(mine.flatten(0, 1)).unflatten(0, (2, -1))), 1)


def contrast(projections):
    """The loss, and how often a row's best match is the other view of its picture."""
    z = nn.functional.normalize(projections.flatten(0, 1), dim=1)
    scores = (z @ z.T / 0.2).fill_diagonal_(-torch.inf)
    partner = torch.arange(ROWS).roll(ROWS // 2)
    hits = (scores.argmax(1) == partner).double().mean()
    return nn.functional.cross_entropy(scores, partner), hits.item()


def matches_of_the_same_rank(network):
    """Of rows of noise, the share whose best match is a row of the same rank."""
    owner = torch.arange(world).repeat_interleave(PICTURES).repeat(2)
    generator, same = torch.Generator().manual_seed(0), 0.0
    with torch.no_grad():
        for _ in range(100):
            noise = torch.randn(2, PICTURES * world, 64, generator=generator)
            z = nn.functional.normalize(project(network, noise).flatten(0, 1), dim=1)
            best = (z @ z.T).fill_diagonal_(-torch.inf).argmax(1)
            same += (owner[best] == owner).double().mean().item() / 100
    return same


def neighbours(network):
    """The share of held-out digits whose nearest neighbour has the same number."""
    network.eval()
    with torch.no_grad():
        features = nn.functional.normalize(network[0](digits.flatten(1)), dim=1)
    nearest = (features[test] @ features[train].T).argmax(1)
    return (numbers[train][nearest] == numbers[test]).double().mean().item()


def train_network(network):
    """Of each step the share of rows that find the other view. Prints means of 50 steps."""
    model = DistributedDataParallel(network.train(), broadcast_buffers=False)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    losses, found = [], []
    for _ in range(STEPS):
        loss, hits = contrast(project(model, two_views(generator)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        found.append(hits)
    loss, hits = (sum(values[-50:]) / 50 for values in (losses, found))
    say(f"loss {loss:.2f}, other view found {hits:.3f}, neighbours {neighbours(network):.3f}")
    return found


by_chance = (2 * PICTURES - 1) / (ROWS - 1)
cured = syncbn.convert_sync_batchnorm(new_network())
say(f"best match of the same rank: by chance {by_chance:.3f}")
say(f"plain        {matches_of_the_same_rank(new_network()):.3f}")
say(f"synchronized {matches_of_the_same_rank(cured):.3f}")
say(f"other view found by chance {1 / (ROWS - 1):.3f}")
say(f"untrained:   neighbours {neighbours(new_network()):.3f}")
curves = {
    "plain": train_network(new_network()),
    "synchronized": train_network(syncbn.convert_sync_batchnorm(new_network())),
}
if rank == 0 and len(sys.argv) > 1:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
    for name, found in curves.items():
        axes.plot(torch.tensor(found).unfold(0, 20, 1).mean(1), label=name)
    axes.axhline(1 / (ROWS - 1), color="grey", linestyle=":", label="by chance")
    axes.set(xlabel="step", title="rows that find the other view, mean of 20 steps")
    axes.legend(frameon=False)
    figure.savefig(sys.argv[1])
dist.destroy_process_group()
