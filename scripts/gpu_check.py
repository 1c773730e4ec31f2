# SPDX-License-Identifier: Apache-2.0
"""Builds, tests and measures what needs a GPU: `make gpu-check`, or `python3 scripts/gpu_check.py`.

It needs no make and no network: PyTorch with CUDA, CMake, Ninja, nvcc, compute-sanitizer and pytest
are there already. For the C++ tests GoogleTest's sources are in build/googletest (`make
googletest`) or installed. Tests run side by side, then the benchmarks alone, then the sanitizers. A
stage that fails, or that lacks something, says so, and the others still run.

--build 90 builds for GPUs of compute capability 9.0 and does no more; it needs no GPU. --built
takes what lies in build/gpu-built, which may come from another machine with the same PyTorch.

One JSON in benchmarks/results, or in the folder that the variable OUT names, is rewritten after
each stage. Exit codes: 0, 1 if a stage failed, 2 without a GPU. --dry-run prints the commands.
"""

import argparse
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import googletest

Stage = tuple[str, int, list[str]]  # name, seconds, command

PROJECT = Path(__file__).resolve().parent.parent
BUILD = PROJECT / "build" / "gpu"
BUILT = PROJECT / "build" / "gpu-built"  # the package, the C++ tests, which commit they are of
CUDA_TESTS, NCCL_TESTS = BUILT / "syncbn_cuda_tests", BUILT / "syncbn_nccl_tests"
LOG = 20_000  # characters of a failed stage's output that the report keeps
SUMMARY = 300  # and of another one's
DISAGREEMENT = "CudaBatchNorm.Disagreement*"
#: Tools of compute-sanitizer, and the tests that they watch. racecheck takes few launches.
SANITIZERS = {
    "memcheck": f"CudaBatchNorm.FewRandomStepsExact:{DISAGREEMENT}",
    "racecheck": f"CudaBatchNorm.TypesInTurnExact:{DISAGREEMENT}",
    "initcheck": f"CudaBatchNorm.FewRandomStepsExact:{DISAGREEMENT}",
    "synccheck": f"CudaBatchNorm.FewRandomStepsExact:{DISAGREEMENT}",
}


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


