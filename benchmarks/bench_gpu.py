# SPDX-License-Identifier: Apache-2.0
"""The kernels of a layer one by one, and the layer, on one GPU: beside a copy of the input within
the device, torch.nn.BatchNorm and torch.nn.SyncBatchNorm over one rank.

Times are of replays of a CUDA graph of many calls, where no host is in the way; "eager" ones are of
calls as a host makes them, forward and backward. The calls take turns over so many inputs that no
input is still in L2 (but where that would take more than 128). The operators hold more than one
kernel: those whose names have a difference are measured whole and without the other kernel.
Results are compared before they are timed.

torch.nn.SyncBatchNorm itself turns into torch.nn.BatchNorm where there is one rank, so its function
is called, in an NCCL group of one rank. Ours exchanges nothing there.
"""

import argparse
import datetime
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import gpu_timing
import torch
import torch.distributed as dist
from gpu_timing import Work
from torch import Tensor, nn
from torch.nn.modules._functions import SyncBatchNorm as SyncFunction

import syncbn
from syncbn import operators_cuda
from syncbn.operators import ops

Shape = tuple[int, ...]
#: The most telling first: the time may not be enough for all.
SHAPES: dict[str, list[Shape]] = {
    "ResNet-50": [(64, 256, 56, 56), (32, 2048, 7, 7)],
    "2-D": [(64, 2048)],
    "DeepLab": [(8, 256, 129, 129), (8, 256, 33, 33)],
    "ResNet-50, others": [
        *((64, 64, 112, 112), (64, 64, 56, 56), (64, 512, 28, 28), (64, 1024, 14, 14)),
    ],
    "small": [(8, 64, 56, 56), (16, 512, 14, 14)],
}
#: Whose kernels are named by the profiler, too.
PROFILED = ((64, 256, 56, 56), (32, 2048, 7, 7), (64, 2048))
SYNC = "SyncBatchNorm"
DIRECTIONS = ("forward", "backward")
EPS = 1e-5
MOST_INPUTS = 128
PROFILER_SECONDS = 12


class OneRankSyncBatchNorm(nn.BatchNorm2d):
    """What torch.nn.SyncBatchNorm does on several ranks, on one."""

    def forward(self, x: Tensor) -> Tensor:
        running = (self.running_mean, self.running_var)
        options = (self.eps, self.momentum, dist.group.WORLD, 1)
        return SyncFunction.apply(x, self.weight, self.bias, *running, *options)


def layers_for(shape: Shape) -> dict[str, nn.Module]:
    plain = nn.BatchNorm1d if len(shape) == 2 else nn.BatchNorm2d
    made = {"syncbn": syncbn.SyncBatchNorm, "BatchNorm": plain, SYNC: OneRankSyncBatchNorm}
    return {name: layer(shape[1]).cuda() for name, layer in made.items()}


class Inputs:
    """As many pairs of x and dy as do not fit into L2."""

    def __init__(self, shape: Shape, dtype: torch.dtype, layout: str):
        last = layout == "channels-last"
        form = torch.channels_last if last else torch.contiguous_format
        l2 = torch.cuda.get_device_properties(0).L2_cache_size
        self.bytes = math.prod(shape) * dtype.itemsize
        count = min(MOST_INPUTS, math.ceil(2 * l2 / self.bytes))
        self.beyond_l2 = count * self.bytes >= 2 * l2
        xs = [torch.randn(shape, device="cuda").to(dtype) for _ in range(count)]
        self.xs = [x.contiguous(memory_format=form).requires_grad_() for x in xs]
        self.dys = [torch.randn_like(x) for x in self.xs]
        self.calls = max(20, count)

    def x(self, i: int) -> Tensor:
        return self.xs[i % len(self.xs)]

    def dy(self, i: int) -> Tensor:
        return self.dys[i % len(self.dys)]


