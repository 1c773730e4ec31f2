# SPDX-License-Identifier: Apache-2.0
"""Runs the Python blocks of a page in order, as one program on four ranks of this machine, and
compares what rank 0 prints with the page: the output of a block is the block without a kind behind
it, if there is one.

    python scripts/tour.py docs/contrastive.md            # the exit status is 1 where they differ
    python scripts/tour.py docs/contrastive.md --write    # writes outputs and figures into docs/
"""

import argparse
import contextlib
import difflib
import io
import os
import re
import socket
import sys
import tempfile
from pathlib import Path

import torch
import torch.multiprocessing as mp

RANKS = 4
PROJECT = Path(__file__).resolve().parents[1]
IMAGES = PROJECT / "docs" / "images"
CELL = re.compile(r"(```python\n(.*?)^```\n)(\n```\n.*?^```\n)?", re.DOTALL | re.MULTILINE)


def run_rank(rank: int, page: str, cells: list[str], port: int, outputs: Path, figures: Path):
    """The outputs of rank 0 go to files."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), MPLBACKEND="Agg")
    os.chdir(figures)
    torch.set_num_threads(1)
    sys.path.insert(0, str(PROJECT / "examples" / "segmentation"))  # modules that a page may use
    names: dict = {"__name__": "__main__"}
    for number, cell in enumerate(cells):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(cell, f"{page}, block {number + 1}", "exec"), names)
        if rank == 0:
            (outputs / str(number)).write_text(printed.getvalue(), encoding="utf-8")


def run_page(page: Path, figures: Path) -> str:
    """The text of the page with the outputs of this run; its figures are written into a folder."""
    text = page.read_text(encoding="utf-8")
    cells = [match[2] for match in CELL.finditer(text)]
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        # Forked, so that PyTorch is imported once.
        arguments = (page.name, cells, port, Path(folder), figures)
        mp.start_processes(run_rank, arguments, RANKS, start_method="fork")
        printed = iter([(Path(folder) / str(i)).read_text("utf-8") for i in range(len(cells))])

    def with_output(match: re.Match[str]) -> str:
        output = next(printed)
        return match[1] + (f"\n```\n{output}```\n" if output else "")

    return CELL.sub(with_output, text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("page", type=Path)
    parser.add_argument("--write", action="store_true", help="into the page and docs/images")
    options = parser.parse_args()
    before = options.page.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        after = run_page(options.page, IMAGES if options.write else Path(folder))
    if options.write:
        options.page.write_text(after, encoding="utf-8")
        return 0
    lines = (text.splitlines(keepends=True) for text in (before, after))
    sys.stdout.writelines(difflib.unified_diff(*lines, "the page", "this run"))
    return int(before != after)


if __name__ == "__main__":
    sys.exit(main())
