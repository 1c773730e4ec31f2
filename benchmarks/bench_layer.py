"""Forward and backward of one layer on one rank, against PyTorch's own batch norm and a copy.

All three run in turn within each round, so that they meet the same machine; medians and quartiles
over the rounds. Outputs are fresh memory for both layers, as PyTorch allocates them; the copy of
the input is measured into reused and into fresh memory. Results are compared before they are timed.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import syncbn

SHAPES = (
    (8, 64, 56, 56),
    (2, 256, 128, 128),
    (16, 512, 14, 14),
    (32, 2048, 7, 7),
    (4096, 2048),
    (64, 2048),
)


def timed(function: Callable[[], object]) -> tuple[float, object]:
    """Milliseconds, and the result (kept alive while the next one is measured)."""
    start = time.perf_counter()
    result = function()
    return (time.perf_counter() - start) * 1e3, result


def make(shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> tuple[Tensor, Tensor]:
    memory_format = torch.channels_last if layout == "channels-last" else torch.contiguous_format
    x = torch.randn(shape).to(dtype).to(memory_format=memory_format)
    return x.requires_grad_(), torch.randn_like(x)


def check(ours: nn.Module, plain: nn.Module, x: Tensor, dy: Tensor) -> None:
    """Both within the output's rounding and PyTorch's error in float32 (about 1e-4 here)."""
    scale = 4 * torch.finfo(x.dtype).eps + 1e-4
    for a, b in zip(step(ours, x, dy), step(plain, x, dy), strict=True):
        torch.testing.assert_close(a, b, rtol=scale, atol=scale * float(b.detach().abs().max()))


def step(layer: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    y = layer(x)
    return [y, *torch.autograd.grad(y, [x, layer.weight, layer.bias], dy)]


def measure(shape, dtype, layout, rounds) -> dict[str, list[float]]:
    x, dy = make(shape, dtype, layout)
    ours = syncbn.SyncBatchNorm(shape[1])
    plain = (nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d)(shape[1])
    check(ours, plain, x, dy)
    reused = torch.empty_like(x).detach()
    source = x.detach()
    times: dict[str, list[float]] = {}

    def record(name: str, function: Callable[[], object]) -> object:
        milliseconds, result = timed(function)
        times.setdefault(name, []).append(milliseconds)
        return result

    for _ in range(rounds):
        record("copy", lambda: reused.copy_(source))
        record("copy, fresh", lambda: torch.empty_like(source).copy_(source))
        for name, layer in (("syncbn", ours), ("PyTorch", plain)):
            y = record(f"{name} forward", lambda layer=layer: layer(x))
            parameters = [x, layer.weight, layer.bias]
            record(f"{name} backward", lambda y=y, p=parameters: torch.autograd.grad(y, p, dy))
            del y
    return {name: values[2:] for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, torch.get_num_threads()])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--seconds", type=float, default=2.0, help="per line, about")
    parser.add_argument("--json", type=Path, help="write all figures there")
    arguments = parser.parse_args()

    lines = []
    print(
        f"PyTorch {torch.__version__}, syncbn {syncbn.__version__} ({syncbn.cpu_instruction_set()})"
    )
    print("Medians in ms; [quartiles] of the ratio PyTorch / syncbn: above 1, syncbn is faster.")
    for threads in dict.fromkeys(arguments.threads):
        torch.set_num_threads(threads)
        print(f"\n{threads} thread{'s' if threads > 1 else ''}")
        columns = f"{'syncbn':>7} {'PyTorch':>8}  ratio"
        print(
            f"{'shape':20} {'dtype':9} {'layout':14}{'copy':>7} {'fresh':>7}"
            f" | forward: {columns}         | backward: {columns}"
        )
        for dtype in arguments.dtype:
            for shape in SHAPES:
                for layout in ("contiguous", "channels-last")[: 1 + (len(shape) == 4)]:
                    one = measure(shape, getattr(torch, dtype), layout, 3)
                    per_round = sum(v[0] for v in one.values()) / 1e3
                    rounds = max(9, min(60, int(arguments.seconds / per_round)))
                    times = measure(shape, getattr(torch, dtype), layout, rounds)
                    lines.append(
                        {"threads": threads, "shape": shape, "dtype": dtype, "layout": layout}
                        | {"milliseconds": times}
                    )
                    print(line(shape, dtype, layout, times), flush=True)
    if arguments.json:
        machine = {
            "processor": processor(),
            "platform": platform.platform(),
            "torch": torch.__version__,
            "syncbn": syncbn.__version__,
            "instruction set": syncbn.cpu_instruction_set(),
        }
        arguments.json.write_text(json.dumps({"machine": machine, "lines": lines}) + "\n")


def processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    return next((n.split(":")[1].strip() for n in text.splitlines() if "model name" in n), "")


def line(shape, dtype, layout, times) -> str:
    median = {name: statistics.median(values) for name, values in times.items()}
    text = (
        f"{str(shape):20} {dtype:9} {layout:14}{median['copy']:7.2f} {median['copy, fresh']:7.2f}"
    )
    for direction, width in (("forward", 9), ("backward", 10)):
        ours, plain = times[f"syncbn {direction}"], times[f"PyTorch {direction}"]
        low, middle, high = statistics.quantiles([b / a for a, b in zip(ours, plain, strict=True)])
        text += (
            f" | {'':{width - 2}}{median[f'syncbn {direction}']:8.2f} "
            f"{median[f'PyTorch {direction}']:8.2f}  {middle:.2f} [{low:.2f}, {high:.2f}]"
        )
    return text


if __name__ == "__main__":
    main()
