# SPDX-License-Identifier: Apache-2.0
"""What must not be in the kernels' SASS: local memory, flushed subnormals, narrow accesses. And in
PTX: arithmetic that is not rounded to nearest, once; for GPUs with few units for binary64 also
conversions to it in the sums.

python lint.py --kernels FOLDER [LISTINGS...]    FOLDER: with the PTX of which the listings are
"""

import argparse
import re
import sys
from pathlib import Path

from sass import Block, innermost, kernels_of, loops_of

# Kernels that may use local memory (ptxas warns of spills in these, too).
MAY_USE_LOCAL = {
    r"(moments|gradients)_kernelIdE": "integers of up to 4,400 bits, indexed at run time",
}

# Instructions of PTX of which ptxas makes several, some with .FTZ on numbers that it has scaled, or
# that are no data. Their results are rounded once, and subnormal where they should be.
MAY_FLUSH = r"(div|rem|rcp|sqrt)\."

WIDEST = r"(dLi2|fLi4|NS_\d+\w+?ELi8)"
SIXTEEN_BITS = r"NS_\d(Half|BFloat16)E"
# Kernels of plain steps on dense memory: what their main loops have, and bits of their accesses to
# global memory. The first that fits a kernel counts.
MAIN_LOOPS = [
    (r"map_dense_(rows|planes)I", "STG", 128),
    (rf"sum_planesI{WIDEST}ELb[01]ELb0E", "DFMA", 128),
    (rf"sum_rowsI{WIDEST}ELb[01]E", "DFMA", 128),
    # The sums of 8 channels of two inputs do not fit the registers,
    (rf"sum_rowsI{SIXTEEN_BITS}Li4ELb1E", "DFMA", 64),
    # nor do the addresses of where 8 elements go to.
    (rf"sum_short_planesI{SIXTEEN_BITS}", "STS", 64),
    (r"sum_short_planesIf", "STS", 128),
]

# As device::few_binary64_units has it.
MANY_BINARY64_UNITS = ("sm_70", "sm_80", "sm_90", "sm_100")


def flushes(blocks: list[Block], ptx: list[str]) -> set[str]:
    return {
        f"{one.op} of {ptx[one.line - 1].strip()}"
        for block in blocks
        for one in block.all
        if ".FTZ" in one.op
        and not re.match(rf"\s*(@!?%p\d+\s+)?{MAY_FLUSH}", ptx[one.line - 1])
        and not re.search(r"(div|rcp|sqrt)_", block.function)
    }


def accesses(loop: list[Block]) -> set[tuple[str, int]]:
    """Loads and stores of elements, and their bits: not of masks, which have bytes, nor atomics."""
    found = set()
    for block in loop:
        for one in block.all:
            if one.does("LDG", "STG") and "STRONG" not in one.op and ".U8" not in one.op:
                bits = re.search(r"\.U?(16|64|128)\b", one.op)
                found.add((one.op, int(bits[1]) if bits else 32))
    return found


def narrow(name: str, blocks: list[Block], fits: set[str]) -> list[str]:
    for pattern, main, bits in MAIN_LOOPS:
        if not re.search(pattern, name):
            continue
        fits.add(pattern)
        loops = [accesses(loop) for loop in innermost(loops_of(blocks), main)]
        # Of short planes, the elements behind the last whole vector have a loop of their own.
        is_short = main == "STS"
        wide = [loop for loop in loops if loop and all(width >= bits for _, width in loop)]
        if loops and (wide if is_short else len(wide) == len(loops)):
            return []
        ops = sorted({op for loop in loops for op, _ in loop})
        return [f"{name}: expected accesses of {bits} bits in the main loop, got {ops}"]
    return []


def lint(listing: str, ptx: list[str], fits: set[str]) -> list[str]:
    """What is wrong. fits: patterns of MAIN_LOOPS that fit some kernel are added."""
    errors = []
    for name, blocks in kernels_of(listing).items():
        local = {one.op for block in blocks for one in block.all if one.does("LDL", "STL")}
        if local and not any(re.search(pattern, name) for pattern in MAY_USE_LOCAL):
            errors.append(f"{name}: local memory, {sorted(local)}")
        errors += [f"{name}: {text}" for text in sorted(flushes(blocks, ptx))]
        errors += narrow(name, blocks, fits)
    return errors


def inexact(ptx: str) -> set[str]:
    """Floating-point arithmetic that is not rounded to nearest, flushes subnormals or approximates;
    without ".rn" ptxas may fuse a product and a sum."""
    arithmetic = r"(?:add|sub|mul|fma|mad|div|rcp|sqrt|rsqrt|ex2|lg2|sin|cos|tanh)"
    found = re.findall(rf"\b({arithmetic}\.(?:\w+\.)*f(?:16|32|64)\w*)", ptx)
    return {op for op in found if not re.fullmatch(r"\w+\.rn\.f(32|64)", op)}


def conversions(ptx: str) -> list[str]:
    """Sums of forward, which have no constants of channels, that convert to binary64."""
    if re.search(rf"(?m)^\.target ({'|'.join(MANY_BINARY64_UNITS)})\b", ptx):
        return []
    names_and_texts = re.split(r"\.entry (\w+)", ptx)[1:]
    return [
        f"{name}: cvt.f64.f32, for a GPU with few units for binary64"
        for name, text in zip(names_and_texts[::2], names_and_texts[1::2], strict=True)
        if re.search(r"sum_(planes|rows|short_planes)I", name) and "cvt.f64.f32" in text
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", type=Path, required=True)
    parser.add_argument("listings", type=Path, nargs="*")
    given = parser.parse_args()
    fits: set[str] = set()
    errors = []
    for listing in given.listings:
        ptx = (given.kernels / f"{listing.stem}.ptx").read_text().splitlines()
        found = lint(listing.read_text(), ptx, fits)
        errors += [f"{listing.parent.name}/{listing.name}: {error}" for error in found]
    if given.listings:
        errors += [f"no kernel fits {pattern}" for pattern, *_ in MAIN_LOOPS if pattern not in fits]
    for path in sorted(given.kernels.glob("*.ptx")):
        errors += [f"{path.name}: {op}" for op in sorted(inexact(path.read_text()))]
    errors += conversions((given.kernels / "moments.ptx").read_text())
    for error in errors:
        print(error)
    return int(bool(errors))


if __name__ == "__main__":
    sys.exit(main())
