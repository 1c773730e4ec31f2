# SPDX-License-Identifier: Apache-2.0
"""Memory of a training step of a ResNet-50 block: batch norm and activation apart, fused, in place.

python benchmarks/bench_memory.py [--batch 8]

Prints what lies between forward and backward (saved activations) and the peak over the step, beyond
what was there before, from the allocations that PyTorch's profiler records.
"""

import argparse

import common
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

import syncbn

SLOPE = 0.01


class Bottleneck(nn.Module):
    """256 -> 64 -> 64 -> 256 channels with the identity as shortcut, as in ResNet-50's first stage.

    norm(channels, last) makes a layer, called as norm(x), or norm(x, shortcut) if it is the last.
    """

    def __init__(self, norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(256, 64, 1, bias=False)
        self.conv2 = nn.Conv2d(64, 64, 3, padding=1, bias=False)
        self.conv3 = nn.Conv2d(64, 256, 1, bias=False)
        self.norm1, self.norm2, self.norm3 = norm(64, False), norm(64, False), norm(256, True)

    def forward(self, x):
        y = self.norm2(self.conv2(self.norm1(self.conv1(x))))
        return self.norm3(self.conv3(y), x)


class Plain(nn.Module):
    """PyTorch's batch norm, addition and leaky ReLU, each in place where PyTorch can."""

    def __init__(self, channels: int, last: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x, shortcut=None):
        y = self.norm(x)
        if shortcut is not None:
            y += shortcut
        return F.leaky_relu(y, SLOPE, inplace=True)


def fused(channels: int, last: bool) -> nn.Module:
    return syncbn.SyncBatchNorm(channels, activation="leaky_relu", negative_slope=SLOPE)


def in_place(channels: int, last: bool) -> nn.Module:
    """In place where no residual is added."""
    return syncbn.SyncBatchNorm(
        channels, activation="leaky_relu", negative_slope=SLOPE, inplace=not last
    )


def measure(norm, batch: int) -> tuple[float, float]:
    """MiB held between forward and backward, and at the peak of the step."""
    torch.manual_seed(0)
    block = Bottleneck(norm)
    x = torch.randn(batch, 256, 56, 56)

    def step(between=lambda: None):
        y = block(x * 1)  # the block's input is an activation, not a leaf
        between()
        y.backward(torch.ones_like(y))
        block.zero_grad()

    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:

        def mark():
            with torch.profiler.record_function("between"):
                pass

        step(mark)
    events = profiler.profiler.kineto_results.events()
    marked = min(e.start_ns() for e in events if e.name() == "between")
    changes = common.allocations(profiler)
    held = peak = total = 0
    for time, size in changes:
        total += size
        peak = max(peak, total)
        if time <= marked:
            held = total
    return held / 2**20, peak / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=8)
    batch = parser.parse_args().batch
    print(f"({batch}, 256, 56, 56) float32, PyTorch {torch.__version__}: MiB")
    print(f"{'':28} {'held':>8} {'peak':>8}")
    first = None
    for name, norm in (
        ("BatchNorm2d, add, leaky ReLU", Plain),
        ("fused", fused),
        ("fused, in place", in_place),
    ):
        held, peak = measure(norm, batch)
        first = first or (held, peak)
        print(f"{name:28} {held:8.1f} {peak:8.1f}  {held / first[0]:.2f} {peak / first[1]:.2f}")


if __name__ == "__main__":
    main()
