# SPDX-License-Identifier: Apache-2.0
"""Agents of torchrun that are killed, and others that join: the job ends with the bits of one that
nobody disturbed."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rank_runs import free_port
from support import PROJECT

STEPS = 240
JOB = [PROJECT / "examples" / "21_shares.py", "--worker", "unet", str(STEPS)]


def _torchrun(folder: Path, *options: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "torch.distributed.run", *options, *JOB, folder, "-1"]
    with open(folder / "log", "a") as log:
        return subprocess.Popen(
            list(map(str, command)),
            # Otherwise the next attempt may find addresses of the last one in the launcher's store.
            env=os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            stdout=log,
            stderr=log,
        )


def _kill(agent: subprocess.Popen) -> None:
    """As where its machine is lost: with its workers, which are in sessions of their own."""
    workers = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    for process in (agent.pid, *map(int, workers)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    agent.wait()


def _ran(folder: Path) -> list[int]:
    """The numbers of processes so far."""
    with contextlib.suppress(FileNotFoundError):
        return [int(line.split()[0]) for line in (folder / "ran").read_text().splitlines()]
    return []


def _listens(port: int) -> bool:
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0


def _until(condition, seconds: float, folder: Path) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, (folder / "log").read_text()[-3000:]
        time.sleep(0.1)


@pytest.mark.weekly
def test_agents_come_and_go_exact(tmp_path):
    whole, folder = tmp_path / "whole", tmp_path / "elastic"
    whole.mkdir()
    folder.mkdir()
    assert _torchrun(whole, "--standalone", "--nproc-per-node=1").wait(600) == 0

    settings = "last_call_timeout=5"
    options = ("--nnodes=1:3", "--nproc-per-node=1", "--max-restarts=9", "--rdzv-id=shares")
    options += ("--rdzv-backend=c10d", f"--rdzv-conf={settings}")
    port = free_port()
    options += (f"--rdzv-endpoint=127.0.0.1:{port}",)
    agents = [_torchrun(folder, *options)]  # has the rendezvous
    try:
        _until(lambda: _listens(port), 60, folder)
        agents += [_torchrun(folder, *options) for _ in range(2)]
        checkpoint = folder / "checkpoint.pt"
        _until(lambda: 3 in _ran(folder) and checkpoint.exists(), 180, folder)
        _kill(agents.pop())
        _until(lambda: 2 in _ran(folder), 180, folder)
        saved = checkpoint.stat().st_mtime
        _until(lambda: checkpoint.stat().st_mtime > saved, 180, folder)
        agents.append(_torchrun(folder, *options))
        _until(lambda: _ran(folder).count(3) >= 2, 180, folder)
        for agent in agents:
            assert agent.wait(600) == 0, (folder / "log").read_text()[-3000:]
    finally:
        for agent in agents:
            if agent.poll() is None:
                _kill(agent)
    assert (folder / "hash").read_text() == (whole / "hash").read_text()
