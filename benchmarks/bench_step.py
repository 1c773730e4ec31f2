"""What synchronizing costs: one layer's exchange, and a training step of the demo's network.

python benchmarks/bench_step.py [--ranks 2] [--rounds 40]

Ranks are processes of one thread each. Variants take turns within each round, so that other
programs on the machine touch all of them; medians and quartiles over the rounds.
"""

import argparse
import pathlib
import statistics
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

import syncbn

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "examples" / "segmentation"))
from network import build_network


def time_all(variants: dict, rounds: int, inner: int) -> dict:
    """Microseconds per call of each variant: (median, lower quartile, upper quartile)."""
    times = {name: [] for name in variants}
    for _ in range(rounds):
        for name, call in variants.items():
            dist.barrier()
            start = time.perf_counter()
            for _ in range(inner):
                call()
            times[name].append(1e6 * (time.perf_counter() - start) / inner)
    return {
        name: (statistics.median(t), *statistics.quantiles(t, n=4)[::2])
        for name, t in times.items()
    }


def layer_variants(channels: int) -> dict:
    layers = {
        "sync=False": syncbn.SyncBatchNorm(channels, sync=False),
        "shared memory": syncbn.SyncBatchNorm(channels),
        "gloo": syncbn.SyncBatchNorm(channels, engine="process_group"),
    }
    x = torch.randn(8, channels, 4, 4, requires_grad=True)
    variants = {}
    for name, layer in layers.items():

        def forward(layer=layer):
            with torch.no_grad():
                layer(x)

        def both(layer=layer):
            layer(x).backward(x)

        variants[f"{name}, forward"] = forward
        variants[f"{name}, forward and backward"] = both
    return variants


def step_variants(batch: int) -> dict:
    variants = {}
    for name, convert in (
        ("plain BatchNorm2d", lambda m: m),
        ("sync=False", lambda m: syncbn.convert_sync_batchnorm(m, sync=False)),
        ("shared memory", syncbn.convert_sync_batchnorm),
        ("gloo", lambda m: syncbn.convert_sync_batchnorm(m, engine="process_group")),
    ):
        torch.manual_seed(0)
        model = DistributedDataParallel(convert(build_network(11, 0)))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        pictures = torch.randn(batch, 3, 64, 64)

        def step(model=model, optimizer=optimizer, pictures=pictures):
            optimizer.zero_grad()
            model(pictures).square().mean().backward()
            optimizer.step()

        variants[name] = step
    return variants


def _rank(rank: int, ranks: int, rounds: int, folder: str, only_steps: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    for channels in () if only_steps else (64, 512, 2048):
        found = time_all(layer_variants(channels), rounds, 20)
        if rank == 0:
            print(f"\n{ranks} ranks, one layer, (8, {channels}, 4, 4) a rank: microseconds")
            for name, (median, low, high) in found.items():
                print(f"{name:38} {median:8.0f}  [{low:.0f}, {high:.0f}]")
    for batch in (1, 4, 8):
        found = time_all(step_variants(batch), rounds, 1)
        if rank == 0:
            print(f"\n{ranks} ranks, a step of the demo's network, {batch} pictures a rank: ms")
            plain = found["plain BatchNorm2d"][0]
            for name, (median, low, high) in found.items():
                print(
                    f"{name:38} {median / 1e3:8.1f}  [{low / 1e3:.1f}, {high / 1e3:.1f}]"
                    f"  {100 * (median / plain - 1):+.0f} %"
                )
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--only-steps", action="store_true", help="leave the single layers out")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(
            _rank,
            (arguments.ranks, arguments.rounds, folder, arguments.only_steps),
            nprocs=arguments.ranks,
        )


if __name__ == "__main__":
    main()
