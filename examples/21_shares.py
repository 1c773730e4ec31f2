# SPDX-License-Identifier: Apache-2.0
"""Whole networks with the same bits on any number of processes: python examples/21_shares.py
[--steps 20] [--changes 10] [--processes 1 2 3 4] [--networks residual unet] [--table]

With --table it prints hashes of a network on 1, 2 and 4 processes, by DDP and by shares. Otherwise
it trains each network by four shares on each number of processes, then once more while that number
changes: each time a process is killed with SIGKILL, and others go on from the last checkpoint.
Exits with 1 if the hashes of parameters, buffers, averages and optimizer states differ. With 500
steps it takes 18 minutes of a processor.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing import start_processes
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import syncbn

SHARES, BATCH, SAVED_EVERY = 4, 16, 2


def block(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
    )


class Residual(nn.Module):
    """Of the size of ResNet-20."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = block(inputs, outputs, stride), block(outputs, outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride) if stride > 1 else nn.Identity()
        self.drop = nn.Dropout2d(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.second(self.first(x))) + self.shortcut(x)


def residual() -> nn.Module:
    widths = [16, 16, 16, 16, 32, 32, 32, 64, 64, 64]
    pairs = zip(widths, widths[1:])
    blocks = [Residual(a, b, 1 if a == b else 2) for a, b in pairs]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 5)]
    return nn.Sequential(block(3, 16), *blocks, *head)


class UNet(nn.Module):
    """A class for each pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([block(3, 16), block(16, 32, 2), block(32, 64, 2)])
        self.up = nn.ModuleList(
            [nn.ConvTranspose2d(64, 32, 2, 2), nn.ConvTranspose2d(32, 16, 2, 2)]
        )
        self.join = nn.ModuleList([block(64, 32), block(32, 16)])
        self.drop, self.head = nn.Dropout2d(0.2), nn.Conv2d(16, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        seen = []
        for down in self.down:
            x = down(x)
            seen.append(x)
        for up, join, skip in zip(self.up, self.join, reversed(seen[:-1])):
            x = join(torch.cat([up(x), skip], 1))
        return self.head(self.drop(x))


class Pictures(torch.utils.data.Dataset):
    """Noise whose mean is the class, moved and mirrored at random."""

    def __len__(self) -> int:
        return 10 * BATCH

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        x = torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(index)) + index % 5
        x = x.roll(int(torch.randint(8, ())), -1)
        return (x.flip(-1) if torch.rand(()) < 0.5 else x), index % 5


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Of one share: of a picture's class, or of that of each pixel."""
    y, labels = model(batch[0]), batch[1]
    if y.dim() == 4:
        labels = labels[:, None, None].expand(-1, *y.shape[2:])
    return nn.functional.cross_entropy(y, labels)


def train(name: str, steps: int, folder: Path, dies_at: int) -> None:
    """What each process does."""
    torch.manual_seed(0)
    network = syncbn.convert_sync_batchnorm(UNet() if name == "unet" else residual())
    training = syncbn.Shares(network, SHARES, seed=1)
    average = AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    parts = {"training": training, "average": average, "optimizer": optimizer}
    loader = training.loader(Pictures(), BATCH)
    parts["loader"] = loader
    checkpoint = folder / "checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint)
        for key, part in parts.items():
            part.load_state_dict(state[key])
    if 0 in training.mine:
        world = dist.get_world_size() if dist.is_initialized() else 1
        with open(folder / "ran", "a") as file:
            print(world, "from step", training.steps, file=file)
    while training.steps < steps:
        for batches in loader:
            if training.steps == dies_at and SHARES - 1 in training.mine:
                os.kill(os.getpid(), signal.SIGKILL)
            training.step(loss, batches)
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(network)
            if 0 in training.mine and training.steps % SAVED_EVERY == 0:
                torch.save({k: part.state_dict() for k, part in parts.items()}, f"{checkpoint}.new")
                os.replace(f"{checkpoint}.new", checkpoint)
            if training.steps == steps:
                break
    if 0 in training.mine:
        (folder / "hash").write_text(syncbn.fingerprint(network, average, optimizer))


