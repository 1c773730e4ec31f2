"""scripts/gpu_check.py, which needs a GPU, in what it does without one."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from support import PROJECT

sys.path.insert(0, str(PROJECT / "scripts"))
import gpu_check

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
    assert [result["status"] for result in results] == ["failed"] * 3 + ["ok"]
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


def test_stage_that_cannot_run_here_is_skipped_with_its_reason(monkeypatch):
    unsupported = python("print('========= Error: Device not supported'); exit(1)")
    other = python("print('race reported'); exit(1)")
    text = "Device not supported"
    results = gpu_check.run_all(
        [
            gpu_check.Stage("absent", 30, [python("exit(3)")], skip=lambda: "not installed"),
            gpu_check.Stage("other device", 30, [unsupported], unsupported=text),
            gpu_check.Stage("finds a race", 30, [other], unsupported=text),
        ],
        60,
    )
    assert [(r["status"], r["summary"]) for r in results] == [
        ("skipped", "not installed"),
        ("skipped", "Device not supported"),
        ("failed", "exit code 1"),
    ]


def test_googletest_is_sources_or_a_cmake_package_and_never_headers_alone(tmp_path, monkeypatch):
    monkeypatch.delenv("GOOGLETEST", raising=False)
    monkeypatch.setattr(gpu_check, "SYSTEM", tmp_path / "usr")
    monkeypatch.setattr(gpu_check, "PREFIXES", (tmp_path / "usr",))
    (tmp_path / "usr" / "include" / "gtest").mkdir(parents=True)
    assert gpu_check.google_test() == []
    stages = {stage.name: stage for stage in gpu_check.stages("native")}
    for name in ("C++ tests: build", "C++ tests"):
        assert stages[name].skip() == gpu_check.NO_GOOGLE_TEST
    assert not stages["build"].skip()

    sources = tmp_path / "usr" / "src" / "googletest"
    sources.mkdir(parents=True)
    (sources / "CMakeLists.txt").touch()
    assert gpu_check.google_test() == [f"-DFETCHCONTENT_SOURCE_DIR_GOOGLETEST={sources}"]
    config = tmp_path / "usr" / "lib" / "x86_64-linux-gnu" / "cmake" / "GTest"
    config.mkdir(parents=True)
    (config / "GTestConfig.cmake").touch()
    assert gpu_check.google_test() == [f"-DGTest_DIR={config}"]
    monkeypatch.setenv("GOOGLETEST", "/given")
    assert gpu_check.google_test() == ["-DFETCHCONTENT_SOURCE_DIR_GOOGLETEST=/given"]


def test_every_stage_names_what_exists():
    wanted = gpu_check.stages("native")
    commands = [word for stage in wanted for command in stage.commands for word in command]
    files = [word for word in commands if word.endswith(".py")]
    assert files and all(Path(file).is_file() for file in files)
    tests = [Path(file).name for file in files if "test_cuda" in file]
    every = sorted(path.name for path in (PROJECT / "tests" / "python" / "cuda").glob("test_*.py"))
    assert sorted(tests) == every


def test_one_stage_that_hangs_leaves_time_for_the_more_important_ones():
    """Those that come before the processes, which may hang, take at most the whole time."""
    wanted = gpu_check.stages("native")
    names = [stage.name for stage in wanted]
    first = wanted[: names.index("Python tests: several processes")]
    assert {"build", "C++ tests", "Python tests: one process", "benchmarks"} <= set(names)
    assert sum(stage.seconds for stage in first) < gpu_check.TOTAL_SECONDS <= 540


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


# What stands on PATH, and on Python's path, in the place of the real programs.
FAKE_CMAKE = """#!/bin/sh
case "$*" in
  *syncbn_gpu_check*) mkdir -p {build}/tests/cuda && touch {build}/tests/cuda/syncbn_cuda_tests ;;
  *--build*)
    mkdir -p {build}/src {build}/bindings/torch
    touch {build}/src/libsyncbn.so {build}/bindings/torch/_build.py
    touch {build}/bindings/torch/libsyncbn_torch_cuda.so ;;
esac
"""
FAKE_CTEST = """#!/bin/sh
echo "a C++ test fails"; exit 8
"""
FAKE_SANITIZER = """#!/bin/sh
case "$*" in
  *memcheck*) echo "========= ERROR SUMMARY: 0 errors" ;;
  *racecheck*) echo "========= Error: Device not supported"; exit 1 ;;
  *synccheck*) sleep 100 ;;
esac
"""
FAKE_PYTEST = """
import os, pathlib, sys, time
assert os.environ["PYTHONPATH"].startswith({overlay!r})
report = next(word.partition("=")[2] for word in sys.argv if word.startswith("--junitxml="))
if "several" in report:
    time.sleep(100)
