"""benchmarks/bench_gpu.py, which needs a GPU, in what it does where a part cannot be measured."""

import json
import sys

import pytest
import torch
import torch.distributed as dist

from support import PROJECT

sys.path.insert(0, str(PROJECT / "benchmarks"))
import bench_gpu

ROUNDS = 3


def measured(shape, dtype, layout: str, rounds: int, sync: bool) -> dict[str, list[float]]:
    """As measure(), where syncbn takes 2 us, the others 4 and the copy 1."""
    others = ("BatchNorm2d", "SyncBatchNorm") if sync else ("BatchNorm2d",)
    times = {f"{name} {d}": 4.0 for name in others for d in bench_gpu.DIRECTIONS}
    times |= {"copy": 1.0} | {f"syncbn {d}": 2.0 for d in bench_gpu.DIRECTIONS}
    return {name: [time] * rounds for name, time in times.items()}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(): the exit code and what was written, for two layers of one type."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Test GPU")
    monkeypatch.setattr(bench_gpu, "SHAPES", {"network": [(8, 4, 3, 3)]})
    monkeypatch.setattr(bench_gpu, "measure", measured)
    path = tmp_path / "figures.json"
    arguments = ["--dtype", "float32", "--rounds", str(ROUNDS), "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["bench_gpu.py", *arguments])

    def run_it():
        return bench_gpu.main(), json.loads(path.read_text())

    return run_it


def test_without_nccl_only_the_columns_that_need_it_are_empty(run, monkeypatch, capsys):
    def fails(*arguments, **options):
        raise dist.DistBackendError("NCCL error: unhandled system error")

    monkeypatch.setattr(dist, "init_process_group", fails)
    code, written = run()
    assert code == 0
    reason = "DistBackendError: NCCL error: unhandled system error"
    assert written["not measured"] == {"SyncBatchNorm": reason}
    assert [layer["layout"] for layer in written["layers"]] == ["contiguous", "channels-last"]
    for layer in written["layers"]:
        assert layer["microseconds"]["syncbn forward"] == [2, 2, 2]
        assert layer["other / syncbn"]["BatchNorm2d backward"] == [2, 2, 2]
        for figures in (layer["microseconds"], layer["other / syncbn"]):
            assert figures["SyncBatchNorm forward"] is figures["SyncBatchNorm backward"] is None
    assert f"torch.nn.SyncBatchNorm is not measured: {reason}" in capsys.readouterr().out


@pytest.mark.parametrize("error, code", ((torch.OutOfMemoryError, 0), (AssertionError, 1)))
def test_layer_that_fails_leaves_the_others(error, code, run, monkeypatch):
    """A layer that is too large for the device is no failure; a wrong result is."""

    def one_fails(shape, dtype, layout, rounds, sync):
        if layout == "contiguous":
            raise error("at (0, 1)")
        return measured(shape, dtype, layout, rounds, sync)

    monkeypatch.setattr(bench_gpu, "measure", one_fails)
    monkeypatch.setattr(bench_gpu, "one_rank_group", lambda: "")
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    got, written = run()
    assert got == code and written["not measured"] == {}
    failed, other = written["layers"]
    assert failed["microseconds"] is failed["other / syncbn"] is None
    assert failed["problem"] == f"{error.__name__}: at (0, 1)"
    assert other["microseconds"]["SyncBatchNorm backward"] == [4, 4, 4] and "problem" not in other
