# SPDX-License-Identifier: Apache-2.0
"""Times a layer on a GPU, beside torch.nn.BatchNorm and a copy of device memory.

python benchmarks/bench_gpu.py --json FILE

Every time is a median of rounds, in microseconds. "forward" and "step" are replays of a CUDA graph,
so they hold kernels and no Python; "eager" is a step as Python calls it. The layers are measured in
turns. A forward of ours moves at least three tensors (x twice, y), a step eight, and a copy two:
"copies" is the time over that of a copy of as many bytes. Then eager steps of ResNet-50, in
milliseconds: "host" is how long the host was busy. --device cpu tries the script on a CPU.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from resnet50 import build_resnet50
from torch import nn

import syncbn

#: Layers of ResNet-50 and DeepLab, of a small network, and of a head with 2-D inputs.
SHAPES = [
    (32, 64, 112, 112),
    (32, 256, 56, 56),
    (32, 2048, 7, 7),
    (2, 2048, 64, 64),
    (8, 16, 8, 8),
    (4096, 2048),
]
MOVED = {"forward": 3, "step": 8, "eager": 8}
CALLS = 20  # in one measurement of a round


class Clock:
    """Runs work on one device, and says how many microseconds a call takes."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"

    def captured(self, work: Callable[[], object]) -> Callable[[], object]:
        """The work as the replay of a graph; on a CPU the work itself."""
        if not self.cuda:
            return work
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                work()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph.replay

    def microseconds(self, work: Callable[[], object]) -> float:
        if not self.cuda:
            begin = time.perf_counter()
            for _ in range(CALLS):
                work()
            return (time.perf_counter() - begin) / CALLS * 1e6
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(CALLS):
            work()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / CALLS * 1e3


def works(clock: Clock, layer: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> dict:
    """What is timed of a layer, by name."""

    def forward() -> torch.Tensor:
        return layer(x)

    def step() -> object:
        return torch.autograd.grad(layer(x), [x, *layer.parameters()], dy)

    for _ in range(3):
        step()
    return {"forward": clock.captured(forward), "step": clock.captured(step), "eager": step}


def measure(shape, dtype: torch.dtype, channels_last: bool, device: str, rounds: int) -> dict:
    clock = Clock(device)
    way = torch.channels_last if channels_last else torch.contiguous_format
    x, dy = (torch.randn(shape, device=device).to(dtype).to(memory_format=way) for _ in range(2))
    x.requires_grad_(True)
    target, source = torch.empty_like(x), x.detach()
    plain = nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d
    timed = {"copy": {"copy": clock.captured(lambda: target.copy_(source))}}
    for name, made in (("syncbn", syncbn.SyncBatchNorm), ("torch", plain)):
        timed[name] = works(clock, made(shape[1], device=device), x, dy)
    times: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        for name, parts in timed.items():
            for part, work in parts.items():
                times.setdefault((name, part), []).append(clock.microseconds(work))
    medians = {key: statistics.median(values) for key, values in times.items()}
    copy = medians.pop(("copy", "copy"))
    found: dict = {"copy": copy, "copy GB/s": 2e-3 * x.nbytes / copy}
    for (name, part), value in medians.items():
        found[f"{name} {part}"] = value
        found[f"{name} {part}, copies"] = value / (copy * MOVED[part] / 2)
    return {name: round(value, 3) for name, value in found.items()}


def resnet50(batch: int, mixed: bool, synchronized: bool, device: str, size: int) -> dict:
    """A step's time; mixed: bfloat16 by autocast, channels-last."""
    torch.manual_seed(0)
    network = build_resnet50().to(device)
    x, target = torch.randn(batch, 3, size, size, device=device), torch.arange(batch, device=device)
    if mixed:
        network, x = (t.to(memory_format=torch.channels_last) for t in (network, x))
    if synchronized:
        network = syncbn.convert_sync_batchnorm(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    times = []
    for _ in range(10 if device == "cuda" else 1):
        wait()
        begin = time.perf_counter()
        with torch.autocast(device, torch.bfloat16, enabled=mixed):
            loss = nn.functional.cross_entropy(network(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        busy = time.perf_counter() - begin
        wait()
        times.append((time.perf_counter() - begin, busy))
    step, host = (1e3 * statistics.median(part[len(part) // 2 :]) for part in zip(*times))
    return {
        "batch": batch,
        "mixed": mixed,
        "layers": "syncbn" if synchronized else "torch",
        "step": round(step, 2),
        "host": round(host, 2),
    }


def main() -> int:
    """0; 1 if something could not be measured."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--seconds", type=float, default=300, help="begin no layer after these")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the figures there, layer by layer")
    arguments = parser.parse_args()
    end = time.monotonic() + arguments.seconds
    cuda = arguments.device == "cuda"
    name = torch.cuda.get_device_name() if cuda else "CPU"
    print(f"{name}, PyTorch {torch.__version__}, syncbn {syncbn.__version__}", flush=True)
    rows: list[dict] = []
    steps: list[dict] = []

    def write() -> None:
        if arguments.json:
            part = arguments.json.with_suffix(".part")
            part.write_text(
                json.dumps({"device": name, "layers": rows, "resnet50": steps}, indent=1)
            )
            part.replace(arguments.json)

    for shape in SHAPES if cuda else [(4, 3, 5, 5), (6, 4)]:
        for dtype in (torch.float32, torch.bfloat16):
            for channels_last in (False, True)[: len(shape) // 2]:
                row: dict = {"shape": shape, "dtype": str(dtype), "channels last": channels_last}
                try:
                    if time.monotonic() > end:
                        raise TimeoutError("no time left")
                    row |= measure(shape, dtype, channels_last, arguments.device, arguments.rounds)
                except Exception as error:  # no reason to lose the others
                    row["problem"] = f"{type(error).__name__}: {error}"
                rows.append(row)
                print(row, flush=True)
                write()
    for batch, mixed in ((64, False), (64, True), (8, True)) if cuda else [(2, False)]:
        for synchronized in (False, True):
            size = 224 if cuda else 33
            steps.append(resnet50(batch, mixed, synchronized, arguments.device, size))
            print(steps[-1], flush=True)
            write()
    return int(any("problem" in row for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
