# SPDX-License-Identifier: Apache-2.0
"""Builds, tests and measures what needs a GPU: `make gpu-check`, or `python3 scripts/gpu_check.py`.

It needs no make and no network: PyTorch with CUDA, CMake, Ninja, nvcc, compute-sanitizer and pytest
are there already. For the C++ tests GoogleTest's sources are in build/googletest (`make
googletest`) or installed. Stages run in turn, the most valuable first, nine minutes in all. A stage
that fails, or that lacks something, says so, and the others still run.

One JSON in benchmarks/results, or in the folder that the variable OUT names, is rewritten after
each stage. Exit codes: 0, 1 if a stage failed, 2 without a GPU. --dry-run prints the commands.
"""

import importlib.util
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import googletest

PROJECT = Path(__file__).resolve().parent.parent
BUILD = PROJECT / "build" / "gpu"
OVERLAY = BUILD / "overlay"
CUDA_TESTS = BUILD / "tests" / "cuda" / "syncbn_cuda_tests"
LOG = 20_000  # characters of a stage's output that the report keeps
SANITIZED = "CudaBatchNorm.FewRandomStepsExact:CudaBatchNorm.Disagreement*"
#: Two processes on one GPU; one that hangs must not keep the others from their turn.
SEVERAL_PROCESSES = ("test_cuda_ranks.py",)


def tool(name: str) -> str:
    """The program's path: PATH's, or that of the Python environment or of CUDA; else its name."""
    cuda = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    places = (os.environ.get("PATH", ""), str(Path(sys.executable).parent), f"{cuda}/bin")
    return shutil.which(name, path=os.pathsep.join(places)) or name


def google_test() -> list[str]:
    """CMake's arguments for the sources that came along; else CMake looks by itself."""
    if googletest.problem(googletest.CARRIED):
        return []
    sources = f"-DFETCHCONTENT_SOURCE_DIR_GOOGLETEST={googletest.CARRIED}"
    return [sources, "-DCMAKE_DISABLE_FIND_PACKAGE_GTest=ON"]


