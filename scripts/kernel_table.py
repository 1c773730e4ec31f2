"""Print registers, stack and spills of every CUDA kernel as a Markdown table.

python scripts/kernel_table.py build/cuda

Compiles the kernels once more, with the commands of that build, and reads what ptxas says. A cell
is the most over the element types; "stack" are arrays that are indexed at run time.
"""

import json
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

KERNEL = re.compile(
    r"entry function '(?P<name>\w+)' for '(?P<arch>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers",
    re.DOTALL,
)
TYPES = r"(?:double|float|Half|BFloat16|\(DType\)\d)"


def messages(build: Path) -> str:
    """What ptxas says of all kernels, for all architectures of the build."""
    text = []
    for entry in json.loads((build / "compile_commands.json").read_text(encoding="utf-8")):
        if entry["file"].endswith(".cu") and "nvcc" in entry["command"].split()[0]:
            command = re.sub(r" -o \S+", " -o /dev/null", entry["command"]) + " -Xptxas=-v"
            command = re.sub(r" -M[DTF] ?\S*(?: \S+\.(?:o|d)\b)?", "", command)
            result = subprocess.run(
                command, shell=True, cwd=entry["directory"], capture_output=True, text=True
            )
            if result.returncode:
                raise SystemExit(result.stderr)
            text.append(result.stderr + result.stdout)
    return "\n".join(text)


def short(name: str) -> str:
    """The kernel's name without namespaces, parameters and element type."""
    name = subprocess.run(["c++filt", name], check=True, capture_output=True, text=True).stdout
    name = re.sub(r"\(anonymous namespace\)::|syncbn::|cuda::|^void |\)\s*$", "", name.strip())
    name = re.sub(r"Plain<[^>]*>", "Plain", name).replace(", AnyOptions", "")
    name = re.sub(rf"(?<=<){TYPES}(?:, )?|, {TYPES}(?=[,>])", "", name)
    return re.sub(rf"<{TYPES}?>", "", re.sub(r"\((?!DType).*$", "", name))


def main() -> int:
    rows: dict[str, dict[str, list[int]]] = defaultdict(dict)
    spilled = 0
    for kernel in KERNEL.finditer(messages(Path(sys.argv[1]))):
        values = [int(kernel[key]) for key in ("registers", "stack")]
        spilled += int(kernel["stores"]) + int(kernel["loads"]) > 0
        row = rows[short(kernel["name"])]
        row[kernel["arch"]] = [
            max(pair) for pair in zip(row.get(kernel["arch"], values), values, strict=True)
        ]
    names = sorted({arch for row in rows.values() for arch in row}, key=lambda a: int(a[3:]))
    print("| Kernel | " + " | ".join(names) + " |")
    print("|---" * (len(names) + 1) + "|")
    for name, row in sorted(rows.items()):
        cells = (row.get(arch) for arch in names)
        texts = ("" if c is None else f"{c[0]}, stack {c[1]}" if c[1] else str(c[0]) for c in cells)
        print(f"| `{name}` | " + " | ".join(texts) + " |")
    print(f"\n{len(rows)} kernels (times types), {spilled} of them spill.")
    return int(spilled > 0)


if __name__ == "__main__":
    sys.exit(main())
