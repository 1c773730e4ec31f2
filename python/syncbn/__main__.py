# SPDX-License-Identifier: Apache-2.0
"""python -m syncbn COMMAND."""

import argparse
import contextlib
import math
import pathlib
import sys
from collections.abc import Sequence

from .models import doctor


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"got {text!r}, expected a positive number of seconds")


def _cmake_dir() -> int:
    folder = pathlib.Path(__file__).parent / "cmake"
    if not folder.is_dir():
        print(
            f"--cmake-dir: got {folder.parent}, which has no CMake package, expected a syncbn that "
            "pip installed",
            file=sys.stderr,
        )
        return 1
    print(folder)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m syncbn", description=doctor.__doc__)
    parser.add_argument(
        "--cmake-dir",
        action="store_true",
        help="print the folder of the CMake package, for cmake -D syncbn_DIR=...",
    )
    commands = parser.add_subparsers(dest="command")
    command = commands.add_parser("doctor", help="what is active, why, and a self-test")
    command.add_argument(
        "--timeout",
        type=_seconds,
        default=doctor.TIMEOUT,
        metavar="SECONDS",
        help="limit of the self-test of two processes (%(default)g)",
    )
    given = parser.parse_args(arguments)
    if given.cmake_dir:
        return _cmake_dir()
    if given.command is None:
        parser.error("command: got none, expected doctor or --cmake-dir")
    return doctor.main(given.timeout)


if __name__ == "__main__":
    sys.exit(main())
