# SPDX-License-Identifier: Apache-2.0
"""Instructions of SASS per element that kernels of plain training steps execute, against a budget.

python budget.py --counts PROGRAM --kernels FOLDER --sass FOLDER TABLE.md [--write | --report WORD]

The interpreter says how often each basic block of PTX was executed (by warps), the listings of
SASS from which line of PTX each instruction comes. TABLE.md has a table of targets and ceilings:
more than a ceiling is an error; --write stores what is reached. --report prints, for the cases
whose names have all the words, where the instructions go.
"""

import argparse
import math
import re
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from sass import Block, Instruction, blocks_of, run

ARCHITECTURES = ("80", "90")
COMPILER = "release 13.0"  # whose instructions the table has
HEADER = "| Pass | Plane | Target |"
COLUMNS = ("contiguous", "float32"), ("contiguous", "16"), ("rows", "float32"), ("rows", "16")

# Instructions that ptxas makes of one of PTX and which it neither adds nor drops.
SAME = {
    "ld.global": ("LDG",),
    "st.global": ("STG",),
    "ld.shared": ("LDS",),
    "st.shared": ("STS",),
    "fma.rn.f64": ("DFMA",),
    "add.rn.f64": ("DADD",),
    "shfl.sync": ("SHFL",),
    "bar.sync": ("BAR",),
    "atom": ("ATOM", "ATOMG", "RED", "REDG"),
}


@dataclass
class Launch:
    file: str
    kernel: str
    counts: list[tuple[int, int, int]] = field(default_factory=list)  # lines of PTX, warps


@dataclass
class Case:
    name: str  # "normalize float32 contiguous 784 none"
    elements: int
    launches: list[Launch] = field(default_factory=list)


@dataclass
class Executed:
    """What a case executes, by opcode, of threads per element."""

    total: float = 0
    functions: set[str] = field(default_factory=set)  # ptxas's own, which are not counted
    ops: Counter = field(default_factory=Counter)
    places: list[tuple[float, Block]] = field(default_factory=list)
    compared: Counter = field(default_factory=Counter)  # as the listing has it,
    exact: Counter = field(default_factory=Counter)  # and as the interpreter counted


def counted(counts: Path, kernels: Path, *words: str) -> list[Case]:
    cases: list[Case] = []
    for line in run(str(counts), f"--ptx={kernels}", *words).splitlines():
        first, *rest = line.split()
        if first == "case":
            cases.append(Case(" ".join(rest[:-1]), int(rest[-1])))
        elif first == "launch":
            cases[-1].launches.append(Launch(rest[0], rest[1]))
        else:
            cases[-1].launches[-1].counts.append((int(first), int(rest[0]), int(rest[1])))
    return cases


@cache
def lines_of(file: Path) -> list[str]:
    return file.read_text().splitlines()


@cache
def kernel_of(listing: Path, name: str) -> list[Block]:
    text = listing.read_text()
    begin = text.index(f"\n.text.{name}:\n")
    end = text.find("\n//-----", begin)
    return blocks_of(text[begin : end if end > 0 else len(text)].splitlines())


def same(one: Instruction, ptx: list[str]) -> str | None:
    """The opcode of PTX that stands for exactly this instruction."""
    text = re.sub(r"^\s*(@!?%p\d+\s+)?", "", ptx[one.line - 1])
    return next(
        (op for op, names in SAME.items() if text.startswith(op) and one.does(*names)), None
    )


def execute(launch: Launch, elements: int, blocks: list[Block], ptx: list[str], out: Executed):
    """Adds what a launch executes. A block of SASS runs as often as the block of PTX does from
    which most of its instructions come; where there are several copies, as often as all together.
    """
    block_of_line: dict[int, int] = {}
    warps: dict[int, int] = {}
    for first, last, count in launch.counts:
        warps[first] = count
        block_of_line.update((line, first) for line in range(first, last + 1))
    origins = []
    copies: dict[int, Counter] = defaultdict(Counter)
    for block in blocks:
        from_ptx = Counter(block_of_line.get(one.line) for one in block.all)
        from_ptx.pop(None, None)
        origins.append(max(from_ptx, key=lambda b: (from_ptx[b], warps[b]), default=None))
        for one in block.all:
            if one.line in block_of_line and same(one, ptx):
                copies[block_of_line[one.line]][one.line] += 1
    unguarded: dict[int, str] = {}
    for block, origin in zip(blocks, origins, strict=True):
        if block.function:
            out.functions.add(block.function)
            continue
        lines = copies.get(origin)
        times = warps.get(origin, 0) * 32 / elements
        times /= lines.total() / len(lines) if lines else 1
        out.places.append((times, block))
        out.total += times * len(block.all)
        for one in block.all:
            out.ops[one.op] += times
            if one.guard is None and one.line in block_of_line and (op := same(one, ptx)):
                out.compared[op] += times
                unguarded[one.line] = op
    for line, op in unguarded.items():
        out.exact[op] += warps[block_of_line[line]] * 32 / elements


def executed(case: Case, kernels: Path, listings: Path) -> Executed:
    out = Executed()
    for launch in case.launches:
        listing = listings / Path(launch.file).with_suffix(".sass")
        blocks = kernel_of(listing, launch.kernel)
        execute(launch, case.elements, blocks, lines_of(kernels / launch.file), out)
    return out


