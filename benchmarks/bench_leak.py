# SPDX-License-Identifier: Apache-2.0
"""Memory of a process over many training steps: does it grow?

python benchmarks/bench_leak.py [--steps 10000] [--ranks 1 2]

A network of three synchronized layers is trained plainly and with activation checkpointing in both
forms. Prints resident memory and the number of live tensors and Python objects of rank 0 after the
first tenth of the steps and after each further three tenths.
"""

import argparse
import gc
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.utils.checkpoint import checkpoint

import syncbn

FORMS = {"plain": None, "non-reentrant": False, "reentrant": True}


def resident_kib() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))


def state() -> tuple[float, int, int]:
    """Resident memory in MiB, live tensors, live objects."""
    gc.collect()
    objects = gc.get_objects()
    # By type: isinstance would wake lazy modules.
    tensors = sum(issubclass(type(o), torch.Tensor) for o in objects)
    return resident_kib() / 1024, tensors, len(objects)


def train(form: bool | None, steps: int, rank: int) -> list[tuple[float, int, int]]:
    torch.manual_seed(rank)
    layers = [m for _ in range(3) for m in (nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16), nn.ReLU())]
    net = syncbn.convert_sync_batchnorm(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    marks = [steps // 10, steps * 4 // 10, steps * 7 // 10, steps]
    found = []
    for step in range(1, steps + 1):
        # Sizes change, as in an epoch's last batch.
        x = torch.randn(2 + step % 3, 16, 8, 8)
        y = net(x) if form is None else checkpoint(net, x.requires_grad_(), use_reentrant=form)
        optimizer.zero_grad()
        y.square().mean().backward()
        optimizer.step()
        del x, y
        if step in marks:
            found.append(state())
    return found


def run(rank: int, ranks: int, port: int, steps: int) -> None:
    torch.set_num_threads(1)
    if ranks > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        dist.init_process_group("gloo", rank=rank, world_size=ranks)
    for name, form in FORMS.items():
        found = train(form, steps, rank)
        if rank == 0:
            columns = [f"{mib:8.1f} {tensors:5} {objects:7}" for mib, tensors, objects in found]
            print(f"{ranks:5} {name:14} {'  '.join(columns)}", flush=True)
    if ranks > 1:
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    arguments = parser.parse_args()
    print(f"PyTorch {torch.__version__}; MiB, live tensors, live objects at 10, 40, 70 and 100 %")
    print(f"of {arguments.steps} steps\nranks")
    for ranks in arguments.ranks:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        mp.spawn(run, (ranks, port, arguments.steps), nprocs=ranks)


if __name__ == "__main__":
    main()
