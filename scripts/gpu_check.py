"""Builds, tests and measures everything that needs a GPU: `make gpu-check`.

Needs no network: PyTorch with CUDA, CMake, Ninja, nvcc, GoogleTest and pytest are there already
(GOOGLETEST=folder names GoogleTest's sources where it is not installed). Stages run in turn, each
within its time and all within nine minutes; one that fails is recorded and the others still run.
Writes one JSON into benchmarks/results, or into the folder that the variable OUT names, and prints
a table. Exit codes: 0, 1 if a stage failed, 2 without a GPU.
"""

import argparse
import datetime
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
BUILD = PROJECT / "build" / "gpu"
LOGS = BUILD / "logs"
OVERLAY = BUILD / "overlay"
CUDA_TESTS = BUILD / "tests" / "cuda" / "syncbn_cuda_tests"

TOTAL_SECONDS = 540
SANITIZED = "CudaBatchNorm.FewRandomStepsExact:CudaBatchNorm.Disagreement*"


@dataclass
class Stage:
    """Commands that run in turn. `after` runs when all succeeded: its text is the summary, and what
    it raises a failure."""

    name: str
    seconds: int
    commands: list[list[str]]
    after: Callable[[], str] = lambda: ""
    environment: dict[str, str] = field(default_factory=dict)


def passed(report: Path) -> str:
    """The counts of a JUnit file; an error if not one test passed."""
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    tests, skipped = (
        sum(int(suite.get(k, 0) or 0) for suite in suites) for k in ("tests", "skipped")
    )
    disabled = sum(int(suite.get("disabled", 0) or 0) for suite in suites)
    done = tests - skipped - disabled
    if done <= 0:
        raise RuntimeError(f"{tests} tests, all of them skipped")
    return f"{done} passed" + (f", {skipped} skipped" if skipped else "")


def make_overlay() -> str:
    """The Python package with the libraries just built, for PYTHONPATH."""
    package = OVERLAY / "syncbn"
    shutil.rmtree(OVERLAY, ignore_errors=True)
    sources = PROJECT / "python" / "syncbn"
    ignored = shutil.ignore_patterns("lib", "_build.py", "*.in", "__pycache__")
    shutil.copytree(sources, package, ignore=ignored)
    shutil.copy2(BUILD / "bindings" / "torch" / "_build.py", package)
    (package / "lib").mkdir()
    libraries = [
        *BUILD.glob("src/libsyncbn.so*"),
        *BUILD.glob("bindings/torch/**/libsyncbn_torch*.so"),
    ]
    for library in libraries:
        shutil.copy2(library, package / "lib")
    return f"{len(libraries)} libraries"


def google_test() -> list[str] | None:
    """CMake's arguments for it, or None where it is not."""
    if sources := os.environ.get("GOOGLETEST"):
        return [f"-DFETCHCONTENT_SOURCE_DIR_GOOGLETEST={sources}"]
    for folder in ("/usr/include", "/usr/local/include"):
        if Path(folder, "gtest").is_dir():
            return []
    if Path("/usr/src/googletest/CMakeLists.txt").exists():
        return ["-DFETCHCONTENT_SOURCE_DIR_GOOGLETEST=/usr/src/googletest"]
    return None


def nccl_root() -> list[str]:
    """NCCL as PyTorch's packages bring it."""
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations if spec else ():
        if Path(folder, "nccl", "include", "nccl.h").exists():
            return [f"-DNCCL_ROOT={folder}/nccl"]
    return []


def stages(architectures: str) -> list[Stage]:
    cmake, ctest = (shutil.which(tool) or tool for tool in ("cmake", "ctest"))
    gtest = google_test()
    configure = [cmake, "-S", str(PROJECT), "-B", str(BUILD), "-G", "Ninja"]
    configure += ["-DCMAKE_BUILD_TYPE=Release", "-DSYNCBN_CUDA=ON", "-DSYNCBN_TORCH=ON"]
    configure += [f"-DSYNCBN_CUDA_ARCHITECTURES={architectures}"]
    configure += [f"-DPython3_EXECUTABLE={sys.executable}", *nccl_root(), *(gtest or [])]
    configure += [f"-DSYNCBN_TESTS={'OFF' if gtest is None else 'ON'}"]
    build = [cmake, "--build", str(BUILD), "--parallel"]
    build += ["--target", "all" if gtest is None else "syncbn_gpu_check"]

    given = filter(None, [os.environ.get("PYTHONPATH")])
    folders = [str(OVERLAY), str(PROJECT / "tests" / "python"), *given]
    python = {"PYTHONPATH": os.pathsep.join(folders)}
    gpu_tests = sorted(str(path) for path in (PROJECT / "tests" / "python").glob("test_cuda*.py"))
    cpp_report, python_report = LOGS / "cpp.xml", LOGS / "python.xml"
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    sanitized = [str(CUDA_TESTS), f"--gtest_filter={SANITIZED}"]
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *gpu_tests]
    benchmark = [sys.executable, str(PROJECT / "benchmarks" / "bench_gpu.py")]
    return [
        Stage("build", 270, [configure, build], make_overlay),
        Stage(
            "C++ tests",
            90,
            [
                [ctest, "--test-dir", str(BUILD), "-R", r"^gpu\.", "--no-tests=error", "-j4"]
                + ["--output-on-failure", "--output-junit", str(cpp_report)]
            ],
            lambda: passed(cpp_report),
        ),
        Stage(
            "Python tests",
            150,
            [[*pytest, f"--junitxml={python_report}"]],
            lambda: passed(python_report),
            python,
        ),
        *(
            Stage(tool, 45, [[sanitizer, "--tool", tool, "--error-exitcode", "1", *sanitized]])
            for tool in ("memcheck", "racecheck", "synccheck")
        ),
        Stage(
            "benchmarks",
            120,
            [[*benchmark, "--json", str(LOGS / "benchmarks.json")]],
            lambda: (LOGS / "benchmarks.json").stat().st_size and "written",
            python,
        ),
    ]


