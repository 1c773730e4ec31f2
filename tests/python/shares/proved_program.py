# SPDX-License-Identifier: Apache-2.0
"""A program that trains by shares, as a user writes it; its argument: what a process changes."""

import sys

import torch
import torch.distributed as dist
from torch import nn

import syncbn

if dist.is_torchelastic_launched():
    dist.init_process_group("gloo")
fault = sys.argv[1]
rank = dist.get_rank()


class Scaled(nn.Module):
    def forward(self, x):
        return x * (1 + rank) if fault == "module" else x


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        x = torch.full((4,), float(index))
        return x + rank if fault == "data" else x


torch.manual_seed(0)
network = nn.Sequential(nn.Linear(4, 8), Scaled(), nn.BatchNorm1d(8), nn.Linear(8, 1))
network = syncbn.convert_sync_batchnorm(network)
training = syncbn.Shares(network, shares=4)
optimizer = torch.optim.Adam(network.parameters())
seen = []


def loss(model, x):
    if fault == "list":
        seen.append(len(x))
    return model(x).square().mean()


for batches in training.loader(Data(), 16):
    training.step(loss, batches)
    optimizer.step()
    optimizer.zero_grad()
