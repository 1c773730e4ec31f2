# SPDX-License-Identifier: Apache-2.0
"""What each rank on a host of its own runs; hosts.py starts them, and says what to do next by
files: `do.N` has the name of a function and its arguments, `done.N.RANK` what came of it."""

import datetime
import json
import os
import signal
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import syncbn
from host_link import DEVICE, NETWORK

PORT, CHANNELS = 29511, 5
#: Seconds that an exchange waits, and making a group.
LIMIT = 3.0
_rank = 0
_layer = None


def batch(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3 + rank, CHANNELS, generator=generator) * 1e3


def train(layer: torch.nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and gradient of a step."""
    x.requires_grad_()
    y = layer(x)
    (y.sin() * x.detach()).sum().backward()
    return y.detach(), x.grad


def do_make(folder: str, timeout: float) -> str:
    """A layer in a group of its own."""
    global _layer
    _layer = syncbn.SyncBatchNorm(CHANNELS, timeout=timeout)
    syncbn.prepare(_layer)
    return syncbn.report(_layer)[0].engine


def do_steps(folder: str, first: int, number: int) -> str:
    results = [train(_layer, batch(_rank, step)) for step in range(first, first + number)]
    torch.save((results, _layer.running_mean, _layer.running_var), f"{folder}/{first}.{_rank}.pt")
    return "passed"


def do_time(folder: str, engine: str, channels: int, steps: int) -> tuple[str, float]:
    """The engine that a layer takes, and the milliseconds of a step in the middle of all."""
    layer = syncbn.SyncBatchNorm(channels, engine=engine)
    x = torch.ones(8, channels, 4, 4)
    train(layer, x)
    took = []
    for _ in range(steps):
        began = time.perf_counter()
        train(layer, x)
        took.append(1000 * (time.perf_counter() - began))
    return syncbn.report(layer)[0].engine, statistics.median(took)


def do_reset(folder: str) -> str:
    syncbn.reset_groups()
    return "passed"


def _answer(folder: str, number: int) -> None:
    while not Path(folder, f"do.{number}").exists():
        time.sleep(0.02)
    name, *arguments = json.loads(Path(folder, f"do.{number}").read_text())
    began = time.monotonic()
    try:
        outcome, text = globals()[f"do_{name}"](folder, *arguments), ""
    except Exception as error:
        outcome, text = type(error).__name__, str(error)
    result = {"outcome": outcome, "text": text, "seconds": time.monotonic() - began}
    place = f"{folder}/done.{number}.{_rank}"
    Path(f"{place}.new").write_text(json.dumps(result))
    os.rename(f"{place}.new", f"{place}.json")


def _rank_main(rank: int, world: int, folder: str) -> None:
    global _rank
    _rank = rank
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{NETWORK}1:{PORT}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=60),
    )
    from syncbn.exchange import callers

    callers._limits[dist.group.WORLD] = LIMIT  # connecting takes longer, while all start
    for number in range(1000):
        _answer(folder, number)


def main(host: int, ranks: list[int], folder: str) -> None:
    """ranks: how many each host has."""
    while not Path(folder, "link").exists():
        time.sleep(0.02)
    first = sum(ranks[:host])
    for rank in range(first, first + ranks[host]):
        if os.fork() == 0:
            try:
                _rank_main(rank, sum(ranks), folder)
            finally:
                os._exit(1)
    signal.pause()


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3])
