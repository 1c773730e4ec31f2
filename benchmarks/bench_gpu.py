"""Forward and backward of one layer on one GPU, against torch.nn.BatchNorm2d,
torch.nn.SyncBatchNorm over one rank, and a copy of the input within the device.

All run in turn within each round, timed by CUDA events; medians and quartiles over the rounds. L2
is overwritten before each timing, so that every candidate reads its input from memory; where the
device is done before the host has enqueued the rest, that wait counts. Results are compared before
they are timed. Shapes: layers of ResNet-50 (batch 64, 224 x 224) and DeepLab (batch 8, 513 x 513,
output stride 16).

torch.nn.SyncBatchNorm itself turns into torch.nn.BatchNorm2d where there is one rank, so its
function is called, in an NCCL group of one rank. Ours exchanges nothing there.
"""

import argparse
import datetime
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules._functions import SyncBatchNorm as SyncFunction

import syncbn

SHAPES = {
    "ResNet-50": [
        (64, 64, 112, 112),
        (64, 64, 56, 56),
        (64, 256, 56, 56),
        (64, 512, 28, 28),
        (64, 1024, 14, 14),
        (64, 512, 7, 7),
        (64, 2048, 7, 7),
    ],
    "DeepLab": [(8, 256, 129, 129), (8, 256, 33, 33), (8, 2048, 33, 33)],
}
SYNC = "SyncBatchNorm"
DIRECTIONS = ("forward", "backward")


class OneRankSyncBatchNorm(nn.BatchNorm2d):
    """What torch.nn.SyncBatchNorm does on several ranks, on one."""

    def forward(self, x: Tensor) -> Tensor:
        running = (self.running_mean, self.running_var)
        options = (self.eps, self.momentum, dist.group.WORLD, 1)
        return SyncFunction.apply(x, self.weight, self.bias, *running, *options)


LAYERS = {
    "syncbn": syncbn.SyncBatchNorm,
    "BatchNorm2d": nn.BatchNorm2d,
    SYNC: OneRankSyncBatchNorm,
}


