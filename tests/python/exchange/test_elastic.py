# SPDX-License-Identifier: Apache-2.0
"""A job under torchrun that loses a rank: the launcher starts both ranks again, the layers make
their groups anew, and nothing of the first attempt is left on the node."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

JOB = Path(__file__).with_name("elastic_job.py")


def _start_time(process: int) -> str | None:
    """When a process began, which tells it from a later one of the same number; None if it is no
    more, or has ended and nobody has asked for its exit code yet."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


def _shared_memory() -> set[str]:
    """Its names, without the semaphores of Python programs that run beside this one."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


@pytest.mark.weekly
def test_a_killed_rank_is_started_again_and_nothing_is_left(tmp_path):
    shared = _shared_memory()
    began = time.monotonic()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--max-restarts", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    job = subprocess.run(
        [*command, str(JOB), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=280,
        # Otherwise the launcher keeps its store, where the default group of the second attempt may
        # find addresses of the first.
        env=os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    )
    seconds = time.monotonic() - began
    assert job.returncode == 0, job.stderr
    started = {path.name: path.read_text() for path in tmp_path.glob("started.*")}
    assert sorted(started) == [f"started.{i}.{rank}" for i in range(2) for rank in range(2)]
    assert all(text.endswith(" shared memory") for text in started.values()), started
    # The first attempt did not come through; the second did, with the same numbers on both ranks.
    finished = {path.name: path for path in tmp_path.glob("finished.*")}
    assert sorted(finished) == ["finished.1.0.pt", "finished.1.1.pt"]
    first, second = (torch.load(path) for path in finished.values())
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
    assert first["1.num_batches_tracked"] == 8

    assert _shared_memory() <= shared
    processes = [int(text.split()[0]) for text in started.values()]
    assert [p for p in processes if _start_time(p) is not None] == []
    # Two starts of two processes on a busy machine, and nobody waits for the limit of 300 s.
    assert seconds < 200, f"{seconds:.0f} s"
