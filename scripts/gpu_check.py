# SPDX-License-Identifier: Apache-2.0
"""Builds, tests and measures everything that needs a GPU: `make gpu-check`.

Needs no make and no network: PyTorch with CUDA, CMake, Ninja, nvcc, compute-sanitizer and pytest
are there already, and GoogleTest's sources came along in build/googletest (`make googletest`).
Stages run in turn, the most valuable first. Each has its seconds, 9 minutes in all. One that fails,
or that lacks something, is a failure that says why, and the others still run; what the device
cannot do is told apart, as "not possible here".

One JSON in benchmarks/results, or in the folder that the variable OUT names, is rewritten all the
time. Exit codes: 0, 1 if anything failed, 2 without a GPU.
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
from pathlib import Path

import googletest
from stage_runner import Ended, Runner, Stage, table

PROJECT = Path(__file__).resolve().parent.parent
BUILD = PROJECT / "build" / "gpu"
LOGS = BUILD / "logs"
OVERLAY = BUILD / "overlay"
CUDA_TESTS = BUILD / "tests" / "cuda" / "syncbn_cuda_tests"

SYSTEM = Path("/usr")
PREFIXES = (Path(sys.prefix), SYSTEM / "local", SYSTEM)
TOTAL_SECONDS = 540
START_SECONDS = 25  # importing PyTorch, asking for versions
# Each of their processes is waited for by itself: tests/python/cuda/rank_pairs.py.
SEVERAL_PROCESSES = ("test_cuda_processes", "test_cuda_ranks")
NO_GOOGLE_TEST = (
    "no GoogleTest here: `python3 scripts/googletest.py` on a machine that has its sources, "
    "and take build/googletest along"
)
SANITIZED = "CudaBatchNorm.FewRandomStepsExact:CudaBatchNorm.Disagreement*"
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")


def make_overlay() -> str:
    """The Python package with the libraries just built, for PYTHONPATH."""
    package = OVERLAY / "syncbn"
    shutil.rmtree(OVERLAY, ignore_errors=True)
    sources = PROJECT / "python" / "syncbn"
    ignored = shutil.ignore_patterns("lib", "_build.py", "*.in", "__pycache__")
    shutil.copytree(sources, package, ignore=ignored)
    (package / "lib").mkdir()
    libraries = [
        *BUILD.glob("src/libsyncbn.so*"),
        *BUILD.glob("bindings/torch/**/libsyncbn_torch*.so"),
    ]
    for library in libraries:
        shutil.copy2(library, package / "lib")
    # Last: who looks for it finds the whole package.
    shutil.copy2(BUILD / "bindings" / "torch" / "_build.py", package)
    return f"{len(libraries)} libraries"


def google_test() -> list[str]:
    """CMake's arguments for it; empty where it is not. Headers alone are of no use."""
    if not googletest.problem(googletest.CARRIED):
        # Nor does a package of the system come before it, of another compiler perhaps.
        sources = f"-DFETCHCONTENT_SOURCE_DIR_GOOGLETEST={googletest.CARRIED}"
        return [sources, "-DCMAKE_DISABLE_FIND_PACKAGE_GTest=ON"]
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


def tool(name: str) -> str:
    """The program's path: PATH's, or that of the Python environment or of CUDA; else its name."""
    cuda = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    places = (os.environ.get("PATH", ""), str(Path(sys.executable).parent), f"{cuda}/bin")
    return shutil.which(name, path=os.pathsep.join(places)) or name


def absent(path: Path, built_by: str) -> str:
    return "" if path.exists() else f"not built: see {built_by!r}"


def build_stages(architectures: str) -> list[Stage]:
    """The libraries, and by themselves the C++ tests, which nothing else waits for."""
    configure = [tool("cmake"), "-S", str(PROJECT), "-B", str(BUILD), "-G", "Ninja"]
    configure += [f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}", "-DCMAKE_BUILD_TYPE=Release"]
    configure += ["-DSYNCBN_CUDA=ON", "-DSYNCBN_TORCH=ON"]
    configure += [f"-DSYNCBN_CUDA_ARCHITECTURES={architectures}", *nccl_root()]
    configure += [f"-DPython3_EXECUTABLE={sys.executable}"]
    build = [tool("cmake"), "--build", str(BUILD), "--parallel", "--target"]
    libraries = [*build, "syncbn", "syncbn_torch_cpu", "syncbn_torch_cuda"]
    # -k 0: the targets that can be built, where another cannot.
    tests = [*build, "syncbn_gpu_check", "--", "-k", "0"]
    gtest = google_test()
    return [
        Stage("build", 150, [[*configure, "-DSYNCBN_TESTS=OFF"], libraries], make_overlay),
        Stage(
            "C++ tests: build",
            45,
            [[*configure, "-DSYNCBN_TESTS=ON", *gtest], tests],
            missing=lambda: "" if gtest else NO_GOOGLE_TEST,
        ),
    ]


def cpp_stage() -> Stage:
    report = LOGS / "cpp.xml"
    command = [tool("ctest"), "--test-dir", str(BUILD), "-R", r"^gpu\.", "--no-tests=error", "-j4"]
    command += ["--timeout", "30", "--output-on-failure", "--output-junit", str(report)]
    return Stage("C++ tests", 40, [command], missing=no_cpp_tests, tests=report)


def no_cpp_tests() -> str:
    return absent(CUDA_TESTS, "C++ tests: build") if google_test() else NO_GOOGLE_TEST


