# SPDX-License-Identifier: Apache-2.0
"""Tests engine="peer_memory" on a machine with two or more GPUs, beside DDP's traffic over NCCL.

Each case runs in processes of its own, one for each GPU, and has its seconds: bits against one GPU
alone, training beside DDP against the same over NCCL, replayed graphs, a replay that is aborted, a
rank that does not come, and one that is killed. The package is to be installed, with CUDA. One JSON
in benchmarks/results, or in the folder that the variable OUT names. Exit codes: 0, 1 if anything
failed, 2 without GPUs. --rehearse runs what it can on the CPU, with engine="auto", to see that this
script works.
"""

import argparse
import datetime
import json
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import syncbn

PROJECT = Path(__file__).resolve().parent.parent
SECONDS = 60
#: Seconds that an exchange waits where one is to end so.
LIMIT = 3.0


class Rank:
    """One of the processes of a case."""

    def __init__(self, number: int, world: int, rehearsed: bool) -> None:
        self.number, self.world, self.rehearsed = number, world, rehearsed
        self.device = torch.device("cpu") if rehearsed else torch.device("cuda", number)
        self.engine = "auto" if rehearsed else "peer_memory"

    def values(self, *shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Equal on all ranks."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(shape, generator=generator).to(self.device, dtype)

    def layer(self, channels: int, **options) -> syncbn.SyncBatchNorm:
        """One that exchanges as is to be tested; after a step, so that kernels are there."""
        made = syncbn.SyncBatchNorm(channels, engine=self.engine, **options).to(self.device)
        made(self.values(2, channels, seed=self.number))
        (row,) = syncbn.report(made)
        expected = "shared memory" if self.rehearsed else "peer memory"
        assert row.engine == expected, f"exchanges over {row.engine}: {row.note}"
        return made


def case_bits(rank: Rank) -> None:
    """Uneven batches, an empty one among them, against all samples on one GPU."""
    sizes = [0, *range(3, 2 + rank.world)]
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for channels, spatial in ((3, (5, 7)), (64, (28, 28)), (4096, ())):
            layer = rank.layer(channels, affine_grad="global")
            alone = syncbn.SyncBatchNorm(channels, sync=False).to(rank.device)
            alone.load_state_dict(layer.state_dict())
            for step in range(5):
                shape = (sum(sizes), channels, *spatial)
                x, dy = (rank.values(*shape, seed=2 * step + i, dtype=dtype) for i in (0, 1))
                results = []
                for used, part in ((layer, rank.number), (alone, None)):
                    a, b = (t if part is None else t.split(sizes)[part] for t in (x, dy))
                    a = a.clone().requires_grad_()
                    used.zero_grad()
                    y = used(a)
                    y.backward(b)
                    results.append((y.detach(), a.grad))
                for own, whole in zip(*results):
                    assert torch.equal(own, whole.split(sizes)[rank.number]), (dtype, channels)
                for own, whole in zip(layer.parameters(), alone.parameters()):
                    assert torch.equal(own.grad, whole.grad), (dtype, channels)
                assert torch.equal(layer.running_var, alone.running_var), (dtype, channels)
            syncbn.check(layer)


def trained(rank: Rank, engine: str) -> list[torch.Tensor]:
    """Parameters after steps in which DDP's buckets and exchanges are under way together."""
    torch.manual_seed(0)
    blocks = [[nn.Linear(512, 512), nn.BatchNorm1d(512), nn.ReLU()] for _ in range(8)]
    model = nn.Sequential(*(part for block in blocks for part in block)).to(rank.device)
    model = syncbn.convert_sync_batchnorm(model, engine=engine)
    devices = None if rank.rehearsed else [rank.device]
    ddp = DistributedDataParallel(model, device_ids=devices, bucket_cap_mb=1)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-2)
    for step in range(5 if rank.rehearsed else 200):
        x = rank.values(32 * rank.world, 512, seed=step).chunk(rank.world)[rank.number]
        optimizer.zero_grad()
        ddp(x).square().mean().backward()
        optimizer.step()
    syncbn.check(model)
    return [p.detach() for p in model.parameters()]


def case_beside_ddp(rank: Rank) -> None:
    for own, expected in zip(trained(rank, rank.engine), trained(rank, "process_group")):
        assert torch.equal(own, expected) and not own.isnan().any()


def captured(
    layer: syncbn.SyncBatchNorm, x: torch.Tensor
) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph of a forward, and its output."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            layer(x).sum().backward()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's thread goes on
        y = layer(x)
    return graph, y


def case_graphs(rank: Rank) -> None:
    """A captured step, replayed."""
    layer, eager = rank.layer(64), rank.layer(64)
    x = rank.values(4, 64, 9, seed=rank.number).requires_grad_()
    graph, y = captured(layer, x)
    for step in range(100):
        with torch.no_grad():
            x.copy_(rank.values(4, 64, 9, seed=100 * step + rank.number))
        graph.replay()
        assert torch.equal(y, eager(x)), step
    syncbn.check(layer)


