# SPDX-License-Identifier: Apache-2.0
"""A network that forks at its batch normalization: train() and infer() run two branches of one
graph, which share all parameters and estimates. Exits with 1 if the result is wrong."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

from syncbn.graph import Network, batch_norm_layer

PASS_NUM = 301


def batches():
    """Points in a plane; the class is the side of a line on which they lie."""
    generator = torch.Generator().manual_seed(0)
    while True:
        points = 2 + torch.randn(32, 2, generator=generator)
        yield points, (points[:, 0] > points[:, 1]).long()


def make_network() -> Network:
    net = Network(loss=F.cross_entropy, data=batches())
    x = net.input("x")
    hidden = net.append(nn.Linear(2, 8), x, name="fc1")
    scale, bias = nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8))
    hidden = batch_norm_layer(net, hidden, scale, bias, momentum=0.9, name="bn1")
    hidden = net.append(F.relu, hidden)
    net.output(net.append(nn.Linear(8, 2), hidden, name="fc2"))
    return net


def main() -> int:
    torch.manual_seed(0)
    net = make_network()
    print(net, end="\n\n")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    test_points, test_classes = next(batches())
    correct = 0
    for pass_id in range(PASS_NUM):
        optimizer.zero_grad()
        net.train().backward()  # the training branch, on the next batch of data
        optimizer.step()
        if pass_id % 100 == 0:
            classes = net.infer(test_points).argmax(1)  # the inference branch
            correct = int((classes == test_classes).sum())
            print(f"pass {pass_id}: {correct} of {len(test_points)} points right")

    layer = net.module.bn1
    before = layer.estimated_mean.clone()
    one = net.infer(test_points[:1])  # one sample: its batch statistics would be useless
    # Matrix products of other sizes may round otherwise: some 20 roundings of 2^-24, of terms that
    # are below 50.
    independent = torch.allclose(one, net.infer(test_points)[:1], rtol=0, atol=20 * 50 * 2.0**-24)
    untouched = torch.equal(before, layer.estimated_mean) and layer.batches.item() == PASS_NUM
    print(f"inference of one sample equals that of its batch: {independent}")
    print(f"inference leaves the estimates as they are: {untouched}")
    return 0 if correct >= 26 and independent and untouched else 1


if __name__ == "__main__":
    sys.exit(main())