def nccl_root() -> list[str]:
    """NCCL as PyTorch's packages bring it."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if Path(folder, "nccl", "include", "nccl.h").exists():
            return [f"-DNCCL_ROOT={folder}/nccl"]
    return []


def stages(architecture: str) -> list[tuple[str, int, list[str]]]:
    """(Name, seconds, command), the most valuable first."""
    cmake, python = tool("cmake"), sys.executable
    configure = [cmake, "-S", str(PROJECT), "-B", str(BUILD), "-G", "Ninja"]
    configure += [f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}", "-DCMAKE_BUILD_TYPE=Release"]
    configure += ["-DSYNCBN_CUDA=ON", "-DSYNCBN_TORCH=ON", f"-DPython3_EXECUTABLE={python}"]
    configure += [f"-DSYNCBN_CUDA_ARCHITECTURES={architecture}-real", *nccl_root()]
    build = [cmake, "--build", str(BUILD), "--parallel", "--target"]
    tests = sorted((PROJECT / "tests" / "python" / "cuda").glob("test_*.py"))
    pytest = [python, "-m", "pytest", "-vv", "-p", "no:cacheprovider"]
    pytest += ["-o", "faulthandler_timeout=25"]
    ctest = [tool("ctest"), "--test-dir", str(BUILD), "-R", r"^gpu\.", "--no-tests=error", "-j4"]
    ctest += ["--timeout", "30", "--output-on-failure"]
    bench = [python, str(PROJECT / "benchmarks" / "bench_gpu.py"), "--seconds", "75"]
    several = [str(path) for path in tests if path.name in SEVERAL_PROCESSES]
    sanitizers = ("memcheck", "racecheck", "initcheck", "synccheck")
    return [
        ("configure", 30, [*configure, "-DSYNCBN_TESTS=OFF"]),
        ("build", 120, [*build, "syncbn", "syncbn_torch_cpu", "syncbn_torch_cuda"]),
        ("overlay", 5, [python, __file__, "--overlay"]),
        ("Python tests", 60, [*pytest, *(str(path) for path in tests if str(path) not in several)]),
        ("benchmarks", 90, [*bench, "--json", str(BUILD / "benchmarks.json")]),
        ("C++ tests: configure", 15, [*configure, "-DSYNCBN_TESTS=ON", *google_test()]),
        # -k 0: the targets that can be built, where another cannot.
        ("C++ tests: build", 45, [*build, "syncbn_gpu_check", "--", "-k", "0"]),
        ("C++ tests", 40, ctest),
        ("Python tests, two processes", 70, [*pytest, *several]),
        *(
            (
                name,
                15,
                [tool("compute-sanitizer"), "--tool", name, "--error-exitcode", "1"]
                + [str(CUDA_TESTS), f"--gtest_filter={SANITIZED}"],
            )
            for name in sanitizers
        ),
    ]


def make_overlay() -> None:
    """The Python package with the libraries just built, for PYTHONPATH."""
    package = OVERLAY / "syncbn"
    shutil.rmtree(OVERLAY, ignore_errors=True)
    ignored = shutil.ignore_patterns("lib", "_build.py", "*.in", "__pycache__")
    shutil.copytree(PROJECT / "python" / "syncbn", package, ignore=ignored)
    (package / "lib").mkdir()
    for pattern in ("src/libsyncbn.so*", "bindings/torch/**/libsyncbn_torch*.so"):
        for library in BUILD.glob(pattern):
            shutil.copy2(library, package / "lib")
    shutil.copy2(BUILD / "bindings" / "torch" / "_build.py", package)


def run(name: str, seconds: float, command: list[str]) -> dict:
    """Runs a stage, and ends it with all its children when its time is up; what came of it."""
    paths = filter(None, [str(OVERLAY), os.environ.get("PYTHONPATH")])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    log = BUILD / "stage.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    with log.open("wb") as file:
        try:
            process = subprocess.Popen(
                command,
                cwd=PROJECT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            code = process.wait(seconds)
            problem = "" if code == 0 else f"exit code {code}"
        except OSError as error:
            problem = str(error)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(5)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            problem = f"not done after {seconds:g} s"
    text = log.read_text(errors="replace")
    taken = round(time.monotonic() - begin, 1)
    result = {"stage": name, "problem": problem, "seconds": taken, "log": text[-LOG:]}
    print(f"{name}: {problem or 'ok'}, {taken} s", flush=True)
    if problem:
        print(text[-2000:], flush=True)
    return result


def output_of(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    return done.stdout.strip()


def main() -> int:
    if "--overlay" in sys.argv:
        make_overlay()
        return 0
    if "--dry-run" in sys.argv:
        for name, seconds, command in stages("90"):
            print(f"{name} ({seconds} s)\n  {shlex.join(command)}")
        return 0
    import torch

    if not torch.cuda.is_available():
        print(f"gpu-check: nothing was run: PyTorch {torch.__version__} finds no GPU")
        return 2
    properties = torch.cuda.get_device_properties(0)
    report: dict = {
        "device": properties.name,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": output_of("git", "-C", str(PROJECT), "rev-parse", "HEAD"),
        "driver": output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "nvcc": output_of(tool("nvcc"), "--version"),
        "python": platform.python_version(),
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
        "stages": [],
    }
    folder = Path(os.environ.get("OUT") or PROJECT / "benchmarks" / "results")
    folder.mkdir(parents=True, exist_ok=True)
    figures = BUILD / "benchmarks.json"
    figures.unlink(missing_ok=True)  # of an earlier run
    path = folder / f"gpu-check-{properties.name.replace(' ', '-')}-{report['date'][:10]}.json"
    for name, seconds, command in stages(f"{properties.major}{properties.minor}"):
        report["stages"].append(run(name, seconds, command))
        if figures.exists():
            report["benchmarks"] = json.loads(figures.read_text())
        part = path.with_suffix(".part")  # whoever ends this process finds a whole report
        part.write_text(json.dumps(report, indent=1) + "\n")
        part.replace(path)
    print(f"written: {path}")
    return int(any(stage["problem"] for stage in report["stages"]))


if __name__ == "__main__":
    sys.exit(main())
