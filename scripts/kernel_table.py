# SPDX-License-Identifier: Apache-2.0
"""Print registers and stack of every CUDA kernel of a library as a Markdown table.

python scripts/kernel_table.py build/cuda/src/libsyncbn.so

Asks cuobjdump, of the CUDA toolkit or of the package triton, which PyTorch brings along. A cell is
the most over the element types; "stack" are arrays that are indexed at run time, and spills, of
which the build warns.
"""

import re
import shutil
import subprocess
import sys
import sysconfig
from collections import defaultdict

TRITON = f"{sysconfig.get_path('purelib')}/triton/backends/nvidia/bin"
KERNEL = re.compile(r"Function (?P<name>.+):\s*REG:(?P<registers>\d+) STACK:(?P<stack>\d+)")
TYPES = r"(?:double|float|Half|BFloat16|\(DType\)\d)"


def run(*command: str, text: str = "") -> str:
    done = subprocess.run(command, input=text, check=True, capture_output=True, text=True)
    return done.stdout


def short(name: str) -> str:
    """The kernel's name without namespaces, parameters and element type."""
    name = re.sub(r"\(anonymous namespace\)::|syncbn::|cuda::|^void |\)\s*$", "", name.strip())
    name = re.sub(r"Plain<[^>]*>", "Plain", name).replace(", AnyOptions", "").replace(" >", ">")
    name = re.sub(rf"(?<=<){TYPES}(?:, )?|, {TYPES}(?=[,>])", "", name)
    return re.sub(rf"<{TYPES}?>", "", re.sub(r"\((?!DType).*$", "", name))


def main() -> None:
    program = shutil.which("cuobjdump") or shutil.which("cuobjdump", path=TRITON)
    if program is None:
        raise SystemExit("cuobjdump: got none, expected the CUDA toolkit's or the package triton")
    rows: dict[str, dict[int, tuple[int, ...]]] = defaultdict(dict)
    listing = run("c++filt", text=run(program, "-res-usage", sys.argv[1]))
    for part in listing.split("arch = sm_")[1:]:
        architecture = int(re.match(r"\d+", part)[0])
        for kernel in KERNEL.finditer(part):
            values = int(kernel["registers"]), int(kernel["stack"])
            row = rows[short(kernel["name"])]
            before = row.get(architecture, values)
            row[architecture] = tuple(max(pair) for pair in zip(before, values, strict=True))
    architectures = sorted({a for row in rows.values() for a in row})
    print("| Kernel | " + " | ".join(f"sm_{a}" for a in architectures) + " |")
    print("|---" * (len(architectures) + 1) + "|")
    for name, row in sorted(rows.items()):
        cells = (row.get(a) for a in architectures)
        texts = ("" if c is None else f"{c[0]}, stack {c[1]}" if c[1] else str(c[0]) for c in cells)
        print(f"| `{name}` | " + " | ".join(texts) + " |")


if __name__ == "__main__":
    main()
