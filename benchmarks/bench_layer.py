# SPDX-License-Identifier: Apache-2.0
"""Forward and backward of one layer on one rank, against PyTorch's own batch norm.

One round has all types and both layers, each after a warm-up of its own, so that they meet the same
machine and find in the caches what their own steps leave there. Numbers of threads follow each
other: on a busy machine two threads that wait for each other would use up the time slice that one
begins with. Results are compared before they are timed. A copy of the input tells what the memory
gains from a second thread.

Both kinds of memory are forced on the C library's allocator, which otherwise mixes them: "reused"
outputs lie where earlier ones lay, "fresh" outputs in pages that the system has to hand out first.
"""

import itertools
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor

import common
import torch

import syncbn

#: glibc's tunables, which a process takes when it starts: allocations from 64 KiB on are mapped and
#: unmapped, or none is, nor given back. Small pieces that are kept apart (tcache, fast bins) would
#: keep the pieces that aligning a large allocation cuts off from growing together again, and its
#: place from being reused.
MEMORY = {
    "fresh": {"mmap_max": 2**16, "mmap_threshold": 2**16},
    "reused": {"mmap_max": 0, "trim_threshold": 2**31 - 1, "mxfast": 0, "tcache_count": 0},
}
DTYPES = ("float32", "bfloat16", "float16")
#: Where a call costs more than its elements.
SMALL = (8, 16, 8, 8)
SMALL_CALLS = 20


def measure_case(
    shape: common.Shape, layout: str, threads: tuple[int, ...], seconds: float, least: int
) -> list[dict]:
    layers, tensors, targets = {}, {}, {}
    for dtype in DTYPES:
        x, dy = tensors[dtype] = common.make(shape, getattr(torch, dtype), layout)
        ours, theirs = syncbn.SyncBatchNorm(shape[1]), common.plain_layer(shape)
        common.check_close(common.step(ours, x, dy), common.step(theirs, x, dy))
        layers[dtype] = {"syncbn": ours, "PyTorch": theirs}
        targets[dtype] = torch.empty_like(x)
    calls = range(SMALL_CALLS if shape == SMALL else 1)

    def step(take: common.Clock, number: int, dtype: str, name: str) -> None:
        (x, dy), layer = tensors[dtype], layers[dtype][name]
        inputs = [x, layer.weight, layer.bias]
        place = number, dtype, name
        outputs = take((*place, "forward"), lambda: [layer(x) for _ in calls])
        take((*place, "backward"), lambda: [torch.autograd.grad(y, inputs, dy) for y in outputs])

    def copy(take: common.Clock, number: int, dtype: str) -> None:
        x, target = tensors[dtype][0], targets[dtype]
        take((number, dtype, "copy"), lambda: [target.copy_(x) for _ in calls])

    def play(number: int, clock: common.Clock) -> None:
        for dtype in DTYPES:
            for name, take in itertools.product(layers[dtype], (common.Clock(), clock)):
                step(take, number, dtype, name)
            for take in (common.Clock(), clock):
                copy(take, number, dtype)

    clock = common.Clock()
    rounds = 0
    for number in threads:
        torch.set_num_threads(number)
        start = time.perf_counter()
        play(number, common.Clock())
        # Equally many for each number, so that they make pairs.
        spent = time.perf_counter() - start
        rounds = rounds or common.rounds_for(seconds, spent, least, 100)
        for _ in range(rounds):
            play(number, clock)
    times = {key: [t / len(calls) for t in values] for key, values in clock.times.items()}
    for place in itertools.product(threads, DTYPES, ("syncbn", "PyTorch")):
        both = zip(times[(*place, "forward")], times[(*place, "backward")])
        times[(*place, "both")] = [sum(pair) for pair in both]

    rows = []
    for number, dtype, direction in itertools.product(
        threads, DTYPES, ("forward", "backward", "both")
    ):
        ours, theirs = (times[number, dtype, n, direction] for n in ("syncbn", "PyTorch"))
        ratios = {"PyTorch": common.ratio(ours, theirs)}
        if dtype != "float32":
            ratios["float32"] = common.ratio(times[number, "float32", "syncbn", direction], ours)
        if number > 1 and 1 in threads:
            ratios["one thread"] = common.ratio(times[1, dtype, "syncbn", direction], ours)
            if direction == "both":
                copies = (times[n, dtype, "copy"] for n in (1, number))
                ratios["a copy on one thread"] = common.ratio(*copies)
        row = {"threads": number, "dtype": dtype, "direction": direction, "rounds": len(ours)}
        medians = {"syncbn": common.quartiles(ours), "PyTorch": common.quartiles(theirs)}
        rows.append(row | {"milliseconds": medians, "ratios": ratios})
    return rows


def measure_shapes(shapes: list[common.Shape], *limits: object) -> list[dict]:
    rows = []
    for shape in shapes:
        for layout in common.layouts_of(shape):
            place = {"shape": common.text_of(shape), "layout": layout}
            rows += [place | row for row in measure_case(shape, layout, *limits)]
            print(".", end="", flush=True)
    return rows


def measure_statistics(shape: common.Shape, layout: str, seconds: float, least: int) -> list[dict]:
    x, dy = common.make(shape, torch.float32, layout)
    plain = "BatchNorm, not synchronized"
    layers = {plain: common.plain_layer(shape)}
    for kind in ("reproducible", "welford"):
        layers[kind] = syncbn.SyncBatchNorm(shape[1], statistics=kind)
    expected, *others = (common.step(layer, x, dy) for layer in layers.values())
    for results in others:
        common.check_close(results, expected)

    def play(clock: common.Clock) -> None:
        for name, layer in layers.items():
            for take in (common.Clock(), clock):  # the first finds the other layer's caches
                take(name, layer, x)

    start = time.perf_counter()
    play(common.Clock())
    rounds = common.rounds_for(seconds, time.perf_counter() - start, least, 100)
    clock = common.Clock()
    for _ in range(rounds):
        play(clock)
    rows, base = [], min(clock.times[plain])
    for name, times in clock.times.items():
        row = {"shape": common.text_of(shape), "layout": layout, "variant": name, "rounds": rounds}
        figures = {"least": float(f"{min(times):.5g}"), "ratio": float(f"{min(times) / base:.5g}")}
        rows.append(row | {"milliseconds": common.quartiles(times)} | figures)
    return rows


def measure_welford(shapes: list[common.Shape], *limits: object) -> list[dict]:
    """The forward of a float32 layer on one thread, with statistics of both kinds, beside PyTorch's
    own; backward is the same for both. Other programs hardly touch the least time of all rounds."""
    torch.set_num_threads(1)
    places = [(shape, layout) for shape in shapes for layout in common.layouts_of(shape)]
    return [row for place in places for row in measure_statistics(*place, *limits)]


def measure_layers(
    shapes: list[common.Shape], threads: tuple[int, ...], seconds: float, least: int
) -> list[dict]:
    """In a process for each kind of memory."""
    rows = []
    for memory, tunables in MEMORY.items():
        os.environ["GLIBC_TUNABLES"] = ":".join(
            f"glibc.malloc.{name}={value}" for name, value in tunables.items()
        )
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            work = process.submit(measure_shapes, shapes, threads, seconds, least)
            del os.environ["GLIBC_TUNABLES"]
            rows += [{"memory": memory} | row for row in work.result()]
    return rows
