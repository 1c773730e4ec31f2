# SPDX-License-Identifier: Apache-2.0
"""Batch norm, addition and activation in one pass, and the in-place variant.

A residual block is trained three times from the same weights: with PyTorch's separate operators,
with the fused layer, and in place. Losses must agree, and the memory that waits for backward is
printed. Exits with 1 if something is wrong. Run it alone, or on several ranks:

    python examples/07_activation.py
    torchrun --nproc-per-node 2 examples/07_activation.py
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import syncbn

SLOPE = 0.1


class Block(nn.Module):
    """Two convolutions with a shortcut around them. make(channels, first) makes a layer."""

    def __init__(self, make) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.conv1 = nn.Conv2d(16, 16, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(16, 16, 3, padding=1, bias=False)
        self.norm1, self.norm2 = make(16, True), make(16, False)

    def forward(self, x):
        x = self.stem(x)
        return self.norm2(self.conv2(self.norm1(self.conv1(x))), x)


class Separate(syncbn.SyncBatchNorm):
    """The layer with PyTorch's addition and activation after it."""

    def forward(self, x, shortcut=None):
        y = super().forward(x)
        return F.leaky_relu(y if shortcut is None else y + shortcut, SLOPE)


def fused(channels: int, first: bool) -> nn.Module:
    return syncbn.SyncBatchNorm(channels, activation="leaky_relu", negative_slope=SLOPE)


def in_place(channels: int, first: bool) -> nn.Module:
    layer = fused(channels, first)
    layer.inplace = first  # not where a shortcut is added
    return layer


def train(make, rank: int) -> tuple[list[float], int]:
    """Losses of five steps, and the bytes that a step keeps for backward."""
    torch.manual_seed(0)
    model = Block(make)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(5):
        saved = []
        x = torch.randn(4, 3, 32, 32, generator=generator)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, saved=saved: saved.append(t) or t, lambda t: t
        ):
            loss = model(x).square().mean()
        memory = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
        held = sum(memory.values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, held


def main() -> int:
    rank = 0
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
    results = {
        "separate": train(lambda channels, first: Separate(channels), rank),
        "fused": train(fused, rank),
        "in place": train(in_place, rank),
    }
    expected = results["separate"][0]
    wrong = False
    for name, (losses, held) in results.items():
        # The forward pass is the same to rounding; five small steps let it grow a little.
        apart = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
        wrong = wrong or apart > 1e-4
        if rank == 0:
            print(f"{name:9} loss {losses[-1]:.6f}, {held / 1024:.0f} KiB kept for backward")
    wrong = wrong or not results["in place"][1] < results["fused"][1] < results["separate"][1]
    if dist.is_initialized():
        dist.destroy_process_group()
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
