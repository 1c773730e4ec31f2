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

import ctypes
import itertools
import time

import common
import torch

import syncbn

#: glibc's mallopt: allocations from 64 KiB on are mapped and unmapped, or none is, nor given back.
#: Small pieces that are kept apart (fast bins) would keep what aligning a large allocation cuts off
#: from growing together again, and its place from being reused.
TRIM_THRESHOLD, MMAP_THRESHOLD, MMAP_MAX, MXFAST = -1, -3, -4, 1
#: In this order: what the heap was given once would serve "fresh" allocations too.
MEMORY = {
    "fresh": {MMAP_MAX: 2**16, MMAP_THRESHOLD: 2**16},
    "reused": {MMAP_MAX: 0, TRIM_THRESHOLD: 2**31 - 1, MXFAST: 0},
}
DTYPES = ("float32", "bfloat16", "float16")
#: Where a call costs more than its elements.
SMALL = (8, 16, 8, 8)
SMALL_CALLS = 20


def use_memory(kind: str) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        raise SystemExit("the C library has no mallopt: it must be glibc")
    for option, value in MEMORY[kind].items():
        if mallopt(option, value) != 1:
            raise SystemExit(f"mallopt refused {option} = {value}")


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


def measure_layers(
    shapes: list[common.Shape], threads: tuple[int, ...], seconds: float, least: int
) -> list[dict]:
    """Sets the process's allocator and number of threads."""
    rows = []
    for memory, shape in itertools.product(MEMORY, shapes):
        use_memory(memory)
        for layout in common.layouts_of(shape):
            place = {"shape": common.text_of(shape), "layout": layout, "memory": memory}
            rows += [place | r for r in measure_case(shape, layout, threads, seconds, least)]
            print(".", end="", flush=True)
    return rows
