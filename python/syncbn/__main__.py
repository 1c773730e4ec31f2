"""python -m syncbn COMMAND."""

import argparse
import contextlib
import math
import sys
from collections.abc import Sequence

from . import doctor


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"got {text!r}, expected a positive number of seconds")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m syncbn", description=doctor.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("doctor", help="what is active, why, and a self-test")
    command.add_argument(
        "--timeout",
        type=_seconds,
        default=doctor.TIMEOUT,
        metavar="SECONDS",
        help="limit of the self-test of two processes (%(default)g)",
    )
    return doctor.main(parser.parse_args(arguments).timeout)


if __name__ == "__main__":
    sys.exit(main())