def step(layer: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    y = layer(x)
    return [y, *torch.autograd.grad(y, [x, layer.weight, layer.bias], dy)]


def check(layers: dict[str, nn.Module], x: Tensor, dy: Tensor) -> None:
    """y and dx within the output's rounding and PyTorch's error in float32 (about 1e-4 here)."""
    scale = 4 * torch.finfo(x.dtype).eps + 1e-4
    expected = step(layers["BatchNorm"], x, dy)[:2]
    for layer in layers.values():
        for a, b in zip(step(layer, x, dy)[:2], expected, strict=True):
            torch.testing.assert_close(a, b, rtol=scale, atol=scale * float(b.detach().abs().max()))


@torch.no_grad()
def kernels(inputs: Inputs, layer: nn.Module) -> dict[str, tuple[Work, int]]:
    """The layer's operators, each with the bytes that it has to move."""
    if inputs.x(0).is_cuda:
        operators_cuda.load()
    xs, dys = [x.detach() for x in inputs.xs], inputs.dys
    x, dy, weight, bias = xs[0], dys[0], layer.weight, layer.bias
    none, channels = (None, None, 0, 0.0), x.shape[1]

    def sums(i):
        return ops.local_moments(xs[i % len(xs)], 0, None, EPS, 0, None)

    def normalize(x):
        options = (None, weight, bias, None, EPS, 1, 0, 0.0, None)
        return ops.normalize(x, message, message, *options)

    def gradient_sums(i):
        x, dy = xs[i % len(xs)], dys[i % len(xs)]
        return ops.local_gradients(dy, x, mean, rstd, info, weight, *none, False, 0, None)

    def input_gradient(x, dy):
        of_parameters = (weight.dtype, bias.dtype, 1, None, None)
        statistics = (mean, rstd, info, weight, *none)
        return ops.input_gradient(dy, x, gradients, None, *statistics, *of_parameters)

    def update(i):
        counters = (layer.num_batches_tracked, None)
        running = (layer.running_mean, layer.running_var)
        ops.update_running_statistics(*running, *counters, mean, var, info, 0.1)

    message = sums(0)
    _, mean, var, rstd, info, _ = normalize(x)
    gradients, _ = gradient_sums(0)
    # Without samples the operators finalize alone.
    size, words = inputs.bytes, 8 * message.numel()
    return {
        "sums": (sums, size),
        "finalize": (lambda i: normalize(x[:0]), words + 24 * channels),
        "finalize + normalize": (lambda i: normalize(xs[i % len(xs)]), 2 * size),
        "running statistics": (update, 32 * channels),
        "backward sums": (gradient_sums, 2 * size),
        "backward finalize": (lambda i: input_gradient(x[:0], dy[:0]), words + 32 * channels),
        "backward finalize + input gradient": (
            lambda i: input_gradient(xs[i % len(xs)], dys[i % len(xs)]),
            3 * size,
        ),
    }


DIFFERENCES = {
    "normalize": ("finalize + normalize", "finalize"),
    "input gradient": ("backward finalize + input gradient", "backward finalize"),
}


def works(inputs: Inputs, layers: dict[str, nn.Module]) -> Iterator[tuple[str, Work, int]]:
    """What is timed in graphs: name, work and the bytes that it has to move. The copy first. Layers
    count as in three kernels: one that reads x once may seem faster than the copy."""
    target = torch.empty_like(inputs.xs[0]).detach()
    yield "copy", lambda i: target.copy_(inputs.x(i).detach()), 2 * inputs.bytes
    for name, (work, moved) in kernels(inputs, layers["syncbn"]).items():
        yield name, work, moved
    for name, layer in layers.items():
        yield f"{name} forward", lambda i, layer=layer: layer(inputs.x(i)), 3 * inputs.bytes
        ys = [layer(x) for x in inputs.xs]

        def backward(i, ys=ys, layer=layer):
            wanted = [inputs.x(i), layer.weight, layer.bias]
            torch.autograd.grad(ys[i % len(ys)], wanted, inputs.dy(i), retain_graph=True)

        yield f"{name} backward", backward, 5 * inputs.bytes


def no_row(problem: str) -> dict[str, object]:
    return {"us": None, "problem": problem}


def text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]


def differences(rows: dict[str, dict], moved: dict[str, int], copied: float | None) -> None:
    for name, (whole, part) in DIFFERENCES.items():
        a, b = (rows.get(key, {}).get("us") for key in (whole, part))
        if a is None or b is None:
            rows[name] = no_row(f"{whole!r} or {part!r} was not measured")
        else:
            rates = gpu_timing.rates(a - b, moved[whole], copied)
            rows[name] = {"us": round(a - b, 3), "difference": True, **rates}