def nccl_root() -> Path | None:
    """NCCL as PyTorch's packages bring it."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if Path(folder, "nccl", "include", "nccl.h").exists():
            return Path(folder, "nccl")
    return None


def building(architecture: str) -> list[Stage]:
    cmake, nccl = tool("cmake"), nccl_root()
    configure = [cmake, "-S", str(PROJECT), "-B", str(BUILD), "-G", "Ninja"]
    configure += [f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}", "-DCMAKE_BUILD_TYPE=Release"]
    configure += ["-DSYNCBN_CUDA=ON", "-DSYNCBN_TORCH=ON", f"-DPython3_EXECUTABLE={sys.executable}"]
    configure += [f"-DSYNCBN_CUDA_ARCHITECTURES={architecture}-real"]
    configure += [f"-DNCCL_ROOT={nccl}"] if nccl else []
    build = [cmake, "--build", str(BUILD), "--parallel", "--target"]
    collect = [sys.executable, __file__, "--collect"]
    return [
        ("configure", 60, [*configure, "-DSYNCBN_TESTS=OFF"]),
        ("build", 1200, [*build, "syncbn", "syncbn_torch_cpu", "syncbn_torch_cuda"]),
        ("C++ tests: configure", 60, [*configure, "-DSYNCBN_TESTS=ON", *google_test()]),
        # -k 0: the targets that can be built, where another cannot.
        ("C++ tests: build", 600, [*build, "syncbn_gpu_check", "--", "-k", "0"]),
        ("collect", 10, collect),
    ]


def checking() -> list[list[Stage]]:
    """The stages of a list run side by side."""
    python = sys.executable
    tests = sorted((PROJECT / "tests" / "python" / "cuda").glob("test_*.py"))
    pytest = [python, "-m", "pytest", "-vv", "-p", "no:cacheprovider"]
    pytest += ["-o", "faulthandler_timeout=40"]
    bench = [python, str(PROJECT / "benchmarks" / "bench_gpu.py"), "--seconds", "75"]
    return [
        [
            *((path.stem, 120, [*pytest, str(path)]) for path in tests),
            ("C++ tests", 120, [str(CUDA_TESTS)]),
            ("C++ tests of NCCL", 120, [str(NCCL_TESTS)]),
        ],
        [("benchmarks", 90, [*bench, "--json", str(BUILD / "benchmarks.json")])],
        [
            (
                name,
                60,
                [tool("compute-sanitizer"), "--tool", name, "--error-exitcode", "1"]
                + [str(CUDA_TESTS), f"--gtest_filter={watched}"],
            )
            for name, watched in SANITIZERS.items()
        ],
    ]


def collect() -> None:
    """Puts the Python package with the libraries just built, and the C++ tests, into one folder."""
    package = BUILT / "syncbn"
    shutil.rmtree(BUILT, ignore_errors=True)
    ignored = shutil.ignore_patterns("lib", "_build.py", "*.in", "__pycache__")
    shutil.copytree(PROJECT / "python" / "syncbn", package, ignore=ignored)
    (package / "lib").mkdir()
    for pattern in ("src/libsyncbn*.so*", "bindings/torch/**/libsyncbn_torch*.so"):
        for library in BUILD.glob(pattern):
            shutil.copy2(library, package / "lib", follow_symlinks=False)
    shutil.copy2(BUILD / "bindings" / "torch" / "_build.py", package)
    for test in (CUDA_TESTS, NCCL_TESTS):
        if (BUILD / "tests" / "cuda" / test.name).exists():
            shutil.copy2(BUILD / "tests" / "cuda" / test.name, BUILT)
    made = {
        "commit": output_of("git", "-C", str(PROJECT), "describe", "--always", "--dirty"),
        "nvcc": output_of(tool("nvcc"), "--version"),
    }
    (BUILT / "made.json").write_text(json.dumps(made))


def environment_of_stages() -> dict[str, str]:
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    nccl = nccl_root()
    for name, folders in (
        ("PYTHONPATH", [BUILT]),
        ("LD_LIBRARY_PATH", [BUILT / "syncbn" / "lib", *([nccl / "lib"] if nccl else [])]),
    ):
        paths = filter(None, [*map(str, folders), os.environ.get(name)])
        environment[name] = os.pathsep.join(paths)
    return environment


def run(name: str, seconds: float, command: list[str]) -> dict:
    """Runs a stage, and ends it with all its children when its time is up; what came of it."""
    log = BUILD / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    with log.open("wb") as file:
        try:
            process = subprocess.Popen(
                command,
                cwd=PROJECT,
                env=environment_of_stages(),
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
    result = {
        "stage": name,
        "problem": problem,
        "seconds": taken,
        "log": text[-(LOG if problem else SUMMARY) :],
    }
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
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--build", metavar="ARCHITECTURE", help="build for it, and run nothing")
    parser.add_argument("--built", action="store_true", help="build nothing")
    parser.add_argument("--collect", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--dry-run", action="store_true", help="print the commands")
    given = parser.parse_args()
    if given.collect:
        collect()
        return 0
    import torch

    capability = "90"
    if not (given.build or given.dry_run):
        if not torch.cuda.is_available():
            print(f"gpu-check: nothing was run: PyTorch {torch.__version__} finds no GPU")
            return 2
        properties = torch.cuda.get_device_properties(0)
        capability = f"{properties.major}{properties.minor}"
    groups = [] if given.built else [[stage] for stage in building(given.build or capability)]
    if given.dry_run:
        for name, seconds, command in sum(groups + checking(), []):
            print(f"{name} ({seconds} s)\n  {shlex.join(command)}")
        return 0
    if given.build:
        return int(any(run(*stage)["problem"] for (stage,) in groups))
    groups += checking()

    report: dict = {
        "device": properties.name,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "driver": output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "python": platform.python_version(),
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
        "stages": [],
    }
    folder = Path(os.environ.get("OUT") or PROJECT / "benchmarks" / "results")
    folder.mkdir(parents=True, exist_ok=True)
    figures = BUILD / "benchmarks.json"
    figures.unlink(missing_ok=True)  # of an earlier run
    path = folder / f"gpu-check-{properties.name.replace(' ', '-')}-{report['date'][:10]}.json"
    for group in groups:
        with ThreadPoolExecutor(len(group)) as pool:
            report["stages"] += pool.map(lambda stage: run(*stage), group)
        if (BUILT / "made.json").exists():
            report["built"] = json.loads((BUILT / "made.json").read_text())
        if figures.exists():
            report["benchmarks"] = json.loads(figures.read_text())
        part = path.with_suffix(".part")  # whoever ends this process finds a whole report
        part.write_text(json.dumps(report, indent=1) + "\n")
        part.replace(path)
    print(f"written: {path}")
    return int(any(stage["problem"] for stage in report["stages"]))


if __name__ == "__main__":
    sys.exit(main())
