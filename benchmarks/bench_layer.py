"""Forward and backward of one layer on one rank, against PyTorch's own batch norm and a copy.

All run in turn within each round, so that they meet the same machine; medians and quartiles over
the rounds. Results are compared before they are timed. Both kinds of memory are forced on the C
library's allocator, which otherwise mixes them: "reused" outputs lie where earlier ones lay,
"fresh" outputs in pages that the system has to hand out first.

oneDNN is what PyTorch calls for 4-D tensors in oneDNN's own layout (x.to_mkldnn()), which a network
has between oneDNN's convolutions; changing layouts is not timed. PyTorch's batch norm for plain
tensors does not use oneDNN.
"""

import argparse
import ctypes
import itertools
import time
from pathlib import Path

import common
import torch
from torch import Tensor

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


def use_memory(kind: str) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        raise SystemExit("the C library has no mallopt: it must be glibc")
    for option, value in MEMORY[kind].items():
        if mallopt(option, value) != 1:
            raise SystemExit(f"mallopt refused {option} = {value}")


def to_onednn(x: Tensor) -> Tensor:
    return x.detach().to_mkldnn(x.dtype) if x.dtype != torch.float32 else x.detach().to_mkldnn()


def has_onednn(x: Tensor) -> bool:
    if x.dim() != 4 or not torch.backends.mkldnn.is_available():
        return False
    return x.dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def candidates(x: Tensor, dy: Tensor) -> dict[str, tuple[torch.nn.Module, Tensor, Tensor]]:
    """A layer with its x and dy, by name; all give the same results."""
    shape = tuple(x.shape)
    found = {
        "syncbn": (syncbn.SyncBatchNorm(shape[1]), x, dy),
        "PyTorch": (common.plain_layer(shape), x, dy),
    }
    if has_onednn(x):
        own = to_onednn(x).requires_grad_(), to_onednn(dy)
        found["oneDNN"] = (common.plain_layer(shape), *own)
    expected = common.step(*found["PyTorch"])
    for name in found.keys() - {"PyTorch"}:
        results = common.step(*found[name])
        common.check_close([r.to_dense() if r.is_mkldnn else r for r in results], expected)
    return found


def measure(x: Tensor, dy: Tensor, seconds: float, least: int) -> list[dict]:
    layers = candidates(x, dy)
    source = x.detach()
    target = torch.empty_like(source)

    def play(clock: common.Clock) -> None:
        clock("copy", target.copy_, source)
        clock("copy to new memory", lambda: torch.empty_like(source).copy_(source))
        for name, (layer, its_x, its_dy) in layers.items():
            y = clock(f"{name} forward", layer, its_x)
            inputs = [its_x, layer.weight, layer.bias]
            clock(f"{name} backward", torch.autograd.grad, y, inputs, its_dy)
            del y

    start = time.perf_counter()
    play(common.Clock())
    clock = common.Clock()
    for _ in range(common.rounds_for(seconds, time.perf_counter() - start, least, 60)):
        play(clock)
    base_of = {
        f"{name} {direction}": f"PyTorch {direction}"
        for name in layers
        for direction in ("forward", "backward")
    }
    return common.summarize(clock.times, base_of)


def line(place: dict, rows: list[dict]) -> str:
    of = {row["variant"]: row for row in rows}
    words = [f"{place['shape']:14} {place['dtype']:9}{place['layout']:13}"]
    words.append(f"{of['copy to new memory']['milliseconds'][1]:7.2f}")
    for direction in ("forward", "backward"):
        ours = of[f"syncbn {direction}"]
        low, middle, high = ours["speedup"]
        words.append(f"| {ours['milliseconds'][1]:8.2f}")
        for other in ("PyTorch", "oneDNN"):
            row = of.get(f"{other} {direction}")
            words.append(f"{row['milliseconds'][1]:8.2f}" if row else f"{'-':>8}")
        words.append(f" {middle:.2f} [{low:.2f}, {high:.2f}]")
    return " ".join(words)


HEADING = """Medians in ms; [quartiles] of PyTorch's time / syncbn's: above 1, syncbn is faster.
shape          dtype    layout          copy | forward:        PyTorch   oneDNN\
  speed-up           | backward:       PyTorch   oneDNN  speed-up"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", type=common.parse_shape, default=common.SHAPES)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, default=1.0, help="per line, about")
    parser.add_argument("--rounds", type=int, default=5, help="per line, at least")
    parser.add_argument("--json", type=Path, help="write all figures there")
    arguments = parser.parse_args()

    lines = []
    for memory in MEMORY:
        use_memory(memory)
        for threads in dict.fromkeys(arguments.threads):
            torch.set_num_threads(threads)
            print(f"\nthreads: {threads}, {memory} memory. {HEADING}")
            for shape, dtype in itertools.product(arguments.shapes, ("float32", "bfloat16")):
                for layout in common.layouts_of(shape):
                    x, dy = common.make(shape, getattr(torch, dtype), layout)
                    place = {"memory": memory, "threads": threads}
                    place |= {"shape": common.text_of(shape), "dtype": dtype, "layout": layout}
                    rows = measure(x, dy, arguments.seconds, arguments.rounds)
                    lines += [place | row for row in rows]
                    print(line(place, rows), flush=True)
    common.write_json(arguments.json, lines)


if __name__ == "__main__":
    main()
