# SPDX-License-Identifier: Apache-2.0
"""scripts/peers_check.py on a machine without two GPUs: it refuses in a line; its cases, but for
the captured graph, run on the CPU."""

import json
import os
import subprocess
import sys

from support import PROJECT

SCRIPT = PROJECT / "scripts" / "peers_check.py"
FAKE_MACHINE = PROJECT / "tests" / "python" / "project" / "fake_machine"


def run(folder, *arguments, **more):
    environment = {**os.environ, "OUT": str(folder), **more}
    command = [sys.executable, str(SCRIPT), *arguments]
    options = {"env": environment, "capture_output": True, "text": True, "timeout": 300}
    return subprocess.run(command, **options)


def test_a_machine_without_two_gpus_is_refused_in_a_line(tmp_path):
    for gpus, more in (
        (0, {"CUDA_VISIBLE_DEVICES": ""}),
        (1, {"PYTHONPATH": os.pathsep.join([str(FAKE_MACHINE), os.environ.get("PYTHONPATH", "")])}),
    ):
        done = run(tmp_path, **more)
        text = f"peers-check: nothing was run: got {gpus} GPUs, expected 2 or more\n"
        assert (done.returncode, done.stdout) == (2, text), done.stderr
    assert not list(tmp_path.iterdir())


def test_cases_run_on_the_cpu(tmp_path):
    done = run(tmp_path, "--rehearse")
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.iterdir()
    report = json.loads(path.read_text())
    assert report["ranks"] == 2 and not any(c["problem"] for c in report["cases"].values())
    assert set(report["cases"]) == {
        "bits",
        "beside_ddp",
        "a_rank_that_does_not_come",
        "a_rank_that_is_killed",
    }
    assert "rank 1 did not come" in done.stdout and "rank 1 is gone" in done.stdout
