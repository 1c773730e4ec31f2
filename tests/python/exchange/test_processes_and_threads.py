# SPDX-License-Identifier: Apache-2.0
"""Forked and spawned processes, data loaders' workers, threads, the interpreter's end, and a
process without PyTorch and OpenMP. With ranks: rank_cases_processes.py; memory over steps:
test_flat_memory.py."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import process_scenarios
import syncbn
from rank_cases_processes import Normalized
from rank_runs import functions_of, quick_context, run_ranks
from syncbn import _build

LIBRARIES = Path(_build.__file__).parent / "lib"
SCENARIOS = functions_of(process_scenarios, "scenario_")


def _scenario(rank: int, name: str, said: Path) -> None:
    with open(said, "w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    SCENARIOS[name]()


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name, tmp_path):
    """Ends with exit code 0, silently, and leaves nothing in /dev/shm. The interpreter's end needs
    a program of its own; the others are forked from a process that has imported the package."""
    before, said = set(os.listdir("/dev/shm")), tmp_path / "said"
    if name.startswith("exit_"):
        with open(said, "w", encoding="utf-8") as file:
            command = [sys.executable, process_scenarios.__file__, name]
            paths = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
            code = subprocess.run(command, env=paths, stdout=file, stderr=file, timeout=200)
            code = code.returncode
    else:
        (code,) = run_ranks(quick_context(), _scenario, 1, (name, said), 200)
    text = said.read_text(encoding="utf-8")
    assert code == 0, text
    assert "Error" not in text and "terminate" not in text, text
    assert not [n for n in set(os.listdir("/dev/shm")) - before if "syncbn" in n]


@pytest.mark.parametrize(
    ("method", "training"),
    (("fork", False), ("fork", True), ("spawn", True)),
)
def test_workers_of_a_loader_exact(method, training):
    """Two epochs of persistent workers, each with its copy of the layer."""
    layer = syncbn.SyncBatchNorm(3, momentum=0.0).train(training)
    samples = Normalized(layer)
    expected = [samples[i] for i in range(len(samples))]
    loader = DataLoader(
        samples, num_workers=2, persistent_workers=True, multiprocessing_context=method
    )
    for _ in range(2):
        for i, batch in enumerate(loader):
            assert torch.equal(batch[0], expected[i])


def needed(library: Path) -> list[str]:
    lines = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True)
    return [line.split("[")[1][:-1] for line in lines.stdout.splitlines() if "(NEEDED)" in line]


def test_no_library_needs_openmp():
    """PyTorch brings its own."""
    libraries = list(LIBRARIES.glob("*.so*"))
    assert libraries
    for library in libraries:
        assert not [n for n in needed(library) if "omp" in n], library


_ALONE = """
import ctypes, _ctypes, os, sys

def use(path):
    core = ctypes.CDLL(path)
    pool = ctypes.c_void_p()
    assert core.syncbn_thread_pool_create(4, ctypes.byref(pool)) == 0
    core.syncbn_executor_destroy(pool)
    assert core.syncbn_thread_pool_create(0, ctypes.byref(pool)) != 0
    core.syncbn_last_error.restype = ctypes.c_char_p
    assert b"threads" in core.syncbn_last_error()
    return core

first, second = use(sys.argv[1]), use(sys.argv[2])  # two users, each with its own copy
maps = open("/proc/self/maps").read()
assert sys.argv[1] in maps and sys.argv[2] in maps and "omp" not in maps and "torch" not in maps
for _ in range(20):
    for path, core in zip(sys.argv[1:], (first, second)):
        _ctypes.dlclose(core._handle)
        use(path)
    first, second = use(sys.argv[1]), use(sys.argv[2])
    for path in sys.argv[1:]:
        _ctypes.dlclose(use(path)._handle)
assert len(os.listdir("/proc/self/task")) == 1
"""


def test_the_core_works_without_pytorch_and_openmp(tmp_path):
    """Loaded by two users, closed and loaded again; its threads end with their pool."""
    core = shutil.copy(LIBRARIES / "libsyncbn.so", tmp_path / "one.so")
    other = shutil.copy(core, tmp_path / "two.so")
    command = [sys.executable, "-I", "-S", "-c", _ALONE, core, other]
    done = subprocess.run(command, env={}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
