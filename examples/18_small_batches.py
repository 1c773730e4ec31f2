# SPDX-License-Identifier: Apache-2.0
"""One picture on each rank: how far apart the ranks' statistics are, plain and synchronized.

    torchrun --standalone --nproc-per-node=4 examples/18_small_batches.py

Runs on any number of ranks. The network and the pictures are those of the demo.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import syncbn

sys.path.insert(0, str(Path(__file__).parent / "segmentation"))
from data import DigitsOnPhotos
from network import build_network


def spread(network, picture):
    """Of each layer, by what factor the ranks' variances differ: the median channel."""
    network.double()
    layers = [m for m in network.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
    for layer in layers:
        layer.momentum = 1.0  # running statistics are then those of this step
    network(picture.double())
    factors = []
    for layer in layers:
        ranks = [torch.empty_like(layer.running_var) for _ in range(dist.get_world_size())]
        dist.all_gather(ranks, layer.running_var)
        variances = torch.stack(ranks)
        factors.append(round((variances.amax(0) / variances.amin(0)).median().item(), 2))
    return factors


def main():
    dist.init_process_group("gloo")
    picture, _ = DigitsOnPhotos(num_test=1).train_pictures(0, 0, dist.get_rank(), 1)
    plain = spread(build_network(11, seed=0), picture)
    shared = spread(syncbn.convert_sync_batchnorm(build_network(11, seed=0)), picture)
    if dist.get_rank() == 0:
        print("plain       ", plain)
        print("synchronized", shared)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
