# SPDX-License-Identifier: Apache-2.0
"""scripts/gpu_check.py, which needs a GPU, in what it does without one: real stages over programs
that play CMake, pytest and the device's tools. test_gpu_rehearsal.py runs the real ones."""

import ast
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from support import PROJECT
from test_stage_runner import PASSED, junit

sys.path.insert(0, str(PROJECT / "scripts"))
import googletest
import gpu_check
import stage_runner
from stage_runner import Stage


def sources(folder: Path, version: str = "1.12.1") -> Path:
    for part in (*googletest.PARTS, *(f"{f}/file" for f in googletest.FOLDERS), "docs/page"):
        (folder / part).parent.mkdir(parents=True, exist_ok=True)
        (folder / part).write_text(f"set(GOOGLETEST_VERSION {version})")
    return folder


def test_googletest_is_carried_or_sources_or_a_cmake_package_and_never_headers_alone(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(googletest, "CARRIED", tmp_path / "carried")
    monkeypatch.setattr(gpu_check, "SYSTEM", tmp_path / "usr")
    monkeypatch.setattr(gpu_check, "PREFIXES", (tmp_path / "usr",))
    (tmp_path / "usr" / "include" / "gtest").mkdir(parents=True)
    assert gpu_check.google_test() == []
    stages = {stage.name: stage for stage in gpu_check.stages("90-real")}
    for name in ("C++ tests: build", "C++ tests", "racecheck"):
        assert stages[name].missing() == gpu_check.NO_GOOGLE_TEST or name == "racecheck"
    assert not stages["build"].missing()

    given = sources(tmp_path / "usr" / "src" / "googletest")
    assert gpu_check.google_test() == [f"-DFETCHCONTENT_SOURCE_DIR_GOOGLETEST={given}"]
    config = tmp_path / "usr" / "lib" / "x86_64-linux-gnu" / "cmake" / "GTest"
    config.mkdir(parents=True)
    (config / "GTestConfig.cmake").touch()
    assert gpu_check.google_test() == [f"-DGTest_DIR={config}"]
    googletest.prepare(given, tmp_path / "carried")
    carried = f"-DFETCHCONTENT_SOURCE_DIR_GOOGLETEST={tmp_path / 'carried'}"
    assert gpu_check.google_test() == [carried, "-DCMAKE_DISABLE_FIND_PACKAGE_GTest=ON"]
    (tmp_path / "carried" / "CMakeLists.txt").unlink()  # half a copy is none
    assert gpu_check.google_test() == [f"-DGTest_DIR={config}"]


def test_googletest_script_copies_what_is_built_and_refuses_what_cannot_be(
    tmp_path, monkeypatch, capsys
):
    carried = tmp_path / "build" / "googletest"
    monkeypatch.setattr(googletest, "CARRIED", carried)

    def copy(*folders: Path) -> int:
        monkeypatch.setattr(sys, "argv", ["googletest.py", *map(str, folders)])
        return googletest.main()

    assert copy(tmp_path / "nothing", sources(tmp_path / "old", "1.11.0")) == 1
    told = capsys.readouterr().err
    assert "nothing has no CMakeLists.txt" in told and "old is older than 1.12" in told
    assert not carried.exists()
    assert copy(tmp_path / "nothing", sources(tmp_path / "new", "1.17.0")) == 0
    copied = {str(path.relative_to(carried)) for path in carried.rglob("*") if path.is_file()}
    assert copied == {*googletest.PARTS, *(f"{f}/file" for f in googletest.FOLDERS)}


def test_every_stage_names_what_exists():
    wanted = gpu_check.stages("90-real")
    commands = [word for stage in wanted for command in stage.commands for word in command]
    files = [word for word in commands if word.endswith(".py")]
    assert files and all(Path(file).is_file() for file in files)
    tests = [Path(file).name for file in files if "test_cuda" in file]
    every = sorted(path.name for path in (PROJECT / "tests" / "python" / "cuda").glob("test_*.py"))
    assert sorted(tests) == every
    assert "make" not in {Path(word).name for word in commands}


def test_stages_and_their_limits():
    """All limits together are less than nine minutes, the most valuable stage comes first."""
    wanted = gpu_check.stages("90-real")
    assert [stage.name for stage in wanted] == [
        "build",
        "Python tests: one process",
        "C++ tests: build",
        "C++ tests",
        "benchmarks",
        "Python tests: several processes",
        "memcheck",
        "racecheck",
        "initcheck",
        "synccheck",
    ]
    limits = sum(stage.seconds for stage in wanted)
    assert gpu_check.START_SECONDS + limits <= gpu_check.TOTAL_SECONDS <= 540


def test_skips_for_another_reason_than_the_missing_gpu_say_that_they_are_impossible():
    """On a machine with a GPU every other skip is a failure."""
    reasons = set()
    for path in (PROJECT / "tests" / "python" / "cuda").glob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            name = ast.unparse(call.func) if isinstance(call, ast.Call) else ""
            if name.endswith(".skip"):
                reasons.add(ast.unparse(call.args[0]))
            if name.endswith(".skipif"):
                reasons.add(ast.unparse(call.keywords[0].value))
    assert "'needs a GPU'" in reasons
    assert all("not possible here" in reason for reason in reasons - {"'needs a GPU'"})


def test_without_a_gpu_two_lines_and_exit_code_2():
    done = subprocess.run(
        [sys.executable, str(PROJECT / "scripts" / "gpu_check.py")],
        capture_output=True,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 2 and done.stderr == ""
    first, second = done.stdout.splitlines()
    assert first == f"gpu-check: {' '.join(gpu_check.google_test()) or gpu_check.NO_GOOGLE_TEST}"
    assert second.startswith(f"gpu-check: nothing was run: {sys.executable}: ")


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
# The last word of its command is the report.
FAKE_CTEST = """#!/bin/sh
for report; do :; done
echo '{junit}' > "$report"
"""
FAKE_SANITIZER = """#!/bin/sh
for word; do report=${{word#--gtest_output=xml:}}; done
case "$*" in
  *racecheck*) echo "========= Error: Device not supported"; exit 1 ;;
  *synccheck*) [ -e {hang} ] && sleep 100 ;;
esac
echo '{junit}' > $report
"""
FAKE_PYTEST = """
import os, pathlib, sys, time
assert os.environ["PYTHONPATH"].startswith({overlay!r})
report = next(word.partition("=")[2] for word in sys.argv if word.startswith("--junitxml="))
parent = os.getppid()
while "several" in report and os.path.exists({hang!r}) and os.getppid() == parent:
    time.sleep(0.1)  # hangs, but outlives nobody
pathlib.Path(report).write_text({junit!r})
"""
# In the benchmarks' process, which it ends.
FAKE_TORCH = """
import os, pathlib, sys
pathlib.Path(sys.argv[-1]).write_text('{{"layers": [{{}}]}}')
sys.exit("the device is lost" if os.path.exists({hang!r}) else 0)
"""
FAKE_SMI = """#!/bin/sh
[ ! -e {lost} ] && echo 580.1
"""


@pytest.fixture
def fake_tools(tmp_path, monkeypatch):
    """All is well, but racecheck, until there is a file "hang"."""
    build, tools, modules = tmp_path / "build", tmp_path / "bin", tmp_path / "modules"
    overlay, passed, hang = build / "overlay", junit(PASSED, PASSED), str(tmp_path / "hang")
    texts = {
        tools / "cmake": FAKE_CMAKE.format(build=build),
        tools / "ctest": FAKE_CTEST.format(junit=passed),
        tools / "nvidia-smi": FAKE_SMI.format(lost=tmp_path / "lost"),
        tools / "compute-sanitizer": FAKE_SANITIZER.format(junit=passed, hang=hang),
        modules / "pytest.py": FAKE_PYTEST.format(overlay=str(overlay), junit=passed, hang=hang),
        modules / "torch.py": FAKE_TORCH.format(hang=hang),
    }
    for path, text in texts.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(modules))
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    monkeypatch.setattr(googletest, "CARRIED", sources(tmp_path / "carried"))
    monkeypatch.setattr(gpu_check, "BUILD", build)
    monkeypatch.setattr(gpu_check, "LOGS", build / "logs")
    monkeypatch.setattr(gpu_check, "OVERLAY", overlay)
    monkeypatch.setattr(gpu_check, "CUDA_TESTS", build / "tests" / "cuda" / "syncbn_cuda_tests")
    found = {"name": "Test GPU (1)", "capability": "90"}
    monkeypatch.setattr(gpu_check, "device", lambda torch: found)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    monkeypatch.setattr(gpu_check.signal, "signal", lambda *_: None)  # they stay pytest's
    return tools


def limit_stages(monkeypatch, seconds: float, **others: float) -> None:
    """The real stages with so many seconds each; others by the last word of their names."""
    real = gpu_check.stages

    def shorter(architectures: str) -> list[Stage]:
        return [
            dataclasses.replace(stage, seconds=others.get(stage.name.split()[-1], seconds))
            for stage in real(architectures)
        ]

    monkeypatch.setattr(gpu_check, "stages", shorter)
    monkeypatch.setattr(gpu_check, "START_SECONDS", 0)


def written_report(tmp_path: Path) -> dict:
    """The one JSON that was written, with the keys and types that readers rely on."""
    (path,) = (tmp_path / "out").iterdir()
    assert path.name.startswith("gpu-check-Test-GPU-1-")
    report = json.loads(path.read_text())
    keys = ("device", "date", "complete", "versions", "stages", "benchmarks")
    assert set(report) == set(keys) and report["complete"] is True
    assert all(isinstance(value, str) for value in report["versions"].values())
    for stage in report["stages"]:
        assert {key: type(value) for key, value in stage.items()} == {
            "name": str,
            "status": str,
            "seconds": float,
            "summary": str,
            "failures": dict,
            "not possible here": dict,
            "log": str,
        }
        assert stage["status"] in stage_runner.WORDS
        assert stage["status"] != "ok" or stage["log"] == ""
    return report


def test_whole_run_that_is_well(fake_tools, tmp_path, capsys):
    """What the device cannot do is no failure, and does not count as passed."""
    assert gpu_check.main() == 0
    states = {stage["name"]: stage["status"] for stage in written_report(tmp_path)["stages"]}
    assert states.pop("racecheck") == "not possible here"
    assert len(states) == 9 and set(states.values()) == {"ok"}
    assert "FAILED" not in capsys.readouterr().out


def test_whole_run_with_stages_that_hang_fail_and_are_not_supported(
    fake_tools, tmp_path, monkeypatch, capsys
):
    (tmp_path / "hang").touch()
    (fake_tools / "ctest").write_text("#!/bin/sh\necho 'a C++ test fails'; exit 8\n")
    limit_stages(monkeypatch, 0.8, build=3)
    assert gpu_check.main() == 1
    report = written_report(tmp_path)
    assert report["device"]["name"] == "Test GPU (1)"
    assert report["versions"]["torch"] == torch.__version__
    states = {stage["name"]: (stage["status"], stage["summary"]) for stage in report["stages"]}
    for hung in ("Python tests: several processes", "synccheck"):
        status, summary = states.pop(hung)
        assert status == "failed" and summary.startswith("not done after")
    assert states == {
        "build": ("ok", "2 libraries"),
        "Python tests: one process": ("ok", "2 passed"),
        "C++ tests: build": ("ok", ""),
        "C++ tests": ("failed", "exit code 8"),
        "benchmarks": ("failed", "exit code 1"),
        "memcheck": ("ok", "2 passed"),
        "racecheck": ("not possible here", "Device not supported"),
        "initcheck": ("ok", "2 passed"),
    }
    logs = {stage["name"]: stage["log"] for stage in report["stages"]}
    assert "a C++ test fails" in logs["C++ tests"] and "device is lost" in logs["benchmarks"]
    # What was measured until then is kept.
    assert report["benchmarks"] == {"layers": [{}]}
    printed = capsys.readouterr().out
    assert printed.startswith(f"gpu-check: -DFETCHCONTENT_SOURCE_DIR_GOOGLETEST={tmp_path}/carried")
    assert "racecheck                        not possible here" in printed
    assert "written: " in printed


def test_build_that_fails_fails_what_needs_it(fake_tools, tmp_path):
    (fake_tools / "cmake").write_text("#!/bin/sh\nexit 1\n")
    assert gpu_check.main() == 1
    report = written_report(tmp_path)
    states = {stage["name"]: (stage["status"], stage["summary"]) for stage in report["stages"]}
    assert states.pop("build") == states.pop("C++ tests: build") == ("failed", "exit code 1")
    cpp = {"C++ tests", *gpu_check.SANITIZERS}
    assert states == {
        name: ("failed", f"not built: see '{'C++ tests: build' if name in cpp else 'build'}'")
        for name in states
    }
    assert report["benchmarks"] is None


def test_without_googletest_or_a_sanitizer_is_a_failure(fake_tools, tmp_path, monkeypatch):
    """It was asked for."""
    tool = gpu_check.tool
    monkeypatch.setattr(gpu_check, "tool", lambda n: n if "-" in n else tool(n))
    assert gpu_check.main() == 1
    states = {stage["name"]: stage["summary"] for stage in written_report(tmp_path)["stages"]}
    absent = "no compute-sanitizer on PATH or in CUDA's folder"
    assert {states[name] for name in gpu_check.SANITIZERS} == {absent}
    monkeypatch.setattr(gpu_check, "google_test", lambda: [])
    assert gpu_check.main() == 1
    stages = written_report(tmp_path)["stages"]
    lacking = [s["name"] for s in stages if s["summary"] == gpu_check.NO_GOOGLE_TEST]
    assert lacking == ["C++ tests: build", "C++ tests"]
    assert {s["status"] for s in stages if s["name"] in lacking} == {"failed"}


def test_gpu_that_vanishes_in_the_middle_ends_in_a_report(fake_tools, tmp_path):
    lost = tmp_path / "lost"
    (fake_tools / "ctest").write_text(f"#!/bin/sh\ntouch {lost}; exit 8\n")
    start = time.monotonic()
    assert gpu_check.main() == 1
    assert time.monotonic() - start < 30  # nothing waits for it
    states = [(s["status"], s["summary"]) for s in written_report(tmp_path)["stages"]]
    gone = ("failed", "the GPU is gone: nvidia-smi no longer answers")
    assert states[:4] == [("ok", "2 libraries"), ("ok", "2 passed"), ("ok", "")] + [
        ("failed", "exit code 8")
    ]
    assert states[4:] == [gone] * 6


# A run in a process of its own, which is ended in the middle of its last but one stage.
IN_A_PROCESS = """
import sys
sys.path.insert(0, {scripts!r})
import gpu_check, googletest
from pathlib import Path
sys.modules["torch"] = type("torch", (), {{"__version__": "2.11"}})
gpu_check.versions = lambda torch: {{}}
googletest.CARRIED = Path({carried!r})
for name, path in {places!r}.items():
    setattr(gpu_check, name, Path(path))
gpu_check.device = lambda torch: {{"name": "Test GPU (1)", "capability": "90"}}
sys.argv = ["gpu_check.py"]
sys.exit(gpu_check.main())
"""


@pytest.mark.parametrize("number", (signal.SIGTERM, signal.SIGKILL))
def test_run_that_is_ended_leaves_what_it_had(fake_tools, tmp_path, number):
    (tmp_path / "hang").touch()
    names = ("BUILD", "LOGS", "OVERLAY", "CUDA_TESTS")
    text = IN_A_PROCESS.format(
        scripts=str(PROJECT / "scripts"),
        carried=str(tmp_path / "carried"),
        places={name: str(getattr(gpu_check, name)) for name in names},
    )
    process = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("benchmarks"):
            break
    time.sleep(1)  # the next one sleeps
    process.send_signal(number)
    process.communicate(timeout=30)
    (path,) = [p for p in (tmp_path / "out").iterdir() if p.suffix == ".json"]
    report = json.loads(path.read_text())
    stages = [(s["name"], s["status"]) for s in report["stages"]]
    assert stages[:5] == [
        ("build", "ok"),
        ("Python tests: one process", "ok"),
        ("C++ tests: build", "ok"),
        ("C++ tests", "ok"),
        ("benchmarks", "failed"),
    ]
    assert report["benchmarks"] == {"layers": [{}]}
    if number == signal.SIGKILL:
        assert len(stages) == 5 and report["complete"] is False
        assert report["running"]["name"] == "Python tests: several processes"
    else:
        assert process.returncode == 1 and report["complete"] is True
        ended = {s["summary"] for s in report["stages"][5:]}
        assert len(stages) == 10 and ended == {"ended from outside by SIGTERM"}
