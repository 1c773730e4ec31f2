# SPDX-License-Identifier: Apache-2.0
"""Instructions of each pass, counted by callgrind and compared with benchmarks/counts.json.

python benchmarks/count.py PROGRAM [--update]      PROGRAM: build/bench/benchmarks/count_passes

Ends with 1 if a pass takes more than 5 % more instructions than stored. One that takes more than
5 % fewer is named too: store the new counts then. --update stores what was counted.

Counts belong to one compiler, its flags and one instruction set (callgrind 3.19 knows no AVX-512,
so AVX2 is counted); other ones are not compared. The program is single-threaded and its buffers
begin at pages, so counts of one build differ by a few instructions at most.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

STORED = Path(__file__).with_name("counts.json")
LIMIT = 5  # percent


def parse_profile(text: str) -> tuple[str, int]:
    """The label and the number of instructions of one of callgrind's profiles."""
    label = re.search(r"^desc: Trigger: Client Request: (.*)$", text, re.MULTILINE)
    total = re.search(r"^totals: (\d+)$", text, re.MULTILINE)
    if label is None or total is None:
        raise SystemExit("callgrind's profile: expected a label and a total in it")
    return label[1], int(total[1])


def count(program: Path) -> dict:
    """The build, the instruction set, and instructions by "pass|shape|dtype|layout"."""
    if shutil.which("valgrind") is None:
        raise SystemExit("valgrind was not found: install it (Debian and Ubuntu: valgrind)")
    if not program.exists():
        raise SystemExit(f"{program} was not found: CMake builds it where valgrind's headers are")
    with tempfile.TemporaryDirectory() as folder:
        command = ["valgrind", "--tool=callgrind", "--collect-atstart=no", "--quiet"]
        run = subprocess.run(
            [*command, f"--callgrind-out-file={folder}/profile", program.resolve()],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        build, instruction_set = run.stdout.splitlines()
        # The last profile, without a number in its name, is the rest of the program.
        profiles = [parse_profile(p.read_text()) for p in Path(folder).glob("profile.*")]
    return {
        "build": build,
        "instruction set": instruction_set,
        "instructions": dict(sorted(profiles)),
    }


def compare(counted: dict, stored: dict) -> tuple[list[str], list[str]]:
    """Passes that became slower, which is an error, and other differences."""
    for key in ("build", "instruction set"):
        if counted[key] != stored[key]:
            raise SystemExit(
                f"{key}: got {counted[key]}, counts are stored for {stored[key]}; they cannot be "
                "compared (ARGS=--update stores those of this one)"
            )
    new, old = counted["instructions"], stored["instructions"]
    slower, other = [], []
    for name in sorted(new.keys() | old.keys()):
        if name not in new or name not in old:
            other.append(f"{name}: only {'stored' if name in old else 'counted'}")
        elif 100 * abs(new[name] - old[name]) > LIMIT * old[name]:
            change = 100 * (new[name] - old[name]) / old[name]
            where = slower if change > 0 else other
            where.append(f"{name}: {old[name]:,} -> {new[name]:,} ({change:+.1f} %)")
    return slower, other


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", type=Path)
    parser.add_argument("--update", action="store_true", help="store what was counted")
    arguments = parser.parse_args()
    counted = count(arguments.program)
    if arguments.update:
        STORED.write_text(json.dumps(counted, indent=1) + "\n")
        print(f"{len(counted['instructions'])} counts are in {STORED}")
        return 0
    slower, other = compare(counted, json.loads(STORED.read_text()))
    for line in other:
        print(f"differs: {line}")
    for line in slower:
        print(f"SLOWER: {line}")
    print(f"{len(counted['instructions'])} counts, {len(slower)} above {LIMIT} % more")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
