"""What the library aims at: limits for ratios that one run of the suite measures.

A figure is a row of results with one of its ratios: over says to what, ratio has the quartiles.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

OVER = {
    "copy": "copies",
    "PyTorch": "of PyTorch's time",
    "float32": "of float32's elements a second",
    "one thread": "of one thread's speed",
    "plain": "of plain batch norm's time",
}
SPEED_UPS = ("float32", "one thread")  # of these more is better


class Target(NamedTuple):
    name: str
    over: str
    limits: dict[str, float]  # by direction
    includes: Callable[[dict], bool]  # of the figures over the same


def limits(forward: float, backward: float) -> dict[str, float]:
    return {"forward": forward, "backward": backward}


def planes(layout: str, least: int, most: float = math.inf) -> Callable[[dict], bool]:
    return lambda f: f["layout"] == layout and least <= f["plane"] <= most


def case(**fields: object) -> Callable[[dict], bool]:
    return lambda f: fields.items() <= f.items()


def is_other(f: dict) -> bool:
    """Large, and without a target of its own."""
    own = f["shape"] == "64x2048" or (f["shape"], f["memory"]) == ("4096x2048", "reused")
    return f["large"] and not own


SMALL = case(shape="8x16x8x8", layout="contiguous", dtype="float32", threads=1, memory="reused")
ONE = {"threads": 1, "memory": "reused", "large": True}
TARGETS = [
    Target(
        "contiguous, planes of 784 and more", "copy", limits(1.25, 2.0), planes("contiguous", 784)
    ),
    Target("contiguous, planes of 196", "copy", limits(1.45, 2.3), planes("contiguous", 196, 196)),
    Target("contiguous, planes of 49", "copy", limits(2.6, 3.8), planes("contiguous", 49, 49)),
    Target(
        "channels-last, planes of 784 and more",
        "copy",
        limits(1.8, 2.8),
        planes("channels-last", 784),
    ),
    Target(
        "channels-last, planes of 196", "copy", limits(1.9, 3.0), planes("channels-last", 196, 196)
    ),
    Target(
        "channels-last, planes of 49", "copy", limits(3.2, 5.0), planes("channels-last", 49, 49)
    ),
    Target("(64, 2048)", "PyTorch", limits(1.1, 1.1), case(shape="64x2048")),
    Target(
        "(4096, 2048), reused memory",
        "PyTorch",
        limits(0.9, 0.9),
        case(shape="4096x2048", memory="reused"),
    ),
    Target("every other shape of 256 KiB and more", "PyTorch", limits(0.8, 0.8), is_other),
    Target(
        "16-bit types beyond the last cache", "float32", limits(1.5, 1.5), case(beyond=True, **ONE)
    ),
    Target("16-bit types inside it", "float32", limits(1.0, 1.0), case(beyond=False, **ONE)),
    Target(
        "two threads beyond the last cache",
        "one thread",
        limits(1.7, 1.7),
        case(beyond=True, threads=2, dtype="float32", memory="reused"),
    ),
    Target("(8, 16, 8, 8), eager, one rank", "PyTorch", limits(0.9, 1.15) | {"both": 1.0}, SMALL),
    Target(
        "ResNet-20's step, 2 processes, batch 8",
        "plain",
        {"step": 1.10},
        case(network="ResNet-20", batch=8),
    ),
    Target(
        "ResNet-20's step, 2 processes, batch 32",
        "plain",
        {"step": 1.03},
        case(network="ResNet-20", batch=32),
    ),
]


def figures(results: dict) -> Iterator[dict]:
    """All ratios of a run, with what the targets ask for."""
    last_cache = max(results["machine"]["caches"].values(), default=math.inf)
    for row in results["passes"]:
        if row["pass"] in ("forward", "backward") and case(
            dtype="float32", threads=1, memory="reused"
        )(row):
            found = {"direction": row["pass"], "over": "copy", "ratio": row["times_copy"]}
            yield row | found | size_of(row, last_cache)
    for row in results["layers"]:
        for over, ratio in row["ratios"].items():
            yield row | {"over": over, "ratio": ratio} | size_of(row, last_cache)
    for row in results["steps"]:
        if row["variant"] == "syncbn, shared memory":
            yield row | {"direction": "step", "over": "plain"}


def size_of(row: dict, last_cache: float) -> dict:
    sizes = [int(size) for size in row["shape"].split("x")]
    elements = math.prod(sizes)
    return {
        "plane": math.prod(sizes[2:]),
        "large": elements * (4 if row["dtype"] == "float32" else 2) >= 2**18,
        # Input and output in float32, whatever the type: what is compared lies in one place.
        "beyond": 8 * elements > last_cache,
    }
