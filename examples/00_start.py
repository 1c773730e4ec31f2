# SPDX-License-Identifier: Apache-2.0
"""Two ranks with different pictures share their statistics:

torchrun --standalone --nproc-per-node=2 examples/00_start.py
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import syncbn

dist.init_process_group("gloo")  # torchrun says which rank this is
rank = dist.get_rank()
torch.manual_seed(rank)  # pictures of its own; DDP gives all ranks the weights of rank 0
model = torch.nn.Sequential(torch.nn.Conv2d(3, 64, 3), torch.nn.BatchNorm2d(64), torch.nn.ReLU())
model = syncbn.convert_sync_batchnorm(model)  # BatchNorm*d become synchronized
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)

x = torch.randn(2, 3, 32, 32)  # two pictures on each rank
loss = ddp(x).square().mean()
loss.backward()
optimizer.step()

if rank == 0:
    print(syncbn.report(model))
print(f"rank {rank}: {len(x)} pictures, running mean {model[1].running_mean[0]:.4f}", flush=True)
plain = syncbn.revert_sync_batchnorm(model)  # BatchNorm*d again, with the same state_dict
dist.destroy_process_group()
