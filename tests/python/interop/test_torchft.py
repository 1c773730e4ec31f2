# SPDX-License-Identifier: Apache-2.0
"""torchft's jobs: a replica is killed, another one joins and heals, and all go on with the same
parameters and running statistics, bit for bit."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

if not hasattr(dist.ProcessGroup, "reconfigure"):
    pytest.skip("PyTorch 2.14 brought reconfigure", allow_module_level=True)
coordination = pytest.importorskip("torchft.coordination")
JOB = Path(__file__).with_name("torchft_job.py")


def test_a_replica_is_killed_and_another_one_joins():
    lighthouse = coordination.LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=1000)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def start(replica: int, dies_at: int = -1) -> subprocess.Popen:
        command = [sys.executable, str(JOB), str(replica), str(store.port), lighthouse.address()]
        command.append(str(dies_at))
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        return subprocess.Popen(command, text=True, **pipes)

    jobs = [start(0), start(1, dies_at=5)]
    try:
        told = jobs[1].communicate(timeout=120)[0]
        assert jobs[1].returncode == -9
        jobs.append(start(2))
        told += "".join(job.communicate(timeout=120)[0] for job in (jobs[0], jobs[2]))
        assert [jobs[0].returncode, jobs[2].returncode] == [0, 0]
    finally:
        for job in jobs:
            job.kill()
        lighthouse.shutdown()
    steps: dict[int, set[str]] = {}
    errors = []
    for line in told.splitlines():
        replica, step, replicas, committed, failed, digest = line.split()
        assert replicas == "2", told
        errors += [(replica, step)] * int(failed)
        if committed == "True":
            steps.setdefault(int(step), set()).add(digest)
    assert sorted(steps) == list(range(20)), told
    assert all(len(digests) == 1 for digests in steps.values()), told
    assert errors == [("0", "5")], told
