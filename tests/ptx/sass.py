# SPDX-License-Identifier: Apache-2.0
"""SASS of the kernels: how ptxas and nvdisasm are called, and what their listing says.

python sass.py KERNELS.ptx ARCHITECTURE LISTING --ptxas PTXAS

writes the listing of what ptxas makes of a file of PTX. Each instruction is annotated with the line
of PTX from which it comes. The PTX may be nvcc's for another architecture than ARCHITECTURE: only
the line .target is changed.
"""

import argparse
import importlib.util
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

INSTRUCTION = re.compile(
    r"\s*/\*(?P<at>[0-9a-f]{4,})\*/\s+(?:@(?P<guard>!?U?P\w+)\s+)?"
    r"(?P<op>[A-Z][\w.]*)\s*(?P<operands>.*?)\s*;"
)


def find_nvdisasm(ptxas: str) -> str:
    """nvdisasm of the toolkit, or Triton's, which PyTorch brings along."""
    places = [Path(ptxas).parent]
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.submodule_search_locations:
        places.append(Path(triton.submodule_search_locations[0], "backends", "nvidia", "bin"))
    for place in places:
        if found := shutil.which("nvdisasm", path=str(place)):
            return found
    if found := shutil.which("nvdisasm"):
        return found
    raise SystemExit("nvdisasm was not found: the CUDA toolkit has it, and the package triton")


def run(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"{' '.join(command)}:\n{result.stderr}")
    return result.stdout


def listing_of(ptx: str, architecture: str, ptxas: str) -> str:
    """What nvdisasm shows of the machine code."""
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "kernels.ptx"), Path(folder, "kernels.cubin")
        source.write_text(re.sub(r"(?m)^\.target .*", f".target sm_{architecture}", ptx))
        run(ptxas, f"-arch=sm_{architecture}", "-lineinfo", "-o", str(cubin), str(source))
        return run(find_nvdisasm(ptxas), "-c", "-gp", str(cubin))


@dataclass
class Instruction:
    op: str  # "LDG.E.128"
    guard: str | None  # "!P0"
    operands: str
    line: int  # of PTX

    def does(self, *names: str) -> bool:
        """Whether one of the names begins its opcode."""
        return any(self.op == name or self.op.startswith(name + ".") for name in names)

    def target(self) -> str | None:
        found = re.search(r"`\((\S+?)\)", self.operands)
        return found[1] if found else None

    def is_conditional(self) -> bool:
        return self.guard is not None or re.match(r"!?U?P\d", self.operands) is not None


@dataclass
class Block:
    """Instructions that are executed one after the other."""

    number: int
    function: str = ""  # ptxas's own that it belongs to, of division for example
    all: list[Instruction] = field(default_factory=list)
    next: list[int] = field(default_factory=list)

    def has(self, *names: str) -> bool:
        return any(one.does(*names) for one in self.all)


def blocks_of(lines: list[str]) -> list[Block]:
    """The blocks that are executed. Paths that a warp takes only when its lanes are apart at a
    shuffle (BRA.DIV) are left out."""
    blocks = [Block(0)]
    labels: dict[str, int] = {}
    line_of_ptx = 0

    def cut(function: str) -> None:
        if blocks[-1].all:
            blocks.append(Block(len(blocks)))
        blocks[-1].function = function

    for line in lines:
        if found := re.match(r'\s*//## File ".*", line (\d+)', line):
            line_of_ptx = int(found[1])
        elif found := re.match(r"(\.L_x_\d+|\$\S+):", line):
            is_function = found[1].startswith("$__internal")
            cut(found[1] if is_function else blocks[-1].function)
            labels[found[1]] = len(blocks) - 1
        elif found := INSTRUCTION.match(line):
            one = Instruction(found["op"], found["guard"], found["operands"], line_of_ptx)
            blocks[-1].all.append(one)
            if one.does("BRA", "EXIT", "RET", "CALL"):
                cut(blocks[-1].function)
    executed: set[int] = set()
    waiting = [0]
    while waiting:
        number = waiting.pop()
        if number in executed or not blocks[number].all:
            continue
        executed.add(number)
        last = blocks[number].all[-1]
        is_end = last.does("EXIT", "RET", "BRA") and not last.does("BRA.DIV")
        if (not is_end or last.is_conditional()) and number + 1 < len(blocks):
            blocks[number].next.append(number + 1)
        if last.does("BRA", "CALL") and not last.does("BRA.DIV") and last.target() in labels:
            blocks[number].next.append(labels[last.target()])
        waiting += blocks[number].next
    return [blocks[number] for number in sorted(executed)]


def loops_of(blocks: list[Block]) -> list[list[Block]]:
    """The blocks between a branch back and its target, for each such branch."""
    return [
        [block for block in blocks if to <= block.number <= end.number]
        for end in blocks
        for to in end.next
        if to <= end.number and not end.function
    ]


def innermost(loops: list[list[Block]], *names: str) -> list[list[Block]]:
    """The loops with one of the opcodes that hold no smaller one with them."""
    having = [loop for loop in loops if any(block.has(*names) for block in loop)]
    return [
        loop
        for loop in having
        if not any(len(o) < len(loop) and all(b in loop for b in o) for o in having)
    ]


def kernels_of(listing: str) -> dict[str, list[Block]]:
    """The blocks of each kernel."""
    sections = re.split(r"(?m)^\.text\.(\S+):$", listing)
    return {
        name: blocks_of(text.splitlines())
        for name, text in zip(sections[1::2], sections[2::2], strict=True)
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ptx", type=Path)
    parser.add_argument("architecture")
    parser.add_argument("listing", type=Path)
    parser.add_argument("--ptxas", default="ptxas")
    given = parser.parse_args()
    given.listing.parent.mkdir(parents=True, exist_ok=True)
    text = listing_of(given.ptx.read_text(), given.architecture, given.ptxas)
    given.listing.write_text(text)
