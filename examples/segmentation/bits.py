# SPDX-License-Identifier: Apache-2.0
"""Are the first layer's results the same bits on K ranks and on one? For identical inputs.

The inputs are those of the network's first batch norm layer at step 0: x, the output of the first
convolution for the global batch, and dy, the gradient that reached the layer's output. Both are
made once, by one process. (Convolutions and a loss that is averaged per rank may change bits
with the batch size; so identical inputs have to be handed out, not computed on every rank.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import syncbn
from data import Source
from network import build_network, pixel_loss
from train import Plan

QUANTITIES = ("mean", "variance", "output", "input gradient")


@dataclass
class Case:
    """x and dy are (global batch, C, H, W); weight and bias are (C,)."""

    x: Tensor
    dy: Tensor
    weight: Tensor
    bias: Tensor


@dataclass
class Comparison:
    """How many of a quantity's numbers differ, and by how much at most."""

    quantity: str
    numbers: int
    differing: int
    largest: float


def make_case(plan: Plan, source: Source) -> Case:
    """The first layer's inputs at step 0, from one backward pass with the whole batch."""
    network = build_network(source.num_classes, plan.seed)
    kept: dict[str, Tensor] = {}

    def keep(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        output.retain_grad()
        kept.update(x=inputs[0].detach(), y=output)

    network.norm1.register_forward_hook(keep)
    pictures, labels = source.train_pictures(plan.seed, 0, 0, plan.global_batch)
    pixel_loss(network(pictures), labels, source.class_weights).backward()
    channels = kept["x"].shape[1]
    # A fresh layer's weight and bias are 1 and 0, which would leave out part of the arithmetic.
    weight, bias = torch.linspace(0.5, 1.5, channels), torch.linspace(-0.5, 0.5, channels)
    return Case(kept["x"], kept["y"].grad, weight, bias)


def run_layer(case: Case, first: int, count: int, device: torch.device) -> dict[str, Tensor]:
    """A fresh layer on samples first..first+count-1, with the ranks of the process group if any.

    With a momentum of 1 the running statistics are this batch's.
    """
    layer = syncbn.SyncBatchNorm(case.x.shape[1], momentum=1.0).to(device)
    with torch.no_grad():
        layer.weight.copy_(case.weight)
        layer.bias.copy_(case.bias)
    x = case.x[first : first + count].to(device).requires_grad_()
    y = layer(x)
    (dx,) = torch.autograd.grad(y, x, case.dy[first : first + count].to(device))
    results = (layer.running_mean, layer.running_var, y, dx)
    return {name: value.detach().cpu() for name, value in zip(QUANTITIES, results)}


def compare(parts: list[dict[str, Tensor]], whole: dict[str, Tensor]) -> list[Comparison]:
    """The ranks' results, in rank order, against those of one rank."""
    rows = []
    for quantity in QUANTITIES:
        expected = whole[quantity]
        if quantity in ("mean", "variance"):  # every rank has all of it
            got = torch.stack([part[quantity] for part in parts])
            expected = expected.expand_as(got)
        else:  # every rank has its samples
            got = torch.cat([part[quantity] for part in parts])
        rows.append(_compare(quantity, got, expected))
    return rows


def ordinary_merge(case: Case, ranks: int) -> Comparison:
    """The variances of the same x, from float32 statistics of each rank merged in float32.

    A control: what one gets without care, split over ranks against not split.
    """
    parts = [torch.var_mean(part, (0, 2, 3), correction=0) for part in case.x.chunk(ranks)]
    variances, means = (torch.stack(values) for values in zip(*parts))
    merged = variances.mean(0) + means.var(0, correction=0)
    return _compare("variance", merged, case.x.var((0, 2, 3), correction=0))


def _compare(quantity: str, got: Tensor, expected: Tensor) -> Comparison:
    same = got.contiguous().view(torch.int32) == expected.contiguous().view(torch.int32)
    largest = (got - expected).abs().max()
    return Comparison(quantity, same.numel(), int((~same).sum()), float(largest))
