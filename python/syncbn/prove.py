# SPDX-License-Identifier: Apache-2.0
"""python -m syncbn prove: runs a program that trains by syncbn.Shares on several numbers of
processes, and says where its runs differ first."""

import argparse
import os
import re
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .models.recording import first_difference, hash_of, record
from .shares import Shares

#: The last line of a traceback, as torchrun prints it.
_ERROR = re.compile(r"^(?:\[rank\d+\]: )?(\w[\w.]*(?:Error|Lost|Timeout): \S.*)", re.MULTILINE)


def prove(processes: list[int], steps: int, program: list[str]) -> int:
    """Runs the program as it stands, under torchrun, and stops each run after so many steps. Prints
    a hash of what was noted for each number of processes, and the first difference. Gives the exit
    code: 0 if there is none, 2 where a run did not come to its end."""
    with tempfile.TemporaryDirectory() as folder:
        notes = {p: str(Path(folder, f"{p} process{'es' * (p > 1)}")) for p in processes}
        for number, path in notes.items():
            kind = f"process{'es' * (number > 1)}"
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            own = ["-m", "syncbn.prove", "--worker", path, "--steps", str(steps), *program]
            log = Path(folder, "log")
            with open(log, "w") as output:
                done = subprocess.run(
                    [*launcher, f"--nproc-per-node={number}", *own],
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            if done.returncode or not os.path.exists(path):
                text = log.read_text()
                print(text[-4000:])
                # What a process said stands before what torchrun says of the processes.
                errors = _ERROR.findall(text) or [f"exit code {done.returncode}"]
                print(f"{number:3} {kind} ended before step {steps}: {errors[-1]}")
                return 2
            print(f"{number:3} {kind:9} {hash_of(path)}", flush=True)
        first, *others = notes.values()
        for path in (first, *others):  # also where the ranks of the first one differ
            difference = first_difference(first, path)
            if difference is not None:
                print(f"the first difference: {difference.replace(f'{folder}{os.sep}', '')}")
                return 1
    print(f"the same bits after {steps} steps")
    return 0


def _worker(path: str, steps: int, program: list[str]) -> None:
    """Runs the program in this process, until its first Shares has made so many steps."""
    step, recorded = Shares.step, list[Any]()

    def noted(self: Shares, *arguments: Any) -> Any:
        if not recorded:
            block = record(self, path)
            block.__enter__()
            recorded.append((self, block))
        training, block = recorded[0]
        if self is training and self.steps == steps:
            raise SystemExit(0)
        return step(self, *arguments)

    Shares.step = noted  # type: ignore[method-assign]
    sys.argv = program
    sys.path.insert(0, str(Path(program[0]).parent))
    try:
        runpy.run_path(program[0], run_name="__main__")
    finally:
        for _, block in recorded:
            block.__exit__(None, None, None)
    if dist.is_initialized():
        dist.destroy_process_group()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m syncbn prove", description=prove.__doc__)
    parser.add_argument("--processes", default="1,2", help="numbers of them (%(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="of each run (%(default)d)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("program", nargs=argparse.REMAINDER, help="a file, and its arguments")
    given = parser.parse_args(arguments)
    processes = [int(text) for text in given.processes.split(",") if text.isdecimal()]
    if not processes or min(*processes, given.steps) < 1 or not given.program:
        parser.error("expected --processes 1,2 --steps 3 FILE ARGUMENTS")
    if given.worker:
        _worker(given.worker, given.steps, given.program)
        return 0
    return prove(processes, given.steps, given.program)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
