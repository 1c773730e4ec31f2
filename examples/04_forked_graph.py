# SPDX-License-Identifier: Apache-2.0
"""A network that forks at its batch normalization: train() and infer() run two branches of one
graph, which share all parameters and estimates. Alone, or on several ranks:

    torchrun --nproc-per-node 2 examples/04_forked_graph.py

Exits with 1 if the result is wrong, or if the ranks' estimates or outputs differ."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from syncbn.graph import Network, batch_norm_layer

PASS_NUM = 301


def batches(rank: int = 0, world: int = 1):
    """Points in a plane, of which each rank has its share; the class is the side of a line on which
    they lie."""
    generator = torch.Generator().manual_seed(0)
    while True:
        points = 2 + torch.randn(32, 2, generator=generator)[rank::world]
        yield points, (points[:, 0] > points[:, 1]).long()


def make_network(data) -> Network:
    net = Network(loss=F.cross_entropy, data=data)
    x = net.input("x")
    hidden = net.append(nn.Linear(2, 8), x, name="fc1")
    scale, bias = nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8))
    hidden = batch_norm_layer(net, hidden, "bn1", scale, bias, momentum=0.9)
    hidden = net.append(F.relu, hidden)
    net.output(net.append(nn.Linear(8, 2), hidden, name="fc2"))
    return net


def equal_on_ranks(*tensors: torch.Tensor) -> bool:
    own = torch.cat([t.flatten() for t in tensors])
    if not dist.is_initialized():
        return True
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    return all(torch.equal(other, own) for other in every)


def main() -> int:
    rank, world = 0, 1
    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = make_network(batches(rank, world))
    print(net, end="\n\n")
    train = net.train if world == 1 else DistributedDataParallel(net)  # which adds up gradients
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    test_points, test_classes = next(batches())
    correct = 0
    for pass_id in range(PASS_NUM):
        optimizer.zero_grad()
        train().backward()  # the training branch, on the next batch of data
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
    equal = equal_on_ranks(layer.estimated_mean, layer.estimated_var, one)
    print(f"inference of one sample equals that of its batch: {independent}")
    print(f"inference leaves the estimates as they are: {untouched}")
    print(f"estimates and inference are equal on {world} ranks: {equal}")
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0 if correct >= 26 and independent and untouched and equal else 1


if __name__ == "__main__":
    sys.exit(main())