def run(command: list[str], log, seconds: float, environment: dict[str, str]) -> str:
    """Empty, or why it failed. Ends the command with all its children at its time limit."""
    log.write(f"$ {shlex.join(command)}\n".encode())
    log.flush()
    try:
        process = subprocess.Popen(
            command,
            cwd=PROJECT,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        log.write(f"{error}\n".encode())
        return str(error)
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"not done after {seconds:.0f} s"
    return "" if code == 0 else f"exit code {code}"


def run_stage(stage: Stage, deadline: float) -> dict[str, object]:
    """Runs the stage and tells how it went; never raises."""
    LOGS.mkdir(parents=True, exist_ok=True)
    path = LOGS / f"{stage.name.replace(' ', '-').replace('+', 'p')}.log"
    start = time.monotonic()
    end = min(start + stage.seconds, deadline)
    problem, summary = "", ""
    with path.open("wb") as log:
        for command in stage.commands:
            left = end - time.monotonic()
            problem = run(command, log, left, stage.environment) if left > 1 else "no time left"
            if problem:
                break
    if not problem:
        try:
            summary = stage.after()
        except Exception as error:  # a missing or broken report is this stage's failure
            problem = f"{type(error).__name__}: {error}"
    result = {
        "name": stage.name,
        "ok": not problem,
        "seconds": round(time.monotonic() - start, 1),
        "summary": problem or summary,
    }
    if problem:
        result["log"] = path.read_text(errors="replace")[-6000:]
    return result


def output_of(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def versions(torch) -> dict[str, str]:
    commit = output_of("git", "-C", str(PROJECT), "rev-parse", "HEAD")
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    return {
        "syncbn commit": commit or "unknown",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch's CUDA": torch.version.cuda or "none",
        "torch's NCCL": ".".join(map(str, torch.cuda.nccl.version())),
        "driver": output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "nvcc": output_of(nvcc, "--version").rpartition("\n")[2],
        "cmake": output_of("cmake", "--version").partition("\n")[0],
        "compiler": output_of("c++", "--version").partition("\n")[0],
        "platform": platform.platform(),
    }


def table(results: list[dict[str, object]]) -> str:
    width = max(len(str(result["name"])) for result in results)
    return "\n".join(
        f"{result['name']!s:{width}}  {'ok' if result['ok'] else 'FAILED':6}"
        f"  {result['seconds']:6.1f} s  {result['summary']}"
        for result in results
    )


def run_all(wanted: list[Stage], seconds: float) -> list[dict[str, object]]:
    deadline = time.monotonic() + seconds
    results = []
    for stage in wanted:
        results.append(run_stage(stage, deadline))
        print(table(results[-1:]), flush=True)
        if "log" in results[-1]:
            print(str(results[-1]["log"])[-2000:], flush=True)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dry-run", action="store_true", help="print the commands, run none")
    dry_run = parser.parse_args().dry_run
    if dry_run:
        for stage in stages("native"):
            print(f"{stage.name} (at most {stage.seconds} s)")
            for command in stage.commands:
                print(f"  {shlex.join(command)}")
        return 0
    try:
        import torch
    except ImportError as error:
        print(f"gpu-check: nothing was run: {sys.executable} has no PyTorch ({error})")
        return 2
    if not torch.cuda.is_available():
        print(f"gpu-check: nothing was run: PyTorch {torch.__version__} finds no GPU here")
        return 2

    device = torch.cuda.get_device_name()
    report = {
        "device": device,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "versions": versions(torch),
    }
    if google_test() is None:
        print("gpu-check: no GoogleTest: the C++ tests fail; GOOGLETEST=folder names its sources")
    results = run_all(stages("native"), TOTAL_SECONDS)
    report["stages"] = results
    figures = LOGS / "benchmarks.json"
    report["benchmarks"] = json.loads(figures.read_text()) if results[-1]["ok"] else None

    folder = Path(os.environ.get("OUT") or PROJECT / "benchmarks" / "results")
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^A-Za-z0-9]+", "-", device).strip("-")
    path = folder / f"gpu-check-{name}-{report['date'][:10]}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\n{device}, PyTorch {torch.__version__}\n{table(results)}\n")
    if report["benchmarks"]:
        print((LOGS / "benchmarks.log").read_text())
    print(f"written: {path}")
    return 0 if all(result["ok"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
