# SPDX-License-Identifier: Apache-2.0
"""One process, many devices: python examples/03_devices.py [devices, default 4 | cuda]

Trains a small network on one device and on K, virtual ones on the CPU or all CUDA devices, and
compares. Exits with 1 if they differ by more than rounding.
"""

import copy
import sys

import torch
from torch import nn

import syncbn
from syncbn.parallel import SelfDataParallel

STEPS, BATCH = 20, 16


class Network(nn.Module):
    """A residual block: not a plain sequence of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.bn1, self.bn2 = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.bn1(self.stem(x)).relu()
        x = (x + self.bn2(self.conv(x))).relu()
        return self.head(x.mean((2, 3)))


def batch(step: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Stripes that run down (class 0) or across (class 1), in noise."""
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(2, (BATCH,), generator=generator)
    stripes = torch.tensor([1.0, -1.0]).repeat(4).expand(8, 8)
    x = torch.where(labels.view(-1, 1, 1) == 0, stripes, stripes.t())
    x = x + torch.randn(BATCH, 8, 8, generator=generator)
    return x.unsqueeze(1).double().to(device), labels.to(device)


def train(model: SelfDataParallel) -> list[float]:
    """The losses of all steps; one optimizer for the one copy of the parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        x, labels = batch(step, model.devices[0])
        outputs = model(x)  # one per device
        y = torch.cat([y.to(labels.device) for y in outputs])
        loss = nn.functional.cross_entropy(y, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(arguments: list[str]) -> int:
    choice = arguments[0] if arguments else "4"
    devices = None if choice == "cuda" else ["cpu"] * int(choice)
    torch.manual_seed(0)
    network = syncbn.convert_sync_batchnorm(Network().double())
    many = SelfDataParallel(network, devices)
    many.to(many.devices[0])
    one = SelfDataParallel(copy.deepcopy(many.module), many.devices[:1])

    # One layer, same input: the same bits.
    x, _ = batch(0, one.devices[0])
    layers = [syncbn.SyncBatchNorm(1, device=one.devices[0], dtype=x.dtype) for _ in range(2)]
    y = layers[0](x)
    ys = SelfDataParallel(layers[1], many.devices)(x)
    same_bits = torch.equal(torch.cat([part.to(y.device) for part in ys]), y)
    same_bits = same_bits and torch.equal(layers[0].running_var, layers[1].running_var)

    # A whole network: the same up to rounding, because convolutions add in another order.
    losses = train(one), train(many)
    difference = max(abs(a - b) for a, b in zip(*losses))
    print(f"devices:           {len(many.devices)} x {many.devices[0].type}")
    print(f"loss:              {losses[1][0]:.3f} at first, {losses[1][-1]:.3f} at last")
    print(f"a layer's bits:    {'equal' if same_bits else 'DIFFERENT'}")
    print(f"a network's loss:  differs from one device's by at most {difference:.1e}")
    # Float64: 1e-9 is 10^7 roundings, more than these steps make.
    return 0 if same_bits and difference < 1e-9 and losses[1][-1] < losses[1][0] / 2 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
