# SPDX-License-Identifier: Apache-2.0
"""benchmarks/bench_gpu.py, which needs a GPU: on a CPU in its place (fake_machine/fake_device.py),
whose times mean nothing, and in what it does where a part cannot be measured."""

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from support import PROJECT

sys.path.insert(0, str(PROJECT / "benchmarks"))
import bench_gpu
import gpu_timing

FAKE_MACHINE = PROJECT / "tests" / "python" / "project" / "fake_machine"
KERNELS = [
    "copy",
    "sums",
    "finalize",
    "finalize + normalize",
    "running statistics",
    "backward sums",
    "backward finalize",
    "backward finalize + input gradient",
    "normalize",
    "input gradient",
]

# A real run, of shapes that a CPU is done with soon.
ON_THE_FAKE_DEVICE = """
import sys
sys.path.insert(0, {folder!r})
import bench_gpu, gpu_timing
bench_gpu.SHAPES = {{"net": [(4, 3, 5, 5)], "2-D": [(6, 4)]}}
gpu_timing.REPLAYS, gpu_timing.WARM_UP = 2, 0
sys.exit(bench_gpu.main())
"""


def test_every_kernel_and_layer_is_measured(tmp_path):
    """In every type and layout; what this device does not have is null, with the reason."""
    path = tmp_path / "figures.json"
    text = ON_THE_FAKE_DEVICE.format(folder=str(PROJECT / "benchmarks"))
    command = [sys.executable, "-c", text, "--json", str(path)]
    environment = os.environ | {"PYTHONPATH": str(FAKE_MACHINE)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads(path.read_text())
    reason = "RuntimeError: the fake device has no NCCL"
    assert written["not measured"] == {"SyncBatchNorm": reason}
    layers = written["layers"]
    assert [(tuple(row["shape"]), row["dtype"], row["layout"]) for row in layers] == [
        *(((4, 3, 5, 5), d, way) for d in ("float32", "bfloat16") for way in LAYOUTS),
        *(((6, 4), d, "contiguous") for d in ("float32", "bfloat16")),
    ]
    directions = [f"{name} {d}" for name in ("syncbn", "BatchNorm") for d in bench_gpu.DIRECTIONS]
    for layer in layers:
        rows = layer["graph"]
        absent = {f"SyncBatchNorm {d}" for d in bench_gpu.DIRECTIONS}
        assert set(rows) == {*KERNELS, *directions} | absent
        assert all(rows[name] == {"us": None, "problem": reason} for name in absent)
        for name in ("sums", *directions):
            assert (
                rows[name]["us"] > 0
                and rows[name]["bytes"] > 0
                and rows[name]["of copy"] is not None
            )
        assert rows["normalize"]["difference"] is True
        size = torch.tensor(layer["shape"]).prod().item() * (
            4 if layer["dtype"] == "float32" else 2
        )
        assert [rows[n]["bytes"] for n in ("copy", "sums", "input gradient")] == [
            *(2 * size, size, 3 * size)
        ]
        assert layer["eager"]["syncbn"]["us"] > 0
        assert layer["eager"]["SyncBatchNorm"] == {"us": None, "problem": reason}
    for name in (*KERNELS, *directions, "syncbn, eager step"):
        assert f"\n  {name} " in done.stdout
    assert f"SyncBatchNorm forward                not measured: {reason}" in done.stdout


LAYOUTS = ("contiguous", "channels-last")


def test_rows_have_bytes_a_second_and_the_part_of_the_copy():
    row = gpu_timing.row([4.0, 5.0, 6.0], 10_000, 4000.0)
    assert row == {
        "us": 5.0,
        "quartiles": [4.0, 6.0],
        "bytes": 10_000,
        "GB/s": 2.0,
        "of copy": 0.5,
    }
    assert gpu_timing.rates(-1.0, 10, 4.0) == {"bytes": 10, "GB/s": None, "of copy": None}


def measured(shape, dtype, layout: str, no_sync: str) -> dict:
    row = gpu_timing.row([2.0, 2.0], 8, 4.0)
    return {"beyond L2": True, "graph": {"copy": row}, "eager": {"syncbn": row}}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(): the exit code and what was written, for two layers of one type."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Test GPU")
    monkeypatch.setattr(bench_gpu, "SHAPES", {"network": [(8, 4, 3, 3)]})
    monkeypatch.setattr(bench_gpu, "measure", measured)
    monkeypatch.setattr(bench_gpu, "one_rank_group", lambda: "")
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    path = tmp_path / "figures.json"

    def run_it(*more: str):
        arguments = ["--dtype", "float32", "--json", str(path), *more]
        monkeypatch.setattr(sys, "argv", ["bench_gpu.py", *arguments])
        return bench_gpu.main(), json.loads(path.read_text())

    return run_it


@pytest.mark.parametrize("error, code", ((torch.OutOfMemoryError, 0), (AssertionError, 1)))
def test_layer_that_fails_leaves_the_others(error, code, run, monkeypatch):
    """A layer that is too large for the device is no failure; a wrong result is."""

    def one_fails(shape, dtype, layout, no_sync):
        if layout == "contiguous":
            raise error("at (0, 1)")
        return measured(shape, dtype, layout, no_sync)

    monkeypatch.setattr(bench_gpu, "measure", one_fails)
    got, written = run()
    assert got == code and written["not measured"] == {}
    failed, other = written["layers"]
    assert failed["problem"] == f"{error.__name__}: at (0, 1)" and "graph" not in failed
    assert other["graph"]["copy"]["us"] == 2 and "problem" not in other


def test_kernel_that_fails_leaves_the_others_and_is_a_failure(run, monkeypatch):
    def without_sums(*arguments):
        layer = measured(*arguments)
        return layer | {"graph": layer["graph"] | {"sums": bench_gpu.no_row("capture failed")}}

    monkeypatch.setattr(bench_gpu, "measure", without_sums)
    code, written = run()
    assert code == 1 and written["layers"][0]["graph"]["copy"]["us"] == 2
    assert written["layers"][0]["graph"]["sums"] == {"us": None, "problem": "capture failed"}


def test_no_layer_is_begun_when_the_time_is_over(run, capsys):
    code, written = run("--seconds", "0")
    assert code == 0 and written["kernels"] == []
    assert [layer["problem"] for layer in written["layers"]] == ["not measured: no time left"] * 2
    assert "network (8, 4, 3, 3) float32 contiguous: not measured" in capsys.readouterr().out


def test_group_that_cannot_be_made_is_a_reason(monkeypatch):
    def fails(*arguments, **options):
        raise dist.DistBackendError("NCCL error: unhandled system error")

    monkeypatch.setattr(dist, "init_process_group", fails)
    assert bench_gpu.one_rank_group() == "DistBackendError: NCCL error: unhandled system error"