def case_a_replay_that_is_aborted(rank: Rank) -> None:
    """The last rank replays one time less. The others' replay ends in time, and all go on after
    reset_groups; the graph is of the group that was left, and gives NaN."""
    layer = rank.layer(64, timeout=LIMIT)
    x = rank.values(4, 64, 9, seed=rank.number).requires_grad_()
    before = layer(x)
    graph, y = captured(layer, x)

    def replay() -> torch.Tensor:
        graph.replay()
        return y

    assert torch.equal(replay(), before)
    if rank.number == rank.world - 1:
        time.sleep(3 * LIMIT)
        layer.state.call += 1  # it is not counted without a replay
    else:
        expect_error(layer, replay)
        assert replay().isnan().all()
        layer.state.call -= 1
    syncbn.reset_groups()
    assert torch.equal(layer(x), before)
    syncbn.check(layer)
    assert replay().isnan().all()
    assert torch.equal(layer(x), before)


def case_a_rank_that_does_not_come(rank: Rank) -> None:
    """The others hear of it in time, and all go on after reset_groups."""
    layer = rank.layer(64, timeout=LIMIT)
    x = rank.values(4, 64, seed=rank.number)
    before = layer(x)
    if rank.number == rank.world - 1:
        time.sleep(3 * LIMIT)
        layer.state.call += 0 if rank.rehearsed else 1  # it is not counted without an exchange
    else:
        expect_error(layer, lambda: layer(x))
    syncbn.reset_groups()
    assert torch.equal(layer(x), before)
    syncbn.check(layer)


def case_a_rank_that_is_killed(rank: Rank) -> None:
    layer = rank.layer(64, timeout=LIMIT)
    x = rank.values(4, 64, seed=rank.number)
    layer(x)
    if rank.number == rank.world - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    expect_error(layer, lambda: layer(x))


def expect_error(layer: syncbn.SyncBatchNorm, step: Callable[[], torch.Tensor]) -> None:
    """From a step whose last rank is missing."""
    begin = time.monotonic()
    try:
        assert step().isnan().all(), "outputs of a failed exchange are not NaN"
        syncbn.check(layer)
    except (syncbn.ExchangeTimeout, syncbn.PeerLost) as error:
        print(f"as it should be: {error}")
    else:
        raise AssertionError("no error")
    assert time.monotonic() - begin < 3 * LIMIT + 10, "late"


CASES: dict[str, Callable[[Rank], None]] = {
    name.removeprefix("case_"): case
    for name, case in list(globals().items())
    if name.startswith("case_")
}
NOT_REHEARSED = ("graphs", "a_replay_that_is_aborted")


def run_rank(number: int, world: int, rehearsed: bool, name: str, folder: str, port: int) -> None:
    path = Path(folder, str(number))
    rank = Rank(number, world, rehearsed)
    try:
        if not rehearsed:
            torch.cuda.set_device(rank.device)
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        limit = datetime.timedelta(seconds=SECONDS)
        backend = "gloo" if rehearsed else "nccl"
        dist.init_process_group(backend, store=store, rank=number, world_size=world, timeout=limit)
        CASES[name](rank)
        path.write_text("")
    except BaseException:
        path.write_text(traceback.format_exc())
    # Groups with a rank that was killed do not end by themselves.
    sys.stdout.flush()
    os._exit(0)


def run_case(name: str, world: int, rehearsed: bool) -> str:
    """What went wrong, or nothing."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # The store is this process's, which nobody kills.
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        arguments = (world, rehearsed, name, folder, port)
        ranks = [context.Process(target=run_rank, args=(r, *arguments)) for r in range(world)]
        for process in ranks:
            process.start()
        until = time.monotonic() + SECONDS
        problems = []
        for number, process in enumerate(ranks):
            process.join(max(0.0, until - time.monotonic()))
            path = Path(folder, str(number))
            if process.exitcode is None:
                process.kill()
                process.join()
                problems.append(f"rank {number}: not done within {SECONDS} s")
            elif name.endswith("killed") and number == world - 1:
                if process.exitcode != -signal.SIGKILL:
                    problems.append(f"rank {number}: was not killed")
            elif not path.exists() or path.read_text():
                text = path.read_text() if path.exists() else f"exit code {process.exitcode}"
                problems.append(f"rank {number}: {text}")
    del store
    return "\n".join(problems)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, in two processes")
    rehearsed = parser.parse_args().rehearse
    world = 2 if rehearsed else min(torch.cuda.device_count(), 16)
    if world < 2:
        print(f"peers-check: nothing was run: got {world} GPUs, expected 2 or more")
        return 2
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    device = "CPU" if rehearsed else torch.cuda.get_device_name(0)
    report: dict = {"device": device, "ranks": world, "date": date, "torch": torch.__version__}
    report["cases"] = {}
    folder = Path(os.environ.get("OUT") or PROJECT / "benchmarks" / "results")
    path = folder / f"peers-check-{device.replace(' ', '-')}-{date[:10]}.json"
    folder.mkdir(parents=True, exist_ok=True)
    for name in CASES:
        if rehearsed and name in NOT_REHEARSED:
            continue
        begin = time.monotonic()
        problem = run_case(name, world, rehearsed)
        seconds = round(time.monotonic() - begin, 1)
        report["cases"][name] = {"problem": problem, "seconds": seconds}
        path.write_text(json.dumps(report, indent=1))
        print(
            f"{name}: {'FAILED' if problem else 'ok'}, {seconds} s\n{problem}".rstrip(), flush=True
        )
    print(f"written: {path}")
    return int(any(case["problem"] for case in report["cases"].values()))


if __name__ == "__main__":
    sys.exit(main())