def contradictions(case: str, what: Executed) -> list[str]:
    """Where the estimate is not what the interpreter counted exactly."""
    errors = [f"{case}: calls {function}, which is not counted" for function in what.functions]
    off = sum(abs(what.compared[op] - what.exact[op]) for op in what.exact)
    if off > 0.02 * what.exact.total():
        errors.append(f"{case}: estimated {dict(what.compared)}, counted {dict(what.exact)}")
    return errors


def kind_of_binary64(op: str) -> str | None:
    """DADD and the like, or "conversions"."""
    name = op.split(".")[0]
    return name if name in ("DADD", "DMUL", "DFMA") else "conversions" if ".F64" in op else None


def binary64_of(case: str, what: Executed) -> list[str]:
    """Operations in binary64 that main loops are not meant to have. Those of sums have a product
    and an addition an element and a conversion for each input; the others have none.
    """
    sums = case.startswith("sums")
    ops: Counter = Counter()
    for times, block in what.places:
        if block.has("DFMA" if sums else "STG"):
            for one in block.all:
                ops[kind_of_binary64(one.op)] += times
    plane = int(case.split()[3])
    # Two times 16 lanes are folded and their sums looked at, maybe in the same block.
    fold = 32 * math.ceil(plane / 512) / plane
    allowed = Counter()
    if sums:
        inputs = 2 if "backward" in case else 1
        products = ops["DFMA"]
        allowed.update(DFMA=products, DADD=products + fold, conversions=inputs * products)
    return [
        f"{case}: {ops[kind]:.2f} {kind} an element in the main loop, expected {allowed[kind]:.2f}"
        for kind in ("DFMA", "DADD", "DMUL", "conversions")
        if ops[kind] > 1.001 * allowed[kind]
    ]


def table_of(text: str) -> dict[tuple[str, str], list[str]]:
    """The cells behind pass and plane."""
    found = re.search(re.escape(HEADER) + r".*\n\|[-|]*\n((?:\|.*\n)*)", text)
    if not found:
        raise SystemExit(f"no table that begins with {HEADER}")
    rows = [
        [cell.strip() for cell in row.strip("|\n ").split("|")] for row in found[1].splitlines()
    ]
    return {(row[0], row[1]): row[2:] for row in rows}


def key_of(case: str) -> tuple[tuple[str, str], tuple[str, str]]:
    """The row and the column of a case."""
    name, dtype, layout, plane, activation = case.split()
    row = name.replace("_", " ") + (", ReLU" if activation == "relu" else "")
    kind = dtype if dtype in ("float32", "float64") else "16"
    return (row, plane), ("rows" if layout == "channels_last" else layout, kind)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--counts", type=Path, required=True)
    parser.add_argument("--kernels", type=Path, required=True)
    parser.add_argument("--sass", type=Path, required=True)
    parser.add_argument("table", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--report", nargs="+", default=[])
    given = parser.parse_args()
    if given.report:
        for case in counted(given.counts, given.kernels, *given.report):
            for architecture in ARCHITECTURES:
                what = executed(case, given.kernels, given.sass / architecture)
                most = ", ".join(f"{op} {n:.2f}" for op, n in what.ops.most_common(16))
                print(f"{case.name} sm_{architecture}: {what.total:.1f} ({most})")
        return 0
    errors: list[str] = []
    reached: dict = defaultdict(lambda: defaultdict(float))
    for words in ("float32",), ("float16",):  # that of bfloat16, too
        for case in counted(given.counts, given.kernels, *words):
            row, column = key_of(case.name)
            for architecture in ARCHITECTURES:
                what = executed(case, given.kernels, given.sass / architecture)
                name = f"{case.name} sm_{architecture}"
                errors += contradictions(name, what) + binary64_of(name, what)
                cell = reached[row]
                cell[column, architecture] = max(cell[column, architecture], what.total)
    sources = list(given.kernels.glob("*.ptx"))
    if not all(COMPILER in "".join(lines_of(file)[:9]) for file in sources):
        print(f"the ceilings are those of nvcc's {COMPILER}, which this is not: not compared")
        for error in errors:
            print(error)
        return int(bool(errors))
    text = given.table.read_text()
    rows = table_of(text)
    if rows.keys() != reached.keys():
        raise SystemExit(f"the table has {sorted(rows)}, counted were {sorted(reached)}")
    for row, cells in rows.items():
        for number, column in enumerate(COLUMNS, start=1):
            values = [reached[row][column, architecture] for architecture in ARCHITECTURES]
            where = f"{', '.join(row)}, {' '.join(column)}"
            for value, ceiling in zip(values, cells[number].split("/"), strict=True):
                if value > float(ceiling):
                    errors.append(f"{where}: {value:.2f}, at most {ceiling.strip()} before")
                elif value < 0.95 * float(ceiling):
                    print(f"{where}: {value:.2f}, the ceiling is {ceiling.strip()}: lower it")
            if given.write:
                cells[number] = " / ".join(f"{math.ceil(10 * v * 1.005) / 10}" for v in values)
    if given.write:
        for row, cells in rows.items():
            new = "| " + " | ".join([*row, *cells]) + " |"
            text = re.sub(rf"(?m)^\| {row[0]} \| {row[1]} \|.*$", new, text)
        given.table.write_text(text)
        errors = [error for error in errors if "before" not in error]
    for error in errors:
        print(error)
    return int(bool(errors))


if __name__ == "__main__":
    sys.exit(main())
