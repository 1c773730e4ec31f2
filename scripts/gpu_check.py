"""Builds, tests and measures everything that needs a GPU: `make gpu-check`.

Needs no network: PyTorch with CUDA, CMake, Ninja, nvcc and pytest are there already, and for the
C++ tests GoogleTest (GOOGLETEST=folder names its sources where it is not installed). Stages run in
turn, each within its time and all within nine minutes; one that fails, or that cannot run here, is
recorded and the others still run. Writes one JSON into benchmarks/results, or into the folder that
the variable OUT names, and prints a table. Exit codes: 0, 1 if a stage failed, 2 without a GPU.
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

SYSTEM = Path("/usr")
PREFIXES = (Path(sys.prefix), SYSTEM / "local", SYSTEM)
TOTAL_SECONDS = 540
# Each of their processes is waited for by itself: join() of tests/python/support/support.py.
SEVERAL_PROCESSES = ("test_cuda_processes", "test_cuda_ranks")
NO_GOOGLE_TEST = "not built: no GoogleTest (GOOGLETEST=folder names its sources)"
SANITIZED = "CudaBatchNorm.FewRandomStepsExact:CudaBatchNorm.Disagreement*"


@dataclass
class Stage:
    """Commands that run in turn. `after` runs when all succeeded: its text is the summary, and what
    it raises a failure. `skip` is asked first: why the stage cannot run here, or nothing. A failure
    whose output has the text `unsupported` is such a reason, too."""

    name: str
    seconds: float
    commands: list[list[str]]
    after: Callable[[], str] = lambda: ""
    environment: dict[str, str] = field(default_factory=dict)
    skip: Callable[[], str] = lambda: ""
    unsupported: str = ""


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


def google_test() -> list[str]:
    """CMake's arguments for it; empty where it is not. Headers alone are of no use."""
    if sources := os.environ.get("GOOGLETEST"):
        return [f"-DFETCHCONTENT_SOURCE_DIR_GOOGLETEST={sources}"]
    for prefix in PREFIXES:
        for folder in ("lib*/cmake/GTest", "lib/*/cmake/GTest"):
            for config in prefix.glob(f"{folder}/GTestConfig.cmake"):
                return [f"-DGTest_DIR={config.parent}"]
    if (SYSTEM / "src" / "googletest" / "CMakeLists.txt").exists():
        return [f"-DFETCHCONTENT_SOURCE_DIR_GOOGLETEST={SYSTEM}/src/googletest"]
    return []


def nccl_root() -> list[str]:
    """NCCL as PyTorch's packages bring it."""
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations if spec else ():
        if Path(folder, "nccl", "include", "nccl.h").exists():
            return [f"-DNCCL_ROOT={folder}/nccl"]
    return []


def missing(path: Path, built_by: str) -> str:
    return "" if path.exists() else f"not built: see {built_by!r}"


def build_stages(architectures: str) -> list[Stage]:
    """The libraries, and by themselves the C++ tests, which nothing else waits for."""
    cmake = shutil.which("cmake") or "cmake"
    configure = [cmake, "-S", str(PROJECT), "-B", str(BUILD), "-G", "Ninja"]
    configure += ["-DCMAKE_BUILD_TYPE=Release", "-DSYNCBN_CUDA=ON", "-DSYNCBN_TORCH=ON"]
    configure += [f"-DSYNCBN_CUDA_ARCHITECTURES={architectures}", *nccl_root()]
    configure += [f"-DPython3_EXECUTABLE={sys.executable}"]
    build = [cmake, "--build", str(BUILD), "--parallel", "--target"]
    libraries = [*build, "syncbn", "syncbn_torch_cpu", "syncbn_torch_cuda"]
    # -k 0: the targets that can be built, where another cannot.
    tests = [*build, "syncbn_gpu_check", "--", "-k", "0"]
    gtest = google_test()
    return [
        Stage("build", 180, [[*configure, "-DSYNCBN_TESTS=OFF"], libraries], make_overlay),
        Stage(
            "C++ tests: build",
            70,
            [[*configure, "-DSYNCBN_TESTS=ON", *gtest], tests],
            skip=lambda: "" if gtest else NO_GOOGLE_TEST,
        ),
    ]


def cpp_stage() -> Stage:
    ctest, report = shutil.which("ctest") or "ctest", LOGS / "cpp.xml"
    command = [ctest, "--test-dir", str(BUILD), "-R", r"^gpu\.", "--no-tests=error", "-j4"]
    command += ["--timeout", "40", "--output-on-failure", "--output-junit", str(report)]
    return Stage("C++ tests", 70, [command], lambda: passed(report), skip=no_cpp_tests)


def no_cpp_tests() -> str:
    return missing(CUDA_TESTS, "C++ tests: build") if google_test() else NO_GOOGLE_TEST


def python_environment() -> dict[str, str]:
    given = filter(None, [os.environ.get("PYTHONPATH")])
    return {"PYTHONPATH": os.pathsep.join([str(OVERLAY), *given])}


