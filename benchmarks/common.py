# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: shapes, timing in turns, summaries, the machine."""

import datetime
import itertools
import json
import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import syncbn

FOLDER = Path(__file__).resolve().parent

Shape = tuple[int, ...]
#: Milliseconds of each round, by what was timed.
Times = dict[Any, list[float]]


def parse_shape(text: str) -> Shape:
    """(8, 64, 56, 56) of 8x64x56x56."""
    return tuple(int(size) for size in text.split("x"))


#: The layers that everything is measured on; bench_passes is given them as arguments.
SHAPES = [parse_shape(text) for text in (FOLDER / "shapes.txt").read_text().split()]


def text_of(shape: Shape) -> str:
    return "x".join(str(size) for size in shape)


def layouts_of(shape: Shape) -> list[str]:
    return ["contiguous", "channels-last"] if len(shape) > 2 else ["contiguous"]


def make(shape: Shape, dtype: torch.dtype, layout: str) -> tuple[Tensor, Tensor]:
    """x, which requires a gradient, and dy."""
    x = torch.randn(shape).to(dtype)
    if layout == "channels-last":
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    return x.requires_grad_(), torch.randn_like(x)


def plain_layer(shape: Shape) -> nn.Module:
    """PyTorch's own, not synchronized."""
    layers = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
    return layers[len(shape)](shape[1])


def step(layer: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    """y and the gradients of x, weight and bias."""
    y = layer(x)
    return [y, *torch.autograd.grad(y, [x, layer.weight, layer.bias], dy)]


def check_close(actual: list[Tensor], expected: list[Tensor]) -> None:
    """Within the output's rounding and PyTorch's error in float32 (about 1e-4 here)."""
    for a, b in zip(actual, expected, strict=True):
        scale = 4 * torch.finfo(b.dtype).eps + 1e-4
        torch.testing.assert_close(a, b, rtol=scale, atol=scale * float(b.detach().abs().max()))


class Clock:
    """Collects times by name over rounds."""

    def __init__(self) -> None:
        self.times: Times = {}

    def __call__(self, name: object, function: Callable[..., Any], *arguments: object) -> Any:
        """The function's result, which the caller keeps while the next one is timed."""
        start = time.perf_counter()
        result = function(*arguments)
        self.times.setdefault(name, []).append(1e3 * (time.perf_counter() - start))
        return result


def allocations(profiler: profile) -> list[tuple[int, int]]:
    """Times and sizes of what a profile of memory saw; what was freed has a negative size."""
    events = profiler.profiler.kineto_results.events()
    return sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")


def peak_of(step: Callable[[], Any]) -> float:
    """MiB at the peak of a step, beyond what was there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    sizes = itertools.accumulate(size for _, size in allocations(profiler))
    return max(sizes, default=0) / 2**20


def quartiles(values: list[float]) -> list[float]:
    """Lower quartile, median, upper quartile; at least two values."""
    return [float(f"{q:.5g}") for q in statistics.quantiles(values, n=4, method="inclusive")]


def ratio(times: list[float], base: list[float]) -> list[float]:
    """Quartiles of the ratios, round by round."""
    return quartiles([a / b for a, b in zip(times, base, strict=True)])


def rounds_for(seconds: float, one_round: float, least: int, most: int) -> int:
    return max(least, min(most, math.floor(seconds / max(one_round, 1e-6))))


def processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    return next((n.split(":")[1].strip() for n in text.splitlines() if "model name" in n), "")


def caches() -> dict[str, int]:
    """Bytes of the first core's, like L2: 1048576."""
    found = {}
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = ((folder / n).read_text().strip() for n in ("level", "type", "size"))
        if kind != "Instruction":
            found[f"L{level}"] = int(size.removesuffix("K")) * 1024
    return found


def machine() -> dict:
    """Where and with what results are made. load: processes that wanted to run, over a minute."""
    command = ["git", "-C", str(FOLDER), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True)
        commit = found.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = None
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "caches": caches(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "syncbn": syncbn.__version__,
        "commit": commit,
        "instruction_set": syncbn.cpu_instruction_set(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "load": os.getloadavg()[0],
    }


def write_json(path: Path, results: dict) -> None:
    """A line for each row, so that versions can be compared."""
    parts = []
    for name, part in results.items():
        text = json.dumps(part)
        if isinstance(part, list) and part:
            text = "[\n" + ",\n".join(json.dumps(row) for row in part) + "\n]"
        parts.append(f"{json.dumps(name)}: {text}")
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")
