# SPDX-License-Identifier: Apache-2.0
"""A training job for test_elastic.py, started by torchrun: in the first incarnation rank 1 is
killed in the middle of a step."""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import syncbn

STEPS = 8


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, incarnation = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU())
    model = DistributedDataParallel(syncbn.convert_sync_batchnorm(model, timeout=300))
    (row,) = syncbn.report(model)
    (folder / f"started.{incarnation}.{rank}").write_text(f"{os.getpid()} {row.engine}")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + rank)
        y = model(torch.randn(2, 3, 6, 6, generator=generator))
        if incarnation == 0 and rank == 1 and step == STEPS // 2:
            os.kill(os.getpid(), signal.SIGKILL)  # between forward and backward
        optimizer.zero_grad()
        y.square().mean().backward()
        optimizer.step()
    torch.save(model.module.state_dict(), folder / f"finished.{incarnation}.{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