def python_environment() -> dict[str, str]:
    given = filter(None, [os.environ.get("PYTHONPATH")])
    paths = os.pathsep.join([str(OVERLAY), *given])
    return {"PYTHONPATH": paths, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def python_stage(name: str, seconds: int, files: list[Path]) -> Stage:
    report = LOGS / f"python-{name.replace(' ', '-')}.xml"
    command = [sys.executable, "-m", "pytest", "-vv", "-p", "no:cacheprovider"]
    # Where a test hangs is in the log before the stage's time is over.
    command += ["-o", "faulthandler_timeout=25", f"--junitxml={report}"]
    return Stage(
        f"Python tests: {name}",
        seconds,
        [[*command, *map(str, files)]],
        environment=python_environment(),
        missing=no_python_package,
        tests=report,
    )


def no_python_package() -> str:
    return absent(OVERLAY / "syncbn" / "_build.py", "build")


def figures() -> dict:
    """What the benchmarks have written; where they did not end, what they had until then."""
    try:
        return json.loads((LOGS / "benchmarks.json").read_text())
    except (OSError, ValueError):
        return {}


def benchmark_stage(seconds: int) -> Stage:
    path = LOGS / "benchmarks.json"
    command = [sys.executable, str(PROJECT / "benchmarks" / "bench_gpu.py")]
    command += ["--seconds", str(seconds - 15), "--json", str(path)]

    def measured() -> str:
        return f"{sum('problem' not in layer for layer in figures()['layers'])} layers"

    environment = python_environment()
    return Stage("benchmarks", seconds, [command], measured, environment, no_python_package)


def sanitizer_stage(name: str) -> Stage:
    sanitizer, report = tool("compute-sanitizer"), LOGS / f"{name}.xml"

    def missing() -> str:
        if not Path(sanitizer).exists():
            return "no compute-sanitizer on PATH or in CUDA's folder"
        return no_cpp_tests()

    command = [sanitizer, "--tool", name, "--error-exitcode", "1", str(CUDA_TESTS)]
    command += [f"--gtest_filter={SANITIZED}", f"--gtest_output=xml:{report}"]
    unsupported = "Device not supported"
    return Stage(name, 15, [command], missing=missing, unsupported=unsupported, tests=report)


def stages(architectures: str) -> list[Stage]:
    """The most valuable first."""
    tests = sorted((PROJECT / "tests" / "python" / "cuda").glob("test_*.py"))
    several = [path for path in tests if path.stem in SEVERAL_PROCESSES]
    one = [path for path in tests if path not in several]
    build, build_cpp = build_stages(architectures)
    return [
        build,
        python_stage("one process", 60, one),
        build_cpp,
        cpp_stage(),
        benchmark_stage(90),
        python_stage("several processes", 70, several),
        *map(sanitizer_stage, SANITIZERS),
    ]


def output_of(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def driver() -> str:
    return output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def nccl_version(torch) -> str:
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except Exception as error:  # no reason to run nothing
        return f"{type(error).__name__}: {error}"


def versions(torch) -> dict[str, str]:
    return {
        "syncbn commit": output_of("git", "-C", str(PROJECT), "rev-parse", "HEAD") or "unknown",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch's CUDA": torch.version.cuda or "none",
        "torch's NCCL": nccl_version(torch),
        "driver": driver(),
        "nvcc": output_of(tool("nvcc"), "--version").rpartition("\n")[2],
        "cmake": output_of(tool("cmake"), "--version").partition("\n")[0],
        "compiler": output_of("c++", "--version").partition("\n")[0],
        "platform": platform.platform(),
    }


def device(torch) -> dict[str, object]:
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "capability": f"{properties.major}{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory": properties.total_memory,
        "L2": properties.L2_cache_size,
    }


def lost_after(smi_worked: bool):
    """Asked after a failure: why the rest need not be tried, or nothing."""

    def lost() -> str:
        return (
            "the GPU is gone: nvidia-smi no longer answers" if smi_worked and not driver() else ""
        )

    return lost


def end(number, frame) -> None:
    raise Ended(f"ended from outside by {signal.Signals(number).name}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dry-run", action="store_true", help="print the commands, run none")
    dry_run = parser.parse_args().dry_run
    start = time.monotonic()
    print(f"gpu-check: {' '.join(google_test()) or NO_GOOGLE_TEST}", flush=True)
    if dry_run:
        for stage in stages("90-real"):
            print(f"{stage.name} ({stage.seconds} s)")
            for command in stage.commands:
                print(f"  {shlex.join(command)}")
        return 0
    try:
        import torch

        found = device(torch)
    except Exception as error:
        print(f"gpu-check: nothing was run: {sys.executable}: {type(error).__name__}: {error}")
        return 2
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)

    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    report = {"device": found, "date": date, "complete": False, "versions": versions(torch)}
    folder = Path(os.environ.get("OUT") or PROJECT / "benchmarks" / "results")
    name = re.sub(r"[^A-Za-z0-9]+", "-", str(found["name"])).strip("-")
    path = folder / f"gpu-check-{name}-{date[:10]}.json"
    for earlier in (OVERLAY, LOGS):
        shutil.rmtree(earlier, ignore_errors=True)
    CUDA_TESTS.unlink(missing_ok=True)

    runner = Runner(
        *(report, path, LOGS, PROJECT, lost_after(bool(driver()))),
        live=lambda: {"benchmarks": figures() or None},
    )
    runner.run_all(stages(f"{found['capability']}-real"), start + START_SECONDS)
    runner.write(complete=True)
    print(f"\n{found['name']}, PyTorch {torch.__version__}\n{table(runner.results)}\n")
    if (LOGS / "benchmarks.log").exists():
        print((LOGS / "benchmarks.log").read_text(errors="replace"))
    print(f"written: {path}")
    return int(any(result["status"] == "failed" for result in runner.results))


if __name__ == "__main__":
    sys.exit(main())
