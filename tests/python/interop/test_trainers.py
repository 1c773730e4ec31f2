# SPDX-License-Identifier: Apache-2.0
"""Trainers of other libraries train by shares as docs/engines.md writes it, and end with the hash
of the plain loop, on any number of processes."""

import re
import subprocess
import sys

import pytest

from snippets import blocks
from support import PROJECT, library, snippets

PROGRAMS = [b.text for b in blocks(PROJECT / "docs/engines.md") if b.kind == "python shares"]
LIBRARIES = ("accelerate", "lightning", "ignite", "transformers")
WEEKLY = ("ignite", "transformers")
LOOP = """
for epoch in range(2):
    for batches in loader:
        training.step(loss, batches)
        optimizer.step()
        optimizer.zero_grad()
"""


def hashes(folder, program: str, processes: int) -> set[str]:
    """What the processes print of a program of docs/shares.md with this one in its loop's place."""
    before = snippets("docs/shares.md")[0].partition("for epoch in")[0]
    script = folder / "program.py"
    after = r"print(f'hash {syncbn.fingerprint(network)}\n', end='')"  # as one piece
    script.write_text(f"{before}\n{program}\n{after}")
    command = [sys.executable, str(script)]
    if processes > 1:
        launcher = "-m torch.distributed.run --standalone --nproc-per-node".split()
        command[1:1] = [*launcher, str(processes)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    found = re.findall(r"\bhash (\w{64})\b", done.stdout)
    assert done.returncode == 0 and len(found) == processes, (
        done.stdout[-1500:],
        done.stderr[-1500:],
    )
    return set(found)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The plain loop's hash."""
    return hashes(tmp_path_factory.mktemp("loop"), LOOP, 1)


@pytest.mark.parametrize("processes", (pytest.param(1, marks=pytest.mark.weekly), 2))
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.weekly) if n in WEEKLY else n for n in LIBRARIES]
)
def test_trains_by_shares_exact(tmp_path, expected, name, processes):
    library(name)
    program = dict(zip(LIBRARIES, PROGRAMS, strict=True))[name]
    assert f"import {name}" in program
    program += LOOP * ("training.step" not in program)  # the page's loop stays as it is
    assert hashes(tmp_path, program, processes) == expected
