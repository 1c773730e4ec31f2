# SPDX-License-Identifier: Apache-2.0
"""Ray Train's elastic workers: one is killed, a node is lost, another one joins, and the job ends
with the bits of one that nobody disturbed."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray.train")
JOB = Path(__file__).with_name("ray_job.py")


def test_workers_come_and_go_exact(tmp_path):
    job = subprocess.run(
        [sys.executable, str(JOB), str(tmp_path)], capture_output=True, text=True, timeout=900
    )
    told = [line for line in job.stdout.splitlines() if line.startswith("workers")]
    assert told == ["workers [3, 3, 2, 3] equal True"], job.stderr[-3000:]