def python_stage(name: str, seconds: int, files: list[Path]) -> Stage:
    report = LOGS / f"python-{name.replace(' ', '-')}.xml"
    command = [sys.executable, "-m", "pytest", "-vv", "-p", "no:cacheprovider"]
    # Where a test hangs is in the log before the stage's time is over.
    command += ["-o", f"faulthandler_timeout={seconds - 20}", f"--junitxml={report}"]
    return Stage(
        f"Python tests: {name}",
        seconds,
        [[*command, *map(str, files)]],
        lambda: passed(report),
        python_environment(),
        no_python_package,
    )


def no_python_package() -> str:
    return missing(OVERLAY / "syncbn" / "_build.py", "build")


def figures() -> dict:
    """What the benchmarks have written; where they did not end, what they had until then."""
    try:
        return json.loads((LOGS / "benchmarks.json").read_text())
    except (OSError, ValueError):
        return {}


def sanitizer_stage(tool: str) -> Stage:
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"

    def skip() -> str:
        if not Path(sanitizer).exists():
            return "compute-sanitizer is not installed"
        return no_cpp_tests()

    command = [sanitizer, "--tool", tool, "--error-exitcode", "1"]
    command += [str(CUDA_TESTS), f"--gtest_filter={SANITIZED}"]
    return Stage(tool, 45, [command], skip=skip, unsupported="Device not supported")


def stages(architectures: str) -> list[Stage]:
    """Such that one that takes its whole time leaves some for the more important others."""
    tests = sorted((PROJECT / "tests" / "python" / "cuda").glob("test_*.py"))
    several = [path for path in tests if path.stem in SEVERAL_PROCESSES]
    one = [path for path in tests if path not in several]
    build, build_cpp = build_stages(architectures)
    benchmark = [sys.executable, str(PROJECT / "benchmarks" / "bench_gpu.py")]
    benchmark += ["--json", str(LOGS / "benchmarks.json")]
    return [
        build,
        python_stage("one process", 90, one),
        build_cpp,
        cpp_stage(),
        Stage(
            "benchmarks",
            100,
            [benchmark],
            lambda: f"{len(figures()['layers'])} layers",
            python_environment(),
            no_python_package,
        ),
        python_stage("several processes", 200, several),
        *map(sanitizer_stage, ("memcheck", "racecheck", "synccheck")),
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
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:  # stuck in the driver: no signal ends it
            return f"not done after {seconds:.0f} s, and cannot be ended"
        return f"not done after {seconds:.0f} s"
    return "" if code == 0 else f"exit code {code}"


def run_stage(stage: Stage, deadline: float) -> dict[str, object]:
    """Runs the stage and tells how it went; never raises."""
    if reason := stage.skip():
        result = {"name": stage.name, "status": "skipped", "seconds": 0.0}
        return {**result, "summary": reason, "log": ""}
    LOGS.mkdir(parents=True, exist_ok=True)
    path = LOGS / f"{re.sub('[^A-Za-z0-9]+', '-', stage.name)}.log"
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
    status = "failed" if problem else "ok"
    output = path.read_text(errors="replace")
    if problem and stage.unsupported and stage.unsupported in output:
        status, problem = "skipped", stage.unsupported
    return {
        "name": stage.name,
        "status": status,
        "seconds": round(time.monotonic() - start, 1),
        "summary": problem or summary,
        "log": output[-6000:] if problem else "",
    }


def output_of(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
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
    words = {"ok": "ok", "failed": "FAILED", "skipped": "skipped"}
    width = max(len(str(result["name"])) for result in results)
    return "\n".join(
        f"{result['name']!s:{width}}  {words[str(result['status'])]:7}"
        f"  {result['seconds']:6.1f} s  {result['summary']}"
        for result in results
    )


def run_all(wanted: list[Stage], seconds: float) -> list[dict[str, object]]:
    deadline = time.monotonic() + seconds
    results = []
    for stage in wanted:
        results.append(run_stage(stage, deadline))
        print(table(results[-1:]), flush=True)
        if log := str(results[-1]["log"]):
            print(log[-2000:], flush=True)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dry-run", action="store_true", help="print the commands, run none")
    dry_run = parser.parse_args().dry_run
    start = time.monotonic()
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
    for path in (OVERLAY, LOGS):  # of an earlier run
        shutil.rmtree(path, ignore_errors=True)
    CUDA_TESTS.unlink(missing_ok=True)
    results = run_all(stages("native"), TOTAL_SECONDS - (time.monotonic() - start))
    report["stages"] = results
    report["benchmarks"] = figures() or None

    folder = Path(os.environ.get("OUT") or PROJECT / "benchmarks" / "results")
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^A-Za-z0-9]+", "-", device).strip("-")
    path = folder / f"gpu-check-{name}-{report['date'][:10]}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\n{device}, PyTorch {torch.__version__}\n{table(results)}\n")
    if report["benchmarks"]:
        print((LOGS / "benchmarks.log").read_text())
    print(f"written: {path}")
    return int(any(result["status"] == "failed" for result in results))


if __name__ == "__main__":
    sys.exit(main())
