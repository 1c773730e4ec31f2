# SPDX-License-Identifier: Apache-2.0
"""What the library aims at: limits for ratios that one run of the suite measures.

A figure is a row of results with one of its ratios: over says to what, ratio has the quartiles.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

OVER = {
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


def step(network: str, batch: int, limit: float) -> Target:
    name = f"{network}'s step, 2 processes, batch {batch}"
    return Target(name, "plain", {"step": limit}, case(network=network, batch=batch))


ONE = {"threads": 1, "memory": "reused"}
NEAR = case(beyond=False, large=True, **ONE)
TWO = case(beyond=True, threads=2, memory="reused", dtype="float32")
TARGETS = [
    target("16-bit types inside the last cache", "float32", 1.0, 1.0, NEAR),
    target("two threads beyond it", "one thread", 1.7, 1.7, TWO),
    Target("a copy on two threads, to compare", "a copy on one thread", {"both": 1.7}, TWO),
    step("ResNet-20", 8, 1.10),
    step("ResNet-20", 32, 1.03),
    step("ResNet-50", 4, 1.0),
]


def figures(results: dict) -> Iterator[dict]:
    """All ratios of a run, with what the targets ask for."""
    last_cache = max(results["machine"]["caches"].values(), default=math.inf)
    for row in results["layers"]:
        for over, ratio in row["ratios"].items():
            yield row | {"over": over, "ratio": ratio} | size_of(row, last_cache)
    for row in results["steps"]:
        if row["variant"] == "syncbn, shared memory":
            yield row | {"direction": "step", "over": "plain"}


def size_of(row: dict, last_cache: float) -> dict:
    elements = math.prod(int(size) for size in row["shape"].split("x"))
    return {
        "large": elements * (4 if row["dtype"] == "float32" else 2) >= 2**18,
        # Input and output in float32, whatever the type: what is compared lies in one place.
        "beyond": 8 * elements > last_cache,
    }
