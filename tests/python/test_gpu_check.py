"""scripts/gpu_check.py, which needs a GPU, in what it does without one."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

PROJECT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(PROJECT / "scripts"))
import gpu_check  # noqa: E402

JUNIT = '<testsuites><testsuite tests="{}" skipped="{}" failures="0"/></testsuites>'


@pytest.fixture(autouse=True)
def logs(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "LOGS", tmp_path / "logs")
    return tmp_path / "logs"


def python(code: str) -> list[str]:
    return [sys.executable, "-I", "-c", code]


def test_failed_stage_is_recorded_and_the_rest_runs():
    def broken() -> str:
        raise RuntimeError("no report")

    results = gpu_check.run_all(
        [
            gpu_check.Stage("fails", 30, [python("print('why'); exit(3)"), python("never")]),
            gpu_check.Stage("absent", 30, [["/no/such/program"]]),
            gpu_check.Stage("no report", 30, [python("")], broken),
            gpu_check.Stage(
                "works",
                30,
                [python("import os; assert os.environ['A'] == 'b'")],
                environment={"A": "b"},
            ),
        ],
        60,
    )
    assert [result["ok"] for result in results] == [False, False, False, True]
    assert results[0]["summary"] == "exit code 3" and "why" in results[0]["log"]
    assert "never" not in results[0]["log"]
    assert "/no/such/program" in results[1]["log"]
    assert results[2]["summary"] == "RuntimeError: no report"
    text = gpu_check.table(results)
    assert text.count("FAILED") == 3 and text.splitlines()[3].startswith("works      ok")


def test_time_limits_end_children_too(logs):
    marker = logs.parent / "child"
    child = f"import time, pathlib; time.sleep(3); pathlib.Path({str(marker)!r}).touch()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-I', '-c', {child!r}])"
    start = time.monotonic()
    late = gpu_check.Stage("late", 1.5, [python(parent)])
    results = gpu_check.run_all([late], 60)
    assert results[0]["summary"].startswith("not done after")
    # The time of all: what comes after it does not start.
    results = gpu_check.run_all([gpu_check.Stage("too late", 30, [python("")])], 0)
    assert results[0]["summary"] == "no time left"
    time.sleep(max(0, start + 4 - time.monotonic()))
    assert not marker.exists()


def test_tests_that_were_all_skipped_are_a_failure(tmp_path):
    report = tmp_path / "report.xml"
    report.write_text(JUNIT.format(5, 1))
    assert gpu_check.passed(report) == "4 passed, 1 skipped"
    report.write_text(JUNIT.format(5, 5))
    with pytest.raises(RuntimeError, match="5 tests, all of them skipped"):
        gpu_check.passed(report)


def test_every_stage_names_what_exists():
    wanted = gpu_check.stages("native")
    assert sum(stage.seconds for stage in wanted if stage.name in ("build", "benchmarks")) < 540
    commands = [word for stage in wanted for command in stage.commands for word in command]
    files = [word for word in commands if word.endswith(".py")]
    assert files and all(Path(file).is_file() for file in files)
    assert any("test_cuda_graphs.py" in file for file in files)


def test_without_a_gpu_one_line_and_exit_code_2():
    done = subprocess.run(
        [sys.executable, str(PROJECT / "scripts" / "gpu_check.py")],
        capture_output=True,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 2 and done.stderr == ""
    assert done.stdout == (
        f"gpu-check: nothing was run: PyTorch {torch.__version__} finds no GPU here\n"
    )


@pytest.mark.parametrize("fails", (False, True))
def test_results_are_written_with_versions_and_device(fails, tmp_path, monkeypatch, capsys):
    figures = gpu_check.LOGS / "benchmarks.json"
    write = f"import pathlib; pathlib.Path({str(figures)!r}).write_text('[1]'); print('the table')"
    wanted = [
        gpu_check.Stage("first", 30, [python(f"exit({int(fails)})")], lambda: "fine"),
        gpu_check.Stage("benchmarks", 30, [python(write)]),
    ]
    monkeypatch.setattr(gpu_check, "stages", lambda architectures: wanted)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Test GPU (1)")
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    assert gpu_check.main() == int(fails)
    (path,) = (tmp_path / "out").iterdir()
    assert path.name.startswith("gpu-check-Test-GPU-1-")
    report = json.loads(path.read_text())
    assert report["device"] == "Test GPU (1)" and report["benchmarks"] == [1]
    assert report["versions"]["torch"] == torch.__version__
    assert [stage["ok"] for stage in report["stages"]] == [not fails, True]
    printed = capsys.readouterr().out
    assert "the table" in printed and f"written: {path}" in printed
