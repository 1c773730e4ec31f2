# SPDX-License-Identifier: Apache-2.0
"""A model of the latency of the layer's exchange for many devices; nothing is measured here.

python benchmarks/exchange_model.py

docs/performance.md says where the constants come from. bench_exchange.cpp and bench_ranks.py
measure exchanges.
"""

import math

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


def main() -> None:
    frame = 8 * (8 + 512 * 19) / BYTES_PER_MICROSECOND  # 512 channels of float32
    print(f"Model, not measured: NCCL, 8 devices a node; a frame takes {frame:.0f} us more")
    print("devices  tree (us)  ring (us)")
    for devices in (8, 16, 128, 1024):
        print(f"{devices:7}  {tree(devices):9.1f}  {ring(devices):9.1f}")


if __name__ == "__main__":
    main()