def measure(shape: Shape, dtype: torch.dtype, layout: str, no_sync: str) -> dict[str, object]:
    """Rows of graphs and of eager steps; null and why where one was not measured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    rows, moved, copied = {}, {}, None
    with torch.cuda.stream(stream):
        inputs, layers = Inputs(shape, dtype, layout), layers_for(shape)
        if no_sync:
            del layers[SYNC]
        check(layers, inputs.x(0), inputs.dy(0))
        for name, work, moved[name] in works(inputs, layers):
            try:
                times = gpu_timing.graph_times(work, inputs.calls, stream)
            except Exception as error:
                rows[name] = no_row(text_of(error))
                continue
            rows[name] = gpu_timing.row(times, moved[name], copied)
            if name == "copy":
                copied = moved[name] / rows[name]["us"]
        eager = {}
        for name, layer in layers.items():
            work = lambda i, layer=layer: step(layer, inputs.x(i), inputs.dy(i))  # noqa: E731
            times = gpu_timing.eager_times(work, 20, stream)
            eager[name] = gpu_timing.row(times, 8 * inputs.bytes, copied)
    differences(rows, moved, copied)
    if no_sync:
        rows |= {f"{SYNC} {d}": no_row(no_sync) for d in DIRECTIONS}
        eager[SYNC] = no_row(no_sync)
    return {"beyond L2": inputs.beyond_l2, "graph": rows, "eager": eager}


def one_rank_group() -> str:
    """For torch.nn.SyncBatchNorm. Why it cannot be measured, or nothing."""
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    try:
        store = dist.FileStore(tempfile.mkstemp()[1], 1)
        limit = datetime.timedelta(seconds=30)
        dist.init_process_group("nccl", store=store, rank=0, world_size=1, timeout=limit)
        dist.all_reduce(torch.zeros(1, device="cuda"))  # the first exchange is what connects
        torch.cuda.synchronize()
    except Exception as error:
        return text_of(error)
    return ""


def profiled(shape: Shape, dtype: torch.dtype, layout: str) -> dict[str, object]:
    """The kernels of a step by name, or why they are not known."""
    try:
        inputs, layer = Inputs(shape, dtype, layout), syncbn.SyncBatchNorm(shape[1]).cuda()
        work = lambda i: step(layer, inputs.x(i), inputs.dy(i))  # noqa: E731
        work(0)
        named = gpu_timing.kernel_times(work, 5)
    except Exception as error:
        return {"kernels": None, "problem": text_of(error)}
    return {"kernels": named} if named else {"kernels": None, "problem": "the profiler saw none"}


def text(layer: dict) -> str:
    """A layer's table."""
    head = f"{layer['network']} {layer['shape']} {layer['dtype']} {layer['layout']}"
    if problem := layer.get("problem"):
        return f"{head}: {problem}"
    lines = [f"{head}{'' if layer['beyond L2'] else ' (in L2)'}"]
    for kind in ("graph", "eager"):
        for name, row in layer[kind].items():
            title = f"  {name if kind == 'graph' else f'{name}, eager step':36}"
            if row["us"] is None:
                lines.append(f"{title} not measured: {row['problem']}")
                continue
            line = f"{title} {row['us']:10.2f} us"
            if row["GB/s"] is not None:
                line += f" {row['GB/s']:8.0f} GB/s"
            lines.append(line + (f" {p:6.2f} of the copy" if (p := row["of copy"]) else ""))
    return "\n".join(lines)


def configurations(dtypes: list[str]) -> Iterator[tuple[str, Shape, str, str]]:
    for network, shapes in SHAPES.items():
        for shape in shapes:
            for dtype in dtypes:
                yield network, shape, dtype, "contiguous"
                if len(shape) == 4:
                    yield network, shape, dtype, "channels-last"


def main() -> int:
    """0; 1 if something could not be measured for another reason than its size or the time."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--seconds", type=float, default=300, help="begin no layer after these")
    parser.add_argument("--json", type=Path, help="write the figures there, layer by layer")
    arguments = parser.parse_args()
    end = time.monotonic() + arguments.seconds

    no_sync = one_rank_group()
    name = torch.cuda.get_device_name()
    print(f"{name}, PyTorch {torch.__version__}, syncbn {syncbn.__version__}")
    if no_sync:
        print(f"torch.nn.{SYNC} is not measured: {no_sync}")
    results = {"not measured": {SYNC: no_sync} if no_sync else {}, "layers": [], "kernels": []}
    failed = False

    def write() -> None:
        if arguments.json:
            part = arguments.json.with_suffix(".part")
            part.write_text(json.dumps(results) + "\n")
            part.replace(arguments.json)

    for network, shape, dtype, layout in configurations(arguments.dtype):
        layer = {"network": network, "shape": shape, "dtype": dtype, "layout": layout}
        if time.monotonic() > end - PROFILER_SECONDS:
            layer["problem"] = "not measured: no time left"
        else:
            try:
                layer |= measure(shape, getattr(torch, dtype), layout, no_sync)
                rows = [row for kind in ("graph", "eager") for row in layer[kind].values()]
                failed |= any(row.get("problem", no_sync) != no_sync for row in rows)
            except Exception as error:  # no reason to lose the other layers
                layer["problem"] = text_of(error)
                failed |= not isinstance(error, torch.OutOfMemoryError)
        results["layers"].append(layer)
        print(text(layer), flush=True)
        write()
    # Last: what the profiler leaves behind may slow down what comes after it.
    for _, shape, dtype, layout in configurations(arguments.dtype):
        if shape in PROFILED and time.monotonic() < end:
            found = profiled(shape, getattr(torch, dtype), layout)
            results["kernels"].append({"shape": shape, "dtype": dtype, "layout": layout, **found})
            write()
    if not no_sync:
        dist.destroy_process_group()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
