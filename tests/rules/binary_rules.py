# SPDX-License-Identifier: Apache-2.0
"""Rules about compiled libraries: levels, exported, paths and torch (see each function)."""

import argparse
import difflib
import re
import subprocess
import sys
from pathlib import Path

# PyTorch's C++ interface changes with its versions; its C functions, the stable ABI, do not.
TORCH_CPP = re.compile(r"\b(?:at|c10|caffe2|torch)::")
TORCH_C = re.compile(r"(?:aoti_)?torch_\w+$")
PUBLIC = re.compile(r"(?:(?:typeinfo(?: name)?|vtable) for )?syncbn::|syncbn_\w+$")


def nm(program: str, *arguments: str) -> list[tuple[str, str]]:
    """(type, demangled name) of each symbol."""
    output = subprocess.run([program, "-C", *arguments], check=True, capture_output=True, text=True)
    lines = (re.match(r"[0-9a-f]*\s+(\S) (.+)", line) for line in output.stdout.splitlines())
    return [(match[1], match[2]) for match in lines if match]


def levels(args: argparse.Namespace) -> list[str]:
    """A file compiled for one instruction set exports no weak symbol.

    The linker keeps one copy of a weak symbol for all: an AVX-512 std::min would crash elsewhere.
    """
    objects = [path for path in args.objects if "/cpu/vector/" in path]
    if not objects:
        return ["no object of src/cpu/vector/"]
    weak = {
        f"{Path(path).name}: weak symbol {name}"
        for path in objects
        for kind, name in nm(args.nm, "--defined-only", path)
        # The pointer to the C++ runtime's exception handler is data, the same in every object.
        if kind in "VWuvw" and name != "DW.ref.__gxx_personality_v0"
    }
    return sorted(weak)


def exported(args: argparse.Namespace) -> list[str]:
    """The library exports what the reviewed list says, and nothing outside the public namespace."""
    names = sorted({name for _, name in nm(args.nm, "-D", "--defined-only", args.library)})
    if args.write:
        args.list.write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
    reviewed = args.list.read_text(encoding="utf-8").splitlines() if args.list.exists() else []
    problems = [f"not in namespace syncbn: {name}" for name in names if not PUBLIC.match(name)]
    if names != reviewed:
        problems += difflib.unified_diff(reviewed, names, str(args.list), "exported", lineterm="")
        problems.append(
            "If the change is meant, review it and write the list again: "
            f"python {' '.join(sys.argv)} --write (from {Path.cwd()})"
        )
    return problems


def paths(args: argparse.Namespace) -> list[str]:
    """The library does not mention the folder that it was built in (-ffile-prefix-map)."""
    found = re.findall(
        rb"[\x20-\x7e]*" + re.escape(args.folder.encode()) + rb"[\x20-\x7e]*",
        Path(args.library).read_bytes(),
    )
    return [f"{Path(args.library).name}: {text.decode()}" for text in found]


def wanted_of_torch(library: str | Path, program: str = "nm") -> tuple[list[str], list[str]]:
    """The C++ symbols and the C functions that the library wants of PyTorch's."""
    names = sorted({name for _, name in nm(program, "-D", "--undefined-only", str(library))})
    return [n for n in names if TORCH_CPP.search(n)], [n for n in names if TORCH_C.match(n)]


def torch(args: argparse.Namespace) -> list[str]:
    """The core wants nothing of PyTorch; the operators want C functions of its stable ABI alone."""
    problems = []
    for path in args.libraries:
        cpp, c = wanted_of_torch(path, args.nm)
        operators = "torch" in Path(path).name
        problems += [f"{Path(path).name}: {name}" for name in (cpp if operators else cpp + c)]
        if operators and not c:
            problems.append(f"{Path(path).name}: no symbol of PyTorch's stable ABI")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nm", default="nm")
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("levels")
    command.add_argument("objects", nargs="+")
    command.set_defaults(rule=levels)
    command = commands.add_parser("exported")
    command.add_argument("library")
    command.add_argument("list", type=Path)
    command.add_argument("--write", action="store_true")
    command.set_defaults(rule=exported)
    command = commands.add_parser("paths")
    command.add_argument("library")
    command.add_argument("folder")
    command.set_defaults(rule=paths)
    command = commands.add_parser("torch")
    command.add_argument("libraries", nargs="+")
    command.set_defaults(rule=torch)
    args = parser.parse_args()
    problems = args.rule(args)
    print("\n".join(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
