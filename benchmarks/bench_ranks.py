# SPDX-License-Identifier: Apache-2.0
"""What synchronizing a layer costs: one layer on several ranks, and the all-reduce under it.

A layer is compared with the recipe that is usually written by hand (recipe.py) and with a batch
norm that is not synchronized. Ranks are processes of one thread; each has the whole shape. They
meet at a barrier before each timing. Results of the synchronized ones are compared before that.
"""

import statistics
import time

import common
import processes
import recipe
import torch
import torch.distributed as dist

import syncbn

CHANNELS = (64, 512, 2048)
RECIPE = "recipe, Gloo"


def measure_gloo(rounds: int) -> list[dict]:
    """All-reduce of the messages of float32 layers; bench_exchange has the other engines."""
    rows = []
    for channels in CHANNELS:
        message = torch.zeros(8 + 19 * channels, dtype=torch.int64)
        times = []
        for i in range(-rounds // 10, rounds):
            start = time.perf_counter()
            dist.all_reduce(message)
            if i >= 0:
                times.append(1e6 * (time.perf_counter() - start))
        row = {"engine": "Gloo", "channels": channels, "bytes": 8 * message.numel()}
        row |= {"microseconds": common.quartiles(times)}
        rows.append(row | {"p99": statistics.quantiles(times, n=100, method="inclusive")[-1]})
    return rows


def measure_layers(shapes: list[common.Shape], seconds: float, least: int) -> list[dict]:
    recipe.check()
    rows = []
    for shape in shapes:
        torch.manual_seed(dist.get_rank())
        x, dy = common.make(shape, torch.float32, "contiguous")
        layers = {
            "BatchNorm, not synchronized": common.plain_layer(shape),
            RECIPE: recipe.RecipeSyncBatchNorm(shape[1]),
            "syncbn, Gloo": syncbn.SyncBatchNorm(shape[1], engine="process_group"),
            "syncbn, shared memory": syncbn.SyncBatchNorm(shape[1]),
        }
        expected = common.step(layers[RECIPE], x, dy)
        for name in ("syncbn, Gloo", "syncbn, shared memory"):
            common.check_close(common.step(layers[name], x, dy), expected)
        del expected

        def play(clock: common.Clock, layers=layers, x=x, dy=dy) -> None:
            for name, layer in layers.items():
                dist.barrier()
                y = clock((name, "forward"), layer, x)
                inputs = [x, layer.weight, layer.bias]
                clock((name, "backward"), torch.autograd.grad, y, inputs, dy)
                del y

        times = processes.in_turns(play, seconds, least)
        for (name, direction), values in times.items():
            row = {"shape": common.text_of(shape), "variant": name, "direction": direction}
            row |= {"rounds": len(values), "milliseconds": common.quartiles(values)}
            rows.append(row | {"ratio": common.ratio(values, times[RECIPE, direction])})
    return rows
