"""Latency of the layer's exchange, measured over Gloo and estimated for many devices.

python benchmarks/bench_exchange.py [--ranks 2 4] [--rounds 300]

The first table is measured here. The second is a model with published constants and no
measurement: docs/performance.md says where they come from.
"""

import argparse
import math
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

#: int64 words of a message: the header alone, 64 channels of float32, the frame (512 channels).
WORDS = {"header": 4, "64 channels": 4 + 64 * 19, "frame": 4 + 512 * 19}

#: Microseconds, from NCCL's tuning model for all-reduce with its low-latency protocol.
BASE = {"tree": 6.8, "ring": 6.6}
NVLINK = {"tree": 0.6, "ring": 0.6}
NETWORK = {"tree": 5.0, "ring": 2.7}
NETWORK_POST = 1.0  # what a ring's step inside a node costs at least, across nodes
BYTES_PER_MICROSECOND = 6100.0


def tree(devices: int, per_node: int = 8) -> float:
    """Latency in microseconds: a chain inside each node, a tree between nodes, up and down."""
    nodes = max(1, devices // per_node)
    inside = devices // nodes - 1
    return BASE["tree"] + 2 * (inside * NVLINK["tree"] + math.log2(nodes) * NETWORK["tree"])


def ring(devices: int, per_node: int = 8) -> float:
    """Latency in microseconds: 2 (devices - 1) steps one after the other."""
    nodes = max(1, devices // per_node)
    between = 2 * (nodes - 1)
    inside = NVLINK["ring"] if nodes == 1 else max(NVLINK["ring"], NETWORK_POST)
    return BASE["ring"] + (2 * (devices - 1) - between) * inside + between * NETWORK["ring"]


def _rank(rank: int, ranks: int, rounds: int, store: str, results) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    for name, words in WORDS.items():
        message = torch.zeros(words, dtype=torch.int64)
        times = []
        for _ in range(rounds + 20):
            start = time.perf_counter()
            dist.all_reduce(message)
            times.append(1e6 * (time.perf_counter() - start))
        if rank == 0:
            quarters = statistics.quantiles(times[20:], n=4)
            results.put((name, words, *quarters))
    dist.destroy_process_group()


def measure(ranks: int, rounds: int) -> None:
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (ranks, rounds, f"{folder}/store", results), nprocs=ranks)
    for _ in WORDS:
        name, words, low, median, high = results.get()
        print(f"{ranks:5}  {name:12} {8 * words:8}  {median:8.0f}  [{low:.0f}, {high:.0f}]")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=300)
    arguments = parser.parse_args()

    print("Measured: all-reduce of int64 over Gloo, this machine, microseconds")
    print("ranks  message         bytes    median  [quartiles]")
    for ranks in arguments.ranks:
        measure(ranks, arguments.rounds)

    frame = 8 * WORDS["frame"] / BYTES_PER_MICROSECOND
    print(f"\nModel, not measured: NCCL, 8 devices a node; a frame takes {frame:.0f} us more")
    print("devices  tree (us)  ring (us)")
    for devices in (8, 16, 128, 1024):
        print(f"{devices:7}  {tree(devices):9.1f}  {ring(devices):9.1f}")


if __name__ == "__main__":
    main()
