# SPDX-License-Identifier: Apache-2.0
"""Copies GoogleTest's sources, 1 MB, to build/googletest, where scripts/gpu_check.py finds them on
a machine that has neither the package nor a network: `make googletest`.

From the folder that is given, else from Debian's package googletest, or from what an earlier build
has fetched.
"""

import re
import shutil
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
CARRIED = PROJECT / "build" / "googletest"
PARTS = ("CMakeLists.txt", "googletest/CMakeLists.txt")
FOLDERS = ("googletest/cmake", "googletest/include", "googletest/src")
LEAST = (1, 12)  # as cmake/GTest.cmake has it


def problem(folder: Path) -> str:
    """Why these are no sources that can be built, or nothing."""
    for part in (*PARTS, *FOLDERS):
        if not (folder / part).exists():
            return f"{folder} has no {part}"
    text = (folder / "CMakeLists.txt").read_text(encoding="utf-8")
    version = re.search(r"GOOGLETEST_VERSION (\d+)\.(\d+)", text)
    if version is None or tuple(map(int, version.groups())) < LEAST:
        return f"{folder} is older than {'.'.join(map(str, LEAST))}"
    return ""


def prepare(sources: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    for part in PARTS:
        (target / part).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(sources / part, target / part)
    for folder in FOLDERS:
        shutil.copytree(sources / folder, target / folder)


def main() -> int:
    found = [Path("/usr/src/googletest"), *sorted((PROJECT / "build").glob("*/googletest-*"))]
    problems = []
    for folder in map(Path, sys.argv[1:]) if sys.argv[1:] else found:
        if reason := problem(folder):
            problems.append(reason)
            continue
        prepare(folder, CARRIED)
        print(f"{CARRIED}: from {folder}")
        return 0
    print("\n".join(problems), file=sys.stderr)
    print("Debian and Ubuntu have the sources in the package googletest", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