def train_for_table(rank: int, world: int, way: str, port: int, folder: Path) -> None:
    """What each process does. Only the first parameters and the dataset are random."""
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
    torch.manual_seed(0)
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 5)]
    network = nn.Sequential(block(3, 16), block(16, 32, 2), *head)
    network = syncbn.convert_sync_batchnorm(network)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    dataset = TensorDataset(torch.randn(8 * 16, 3, 32, 32), torch.arange(8 * 16) % 5)
    if way == "Shares":
        training = syncbn.Shares(network, shares=4, seed=0)
        for batches in training.loader(dataset, batch_size=16):
            training.step(loss, batches)  # forward and backward of this process's shares
            optimizer.step()
            optimizer.zero_grad()
    else:
        ddp = DistributedDataParallel(network)
        samples = DistributedSampler(dataset, shuffle=False)
        for batch in DataLoader(dataset, 16 // world, sampler=samples):
            loss(ddp, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    if rank == 0:
        (folder / "hash").write_text(syncbn.fingerprint(network, optimizer))
    dist.destroy_process_group()


def table() -> bool:
    """Prints the hashes. Returns whether those of Shares are equal."""
    print(f"{'':6}  {'1 process':12}  {'2 processes':12}  4 processes")
    for way in ("DDP", "Shares"):
        hashes = []
        for world in (1, 2, 4):
            with socket.create_server(("127.0.0.1", 0)) as unused:
                port = unused.getsockname()[1]
            with tempfile.TemporaryDirectory() as directory:
                arguments = (world, way, port, Path(directory))
                start_processes(train_for_table, arguments, world, start_method="fork")
                hashes.append((Path(directory) / "hash").read_text()[:12])
        print(f"{way:6}  {'  '.join(hashes)}", flush=True)
    return len(set(hashes)) == 1


def start(processes: int, name: str, steps: int, folder: Path, dies_at: int = -1) -> bool:
    """Runs train() on so many processes. Returns whether they came to the end."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    arguments = [__file__, "--worker", name, str(steps), str(folder), str(dies_at)]
    done = subprocess.run(
        [*launcher, f"--nproc-per-node={processes}", *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stderr=None if dies_at < 0 else subprocess.DEVNULL,  # torchrun tells of the kill
    )
    return done.returncode == 0


def changing(choices: list[int], changes: int, name: str, steps: int, folder: Path) -> None:
    """Trains while the number of processes changes."""
    for i in range(changes):
        dies_at = steps * (i + 1) // (changes + 1)
        if start(choices[-1 - i % len(choices)], name, steps, folder, dies_at):
            raise SystemExit(f"the processes were to be killed at step {dies_at}, and were not")
    start(choices[0], name, steps, folder)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--changes", type=int, default=10)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--networks", nargs="+", default=["residual", "unet"])
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        name, steps, folder, dies_at = given.worker
        if int(os.environ["WORLD_SIZE"]) > 1:
            dist.init_process_group("gloo")
        train(name, int(steps), Path(folder), int(dies_at))
        if dist.is_initialized():
            dist.destroy_process_group()
        return 0
    if given.table:
        return 0 if table() else 1
    equal = True
    for name in given.networks:
        hashes = set()
        for processes in [*given.processes, 0]:
            with tempfile.TemporaryDirectory() as directory:
                folder = Path(directory)
                if processes:
                    start(processes, name, given.steps, folder)
                else:
                    changing(given.processes, given.changes, name, given.steps, folder)
                found = (folder / "hash").read_text()
                ran = ", ".join((folder / "ran").read_text().splitlines())
            hashes.add(found)
            print(f"{name} on {ran}: {found}", flush=True)
        equal = equal and len(hashes) == 1
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
