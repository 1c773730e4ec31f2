# SPDX-License-Identifier: Apache-2.0
"""A model of the CUDA kernels' times; nothing is measured here.

python benchmarks/model_gpu.py

Prints two tables of docs/performance_gpu.md. That page says where the constants come from, and has
the instructions per element.
"""

import math
import re
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).resolve().parent.parent / "docs" / "performance_gpu.md"
INPUTS = {"forward": 1, "backward": 2}
PASSES = {"forward": "normalize", "backward": "input gradient"}
BYTES = {"float32": 4, "bfloat16": 2}


class Gpu(NamedTuple):
    """adds, conversions: of binary64, by a multiprocessor in a clock (the code for 7.5, 8.6 and
    12.0 has no conversions); sm: whose instructions."""

    name: str
    gigabytes: float  # a second
    multiprocessors: int
    gigahertz: float
    adds: int
    conversions: float
    sm: int


GPUS = [
    Gpu("A100 80 GB", 2039, 108, 1.41, 32, 16, 80),
    Gpu("H100 SXM", 3350, 132, 1.98, 64, 16, 90),
    Gpu("H200", 4800, 132, 1.98, 64, 16, 90),
    Gpu("B200", 7700, 148, 1.96, 64, 16, 90),
    Gpu("B300", 8000, 160, 1.95, 2, 2, 90),
    Gpu("L40S", 864, 142, 2.52, 2, math.inf, 80),
    Gpu("RTX 4090", 1008, 128, 2.52, 2, math.inf, 80),
    Gpu("RTX 5090", 1792, 170, 2.41, 2, math.inf, 90),
    Gpu("T4", 320, 40, 1.59, 2, math.inf, 80),
]
#: Microseconds, forward and backward, of the kernels' first version.
SHAPES = {
    (8, 64, 56, 56): "34 / 35",
    (2, 256, 128, 128): "54 / 62",
    (16, 512, 14, 14): "36 / 33",
    (32, 2048, 7, 7): "96 / 100",
    (64, 2048): "50 / 38",
    (32, 256, 64, 64): "131 / 181",
}
#: What an H200 reaches in a microsecond: bytes, instructions of threads.
MOVED, ISSUED = 4.3e6, 17.6e6
START = 2.0  # microseconds of a launch, and of the meeting of all blocks
FINALIZE = {"forward": 900 * 6 / 1980, "backward": 600 * 6 / 1980}  # and of finalizing
SHARED_BYTES = 29e6  # of all multiprocessors together


def cells_of(page: str, name: str, column: str) -> list[str]:
    row = re.search(rf"^\| {re.escape(name)} \| {re.escape(column)}(.*) \|$", page, re.M)
    if row is None:
        raise SystemExit(f"{PAGE}: no row of {name}, {column}")
    return row[1].split("|")


def counted(page: str, name: str, plane: int, dtype: str, sm: int = 90) -> list[float]:
    """Instructions per element of a pass, contiguous and channels-last."""
    cells = cells_of(page, name, f"{plane} |")[1 + (dtype != "float32") :: 2]
    return [float(cell.split("/")[sm == 90]) for cell in cells]


def binary64(gpu: Gpu, inputs: int) -> float:
    """Clocks of a multiprocessor for an element in the sums."""
    return inputs / gpu.conversions + 1 / gpu.adds + 1 / gpu.adds


def ceiling(page: str, gpu: Gpu, direction: str, dtype: str) -> str:
    """The time that memory takes, over that of the slowest part of each kernel."""
    inputs, size = INPUTS[direction], BYTES[dtype]
    clocks = gpu.multiprocessors * gpu.gigahertz  # in a nanosecond
    memory = inputs * size / gpu.gigabytes, (inputs + 1) * size / gpu.gigabytes
    names = f"sums {direction}", PASSES[direction]
    issue = [max(counted(page, name, 784, dtype, gpu.sm)) / 128 / clocks for name in names]
    took = max(memory[0], binary64(gpu, inputs) / clocks, issue[0]) + max(memory[1], issue[1])
    return f"{100 * sum(memory) / took:.0f} %"


def microseconds(page: str, shape: tuple, direction: str, dtype: str, one_kernel: bool) -> str:
    inputs, size = INPUTS[direction], BYTES[dtype]
    elements, plane = math.prod(shape), math.prod(shape[2:])
    whole, rows = plane * size % 16 == 0, len(shape) == 2
    if one_kernel and (rows or not whole or inputs * elements * size > SHARED_BYTES):
        return "–"
    like = 784 if whole or rows else 49
    sums, rest = (
        counted(page, name, like, dtype)[rows] for name in (f"sums {direction}", PASSES[direction])
    )
    if rows:
        cells = cells_of(page[page.index("| (N, C) |") :], "(64, 2048)", "")
        sums = float(cells[2 * (dtype != "float32") + inputs - 1].split("/")[1])
    again = 1 if one_kernel else inputs + 1
    work = max(inputs * size / MOVED, sums / ISSUED) + max(again * size / MOVED, rest / ISSUED)
    return f"{(3 if one_kernel else 4) * START + elements * work + FINALIZE[direction]:.0f}"


def tables(page: str) -> list[list[str]]:
    ways = "forward, float32 | 16 bits | backward, float32 | 16 bits"
    gpus = [f"| GPU | GB/s | Multiprocessors × GHz | a, c | {ways} |"]
    for gpu in GPUS:
        row = f"| {gpu.name} | {gpu.gigabytes:,} | {gpu.multiprocessors} × {gpu.gigahertz} |"
        row += f" {gpu.adds}, {str(gpu.conversions).replace('inf', '–')} |"
        gpus.append(row + "".join(f" {ceiling(page, gpu, d, t)} |" for d in INPUTS for t in BYTES))
    times = ["| Shape | MB | First version | float32 | one kernel | bfloat16 | one kernel |"]
    for shape, before in SHAPES.items():
        row = f"| {shape} | {4 * math.prod(shape) / 1e6:.1f} | {before} |"
        for way in ((dtype, one) for dtype in BYTES for one in (False, True)):
            row += f" {' / '.join(microseconds(page, shape, d, *way) for d in INPUTS)} |"
        times.append(row)
    return [[head, "|---" * (head.count("|") - 1) + "|", *rows] for head, *rows in (gpus, times)]


if __name__ == "__main__":
    print("\n\n".join("\n".join(table) for table in tables(PAGE.read_text())))
