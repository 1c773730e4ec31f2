"""What synchronizing a layer costs: one layer on several ranks, and the all-reduce under it.

python benchmarks/bench_ranks.py [--ranks 2 4]

A layer is compared with the recipe that is usually written by hand (recipe.py) and with a batch
norm that is not synchronized. Ranks are processes of one thread; each has the whole shape. They
meet at a barrier before each timing. Results of the synchronized ones are compared before that.
"""

import argparse
import statistics
import time
from pathlib import Path

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
                y = clock(f"{name}: forward", layer, x)
                inputs = [x, layer.weight, layer.bias]
                clock(f"{name}: backward", torch.autograd.grad, y, inputs, dy)
                del y

        times = processes.in_turns(play, seconds, least)
        base_of = {
            f"{name}: {direction}": f"{RECIPE}: {direction}"
            for name in layers
            for direction in ("forward", "backward")
        }
        rows += [{"shape": common.text_of(shape)} | r for r in common.summarize(times, base_of)]
    return rows


def table(rows: list[dict]) -> str:
    lines = []
    title = None
    for row in rows:
        if "engine" in row:
            low, median, high = row["microseconds"]
            text = f"{row['engine']} {row['bytes']:,} bytes"
            lines.append(
                f"ranks: {row['ranks']}, {text:28} {median:8.1f} [{low:.1f}, {high:.1f}] us"
            )
            continue
        if (row["ranks"], row["shape"]) != title:
            title = row["ranks"], row["shape"]
            lines.append(f"\nranks: {title[0]}, {title[1]} each: ms; times faster than the recipe")
        low, median, high = row["milliseconds"]
        lines.append(
            f"{row['variant']:38}{median:9.3f} [{low:.3f}, {high:.3f}]  {row['speedup'][1]:6.2f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--shapes", nargs="+", type=common.parse_shape, default=common.SHAPES)
    parser.add_argument("--seconds", type=float, default=1.0, help="per shape, about")
    parser.add_argument("--json", type=Path, help="write all figures there")
    arguments = parser.parse_args()
    layers = {"shapes": arguments.shapes, "seconds": arguments.seconds, "least": 5}
    rows = []
    for number in arguments.ranks:
        works = [(measure_gloo, {"rounds": 300}), (measure_layers, layers)]
        found = processes.run(number, works)
        print(table(found), flush=True)
        rows += found
    common.write_json(arguments.json, rows)


if __name__ == "__main__":
    main()