def step(layer: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    y = layer(x)
    return [y, *torch.autograd.grad(y, [x, layer.weight, layer.bias], dy)]


def check(layers: dict[str, nn.Module], x: Tensor, dy: Tensor) -> None:
    """y and dx within the output's rounding and PyTorch's error in float32 (about 1e-4 here)."""
    scale = 4 * torch.finfo(x.dtype).eps + 1e-4
    expected = step(layers["BatchNorm2d"], x, dy)[:2]
    for layer in layers.values():
        for a, b in zip(step(layer, x, dy)[:2], expected, strict=True):
            torch.testing.assert_close(a, b, rtol=scale, atol=scale * float(b.detach().abs().max()))


class Timer:
    """Times work on the current stream; results are read once, at the end, so that the host never
    waits between candidates."""

    def __init__(self):
        l2 = torch.cuda.get_device_properties(0).L2_cache_size
        self.flush = torch.empty(2 * max(l2, 1 << 20), dtype=torch.uint8, device="cuda")
        self.events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {}

    def record(self, name: str, function: Callable[[], object]) -> object:
        self.flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        result = function()
        end.record()
        self.events.setdefault(name, []).append((start, end))
        return result

    def microseconds(self, warm_up: int) -> dict[str, list[float]]:
        torch.cuda.synchronize()
        return {
            name: [1e3 * start.elapsed_time(end) for start, end in pairs[warm_up:]]
            for name, pairs in self.events.items()
        }


def measure(shape, dtype, layout: str, rounds: int, sync: bool) -> dict[str, list[float]]:
    """Microseconds of each round, by candidate and direction."""
    memory_format = torch.channels_last if layout == "channels-last" else torch.contiguous_format
    x = torch.randn(shape, device="cuda").to(dtype).contiguous(memory_format=memory_format)
    x.requires_grad_()
    dy, reused = torch.randn_like(x), torch.empty_like(x).detach()
    layers = {name: layer(shape[1]).cuda() for name, layer in LAYERS.items()}
    if not sync:
        del layers[SYNC]
    check(layers, x, dy)
    timer, warm_up = Timer(), 3
    for _ in range(warm_up + rounds):
        timer.record("copy", lambda: reused.copy_(x.detach()))
        for name, layer in layers.items():
            y = timer.record(f"{name} forward", lambda layer=layer: layer(x))
            wanted = [x, layer.weight, layer.bias]
            timer.record(f"{name} backward", lambda y=y, p=wanted: torch.autograd.grad(y, p, dy))
            del y
    return timer.microseconds(warm_up)


def one_rank_group() -> str:
    """For torch.nn.SyncBatchNorm. Why it cannot be measured, or nothing."""
    try:
        store = dist.FileStore(tempfile.mkstemp()[1], 1)
        limit = datetime.timedelta(seconds=30)
        dist.init_process_group("nccl", store=store, rank=0, world_size=1, timeout=limit)
        dist.all_reduce(torch.zeros(1, device="cuda"))  # the first exchange is what connects
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def quartiles(values: list[float]) -> list[float]:
    return [round(value, 3) for value in statistics.quantiles(values)]


def ratios(times: dict[str, list[float]]) -> dict[str, list[float]]:
    """Quartiles over the rounds of other / syncbn, by candidate and direction."""
    return {
        name: quartiles([b / a for a, b in zip(times[f"syncbn {direction}"], theirs, strict=True)])
        for name, theirs in times.items()
        for direction in name.split()[1:]
        if not name.startswith("syncbn")
    }


def figures(times: dict[str, list[float]]) -> dict[str, dict[str, list[float] | None]]:
    """Quartiles; None for what was not measured."""
    absent = {f"{SYNC} {d}": None for d in DIRECTIONS if f"{SYNC} {d}" not in times}
    return {
        "microseconds": {name: quartiles(v) for name, v in times.items()} | absent,
        "other / syncbn": ratios(times) | absent,
    }


def line(network, shape, dtype, layout, times) -> str:
    median = {name: statistics.median(values) for name, values in times.items()}
    faster = ratios(times)
    text = f"{network:9} {shape!s:21} {dtype:8} {layout:13} {median['copy']:7.0f}"
    for direction in DIRECTIONS:
        text += f" | {median[f'syncbn {direction}']:7.0f}"
        for other in (f"BatchNorm2d {direction}", f"{SYNC} {direction}"):
            if other not in faster:
                text += f" {'-':>7} {'':17}"
                continue
            low, middle, high = faster[other]
            text += f" {median[other]:7.0f} {middle:5.2f} [{low:4.2f},{high:5.2f}]"
    return text


def main() -> int:
    """0; 1 if a layer could not be measured for another reason than its size."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path, help="write quartiles there, layer by layer")
    arguments = parser.parse_args()

    no_sync = one_rank_group()
    if no_sync:
        print(f"torch.nn.{SYNC} is not measured: {no_sync}")
    print(
        f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, syncbn {syncbn.__version__}"
    )
    print(
        "Medians in microseconds; ratio other / syncbn with quartiles: above 1, syncbn is faster.\n"
        f"{'':9} {'shape':21} {'dtype':8} {'layout':13} {'copy':>7}"
        + "".join(
            f" | {'syncbn':>7} {'BatchNorm2d':>13} {'':11} {SYNC:>13} {'':11} ({direction})"
            for direction in DIRECTIONS
        )
    )
    results = {"not measured": {SYNC: no_sync} if no_sync else {}, "layers": []}
    failed = False
    for dtype in arguments.dtype:
        for network, shape in [(n, shape) for n, shapes in SHAPES.items() for shape in shapes]:
            for layout in ("contiguous", "channels-last"):
                layer = {"network": network, "shape": shape, "dtype": dtype, "layout": layout}
                options = (shape, getattr(torch, dtype), layout, arguments.rounds, not no_sync)
                try:
                    times = measure(*options)
                except Exception as error:  # no reason to lose the other layers
                    problem = f"{type(error).__name__}: {error}"
                    failed |= not isinstance(error, torch.OutOfMemoryError)
                    layer |= {"microseconds": None, "other / syncbn": None, "problem": problem}
                    print(f"{network:9} {shape!s:21} {dtype:8} {layout:13} {problem}", flush=True)
                else:
                    layer |= figures(times)
                    print(line(network, shape, dtype, layout, times), flush=True)
                results["layers"].append(layer)
                if arguments.json:
                    arguments.json.write_text(json.dumps(results) + "\n")
    if not no_sync:
        dist.destroy_process_group()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
