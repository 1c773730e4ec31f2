# SPDX-License-Identifier: Apache-2.0
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
    "a copy on one thread": "of one thread's speed",
    "plain": "of plain batch norm's time",
}
SPEED_UPS = ("float32", "one thread", "a copy on one thread")  # of these more is better


def case(**fields: object) -> Callable[[dict], bool]:
    return lambda f: fields.items() <= f.items()


class Target(NamedTuple):
    name: str
    over: str
    limits: dict[str, float]  # by direction
    includes: Callable[[dict], bool]  # of the figures over the same


def target(name: str, over: str, forward: float, backward: float, includes: Callable) -> Target:
    return Target(name, over, {"forward": forward, "backward": backward}, includes)


def copies(layout: str, planes: str, forward: float, backward: float) -> Target:
    """planes: a number of elements, or "... and more"."""
    least, more = int(planes.split()[0]), planes.endswith("more")
    return target(
        f"{layout}, planes of {planes}",
        "copy",
        forward,
        backward,
        lambda f: f["layout"] == layout and (f["plane"] >= least if more else f["plane"] == least),
    )


def step(network: str, batch: int, limit: float) -> Target:
    name = f"{network}'s step, 2 processes, batch {batch}"
    return Target(name, "plain", {"step": limit}, case(network=network, batch=batch))


def is_other(f: dict) -> bool:
    """Large, and without a target of its own."""
    return f["large"] and not ROWS(f) and not MANY_ROWS(f)


ROWS, MANY_ROWS = case(shape="64x2048"), case(shape="4096x2048", memory="reused")
ONE = {"threads": 1, "memory": "reused"}
NEAR, FAR = case(beyond=False, large=True, **ONE), case(beyond=True, **ONE)
TWO = case(beyond=True, threads=2, memory="reused", dtype="float32")
SMALL = case(shape="8x16x8x8", layout="contiguous", dtype="float32", **ONE)
TARGETS = [
    copies("contiguous", "784 and more", 1.25, 2.0),
    copies("contiguous", "196", 1.45, 2.3),
    copies("contiguous", "49", 2.6, 3.8),
    copies("channels-last", "784 and more", 1.8, 2.8),
    copies("channels-last", "196", 1.9, 3.0),
    copies("channels-last", "49", 3.2, 5.0),
    target("(64, 2048)", "PyTorch", 1.1, 1.1, ROWS),
    target("(4096, 2048), reused memory", "PyTorch", 0.9, 0.9, MANY_ROWS),
    target("every other shape of 256 KiB and more", "PyTorch", 0.8, 0.8, is_other),
    target("16-bit types beyond the last cache", "float32", 1.5, 1.5, FAR),
    target("16-bit types inside it", "float32", 1.0, 1.0, NEAR),
    target("two threads beyond the last cache", "one thread", 1.7, 1.7, TWO),
    Target("a copy on two threads, to compare", "a copy on one thread", {"both": 1.7}, TWO),
    target("(8, 16, 8, 8), eager, one rank", "PyTorch", 0.9, 1.15, SMALL),
    Target("(8, 16, 8, 8), eager, one rank", "PyTorch", {"both": 1.0}, SMALL),
    step("ResNet-20", 8, 1.10),
    step("ResNet-20", 32, 1.03),
    step("ResNet-50", 4, 1.0),
    step("ResNet-50, channels-last", 4, 1.0),
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