pathlib.Path(report).write_text({junit!r})
"""
# The benchmarks end in the middle.
FAKE_TORCH = """
import pathlib, sys
pathlib.Path(sys.argv[-1]).write_text('{"not measured": {}, "layers": [1]}')
sys.exit("the device is lost")
"""


@pytest.fixture
def fake_tools(tmp_path, monkeypatch):
    build, tools, modules = tmp_path / "build", tmp_path / "bin", tmp_path / "modules"
    overlay = build / "overlay"
    texts = {
        tools / "cmake": FAKE_CMAKE.format(build=build),
        tools / "ctest": FAKE_CTEST,
        tools / "compute-sanitizer": FAKE_SANITIZER,
        modules / "pytest.py": FAKE_PYTEST.format(overlay=str(overlay), junit=JUNIT.format(5, 1)),
        modules / "torch.py": FAKE_TORCH,
    }
    for path, text in texts.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(modules))
    monkeypatch.setenv("GOOGLETEST", "/given")
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    monkeypatch.setattr(gpu_check, "BUILD", build)
    monkeypatch.setattr(gpu_check, "OVERLAY", overlay)
    monkeypatch.setattr(gpu_check, "CUDA_TESTS", build / "tests" / "cuda" / "syncbn_cuda_tests")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Test GPU (1)")
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    return tools


def limit_stages(monkeypatch, **seconds: float) -> None:
    """The real stages with shorter limits, by the first word of their names."""
    real = gpu_check.stages

    def shorter(architectures: str) -> list[gpu_check.Stage]:
        return [
            dataclasses.replace(stage, seconds=seconds.get(stage.name.split()[-1], stage.seconds))
            for stage in real(architectures)
        ]

    monkeypatch.setattr(gpu_check, "stages", shorter)


def written_report(tmp_path: Path) -> dict:
    """The one JSON that was written, with the keys and types that readers rely on."""
    (path,) = (tmp_path / "out").iterdir()
    assert path.name.startswith("gpu-check-Test-GPU-1-")
    report = json.loads(path.read_text())
    assert {key: type(value) for key, value in report.items() if key != "benchmarks"} == {
        "device": str,
        "date": str,
        "versions": dict,
        "stages": list,
    }
    assert all(isinstance(value, str) for value in report["versions"].values())
    for stage in report["stages"]:
        assert {key: type(value) for key, value in stage.items()} == {
            "name": str,
            "status": str,
            "seconds": float,
            "summary": str,
            "log": str,
        }
        assert stage["status"] in ("ok", "failed", "skipped")
        assert stage["status"] != "ok" or stage["log"] == ""
    return report


def test_whole_run_with_stages_that_hang_fail_and_are_not_supported(
    fake_tools, tmp_path, monkeypatch, capsys
):
    limit_stages(monkeypatch, processes=2, synccheck=2)
    assert gpu_check.main() == 1
    report = written_report(tmp_path)
    assert report["device"] == "Test GPU (1)"
    assert report["versions"]["torch"] == torch.__version__
    assert {stage["name"]: (stage["status"], stage["summary"]) for stage in report["stages"]} == {
        "build": ("ok", "2 libraries"),
        "Python tests: one process": ("ok", "4 passed, 1 skipped"),
        "C++ tests: build": ("ok", ""),
        "C++ tests": ("failed", "exit code 8"),
        "benchmarks": ("failed", "exit code 1"),
        "Python tests: several processes": ("failed", "not done after 2 s"),
        "memcheck": ("ok", ""),
        "racecheck": ("skipped", "Device not supported"),
        "synccheck": ("failed", "not done after 2 s"),
    }
    logs = {stage["name"]: stage["log"] for stage in report["stages"]}
    assert "a C++ test fails" in logs["C++ tests"] and "device is lost" in logs["benchmarks"]
    # What was measured until then is kept.
    assert report["benchmarks"] == {"not measured": {}, "layers": [1]}
    printed = capsys.readouterr().out
    assert "racecheck                        skipped" in printed and "written: " in printed


def test_build_that_fails_skips_what_needs_it(fake_tools, tmp_path, monkeypatch):
    (fake_tools / "cmake").write_text("#!/bin/sh\nexit 1\n")
    assert gpu_check.main() == 1
    report = written_report(tmp_path)
    states = {stage["name"]: (stage["status"], stage["summary"]) for stage in report["stages"]}
    assert states.pop("build") == states.pop("C++ tests: build") == ("failed", "exit code 1")
    cpp = {"C++ tests", "memcheck", "racecheck", "synccheck"}
    assert states == {
        name: ("skipped", f"not built: see '{'C++ tests: build' if name in cpp else 'build'}'")
        for name in states
    }
    assert report["benchmarks"] is None


def test_time_for_everything_is_kept(fake_tools, tmp_path, monkeypatch):
    (fake_tools / "cmake").write_text("#!/bin/sh\n[ $1 = --version ] || sleep 100\n")
    monkeypatch.setattr(gpu_check, "TOTAL_SECONDS", 3)
    start = time.monotonic()
    assert gpu_check.main() == 1
    assert time.monotonic() - start < 13  # versions are asked for outside of it
    first, second = written_report(tmp_path)["stages"][:3:2]
    assert first["summary"].startswith("not done after") and second["summary"] == "no time left"
