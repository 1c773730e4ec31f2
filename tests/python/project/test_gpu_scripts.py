# SPDX-License-Identifier: Apache-2.0
"""The scripts for machines with a GPU, in what they do without one."""

import json
import subprocess
import sys

import torch

from support import PROJECT

sys.path.insert(0, str(PROJECT / "scripts"))
import gpu_check


def test_gpu_check_names_files_that_there_are():
    stages = gpu_check.building("90") + sum(gpu_check.checking(), [])
    files = [a for _, _, command in stages for a in command if a.endswith(".py")]
    assert {path.rpartition("/")[2] for path in files} == {
        *(path.name for path in (PROJECT / "tests/python/cuda").glob("test_*.py")),
        "bench_gpu.py",
        "gpu_check.py",
    }
    longest = [max(seconds for _, seconds, _ in group) for group in gpu_check.checking()]
    assert sum(longest) <= 360


def test_gpu_check_runs_nothing_without_a_gpu():
    if torch.cuda.is_available():
        return
    command = [sys.executable, str(PROJECT / "scripts" / "gpu_check.py")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "finds no GPU" in done.stdout


def test_benchmark_measures_every_layer(tmp_path):
    """On a CPU, whose times mean nothing."""
    path = tmp_path / "figures.json"
    command = [sys.executable, str(PROJECT / "benchmarks" / "bench_gpu.py"), "--device", "cpu"]
    done = subprocess.run([*command, "--rounds", "1", "--json", str(path)], capture_output=True)
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()
    figures = json.loads(path.read_text())
    layers = figures["layers"]
    assert len(layers) == 6 and len(figures["resnet50"]) == 2
    for row in layers:
        for name in ("syncbn", "torch"):
            for part in ("forward", "step", "eager"):
                assert row[f"{name} {part}"] > 0 and row[f"{name} {part}, copies"] > 0
