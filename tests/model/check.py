# SPDX-License-Identifier: Apache-2.0
"""Checks shared_barrier.pml with spin: python check.py. The model has no error in any order of its
steps, and the same model with a planted defect has the error that the defect leads to."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic
from typing import NamedTuple

MODEL = Path(__file__).with_name("shared_barrier.pml")


class Run(NamedTuple):
    ranks: int
    faults: int
    barriers: int
    futex: bool = False
    defect: str = ""

    def defines(self) -> list[str]:
        sizes = {"RANKS": self.ranks, "FAULTS": self.faults, "BARRIERS_IN_ALL": self.barriers}
        flags = ["FUTEX"] * self.futex + [self.defect] * bool(self.defect)
        return [f"-D{name}={value}" for name, value in sizes.items()] + [f"-D{x}" for x in flags]

    def __str__(self) -> str:
        what = f"{self.ranks} ranks, {self.barriers} barriers, faults: at most {self.faults}"
        return what + ", sleep by futex" * self.futex + f", {self.defect}" * bool(self.defect)


# How spin begins to tell an error, by the property.
ALIKE = "assertion violated ((outcome["  # an exchange ends alike on all ranks
BLOCKED = "invalid end state"  # a live rank waits for ever
LIMIT = "assertion violated (rounds<="  # a wait goes on though there is an end to see
SLOTS = "assertion violated ((brought=="  # a slot is read that is not whole
SAID = "assertion violated (((message["  # and so is what it says of itself
BROKEN = "assertion violated ((state&7)==0)"  # a broken group is changed
REASON = "assertion violated (reason["  # a reason is read that is not whole
DEFECTS = {
    "ONE_SLOT": SAID,
    "OWN_END": ALIKE,
    "ARRIVES_BEFORE_IT_FILLS": SLOTS,
    "STATE_WITHOUT_COMPARING": BROKEN,
    "ARRIVALS_DECIDE": ALIKE,
    "BROKEN_BEFORE_MET": ALIKE,
    "ONLY_ARRIVING_RANKS_MEET": LIMIT,
    "WAITS_AFTER_THE_LAST_BARRIER": BLOCKED,
    "DEATHS_UNSEEN": LIMIT,
    "CLOCK_UNSEEN": LIMIT,
    "SILENT_INTERRUPT": BLOCKED,
    "REASON_AFTER_STATE": REASON,
    "REASON_WRITTEN_AGAIN": REASON,
    "BELL_AFTER_STATE": BLOCKED,
}

RUNS = [
    Run(3, 2, 2),
    Run(3, 1, 3),
    Run(2, 2, 4),
    Run(3, 1, 2, futex=True),
    Run(2, 2, 4, futex=True),
    *(Run(2, 1, 3, name == "BELL_AFTER_STATE", name) for name in DEFECTS),
]


def check(run: Run) -> tuple[bool, str]:
    """Whether spin found what it should, and a line that says what it found."""
    begin = monotonic()
    with tempfile.TemporaryDirectory() as folder:

        def call(*command: str) -> str:
            result = subprocess.run(
                command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            if result.returncode != 0:
                raise SystemExit(f"{run}: {' '.join(command)} failed:\n{result.stdout}")
            return result.stdout

        shutil.copy(MODEL, folder)
        call("spin", "-a", *run.defines(), MODEL.name)
        optimize = "-O0" if run.defect else "-O2"  # a defect is found in less time than this takes
        call("cc", optimize, "-w", "-DSAFETY", "-DMEMLIM=4096", "-o", "pan", "pan.c")
        text = call("./pan", "-m100000")
        error = re.search(r"^pan:1: (.*)", text, re.M)
        steps = call("spin", "-t", "-p", *run.defines(), MODEL.name) if error else ""
    if error:
        found = error[1]
    elif re.search(r"not completed|too small", text) or "errors: 0" not in text:
        found = f"not searched whole:\n{text}"
    else:
        found = "no error"
    right = found.startswith(DEFECTS.get(run.defect, "no error"))
    states = int(re.search(r"(\d+) states, stored", text)[1])
    line = f"{run}: {found}, {states:,} states, {monotonic() - begin:.1f} s"
    return right, line if right else f"{line}\n{steps}WRONG: {run}"


def main() -> int:
    if missing := [tool for tool in ("spin", "cc") if shutil.which(tool) is None]:
        print(f"make model needs {' and '.join(missing)} (Debian: apt-get install spin gcc)")
        return 1
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        rights = []
        for right, line in pool.map(check, RUNS):
            print(line, flush=True)
            rights.append(right)
    return 0 if all(rights) else 1


if __name__ == "__main__":
    sys.exit(main())
