# SPDX-License-Identifier: Apache-2.0
"""Builds, tests and measures what needs a GPU: `make gpu-check`, or `python3 scripts/gpu_check.py`.

It needs no make and no network: PyTorch with CUDA, CMake, Ninja, nvcc, compute-sanitizer and pytest
are there already. For the C++ tests GoogleTest's sources are in build/googletest (`make
googletest`) or installed. Tests run side by side, then the benchmarks alone, then the sanitizers. A
stage that fails, or that lacks something, says so, and the others still run. --build 90 builds for
GPUs of compute capability 9.0 and does no more; it needs no GPU. --built takes what lies in
build/gpu-built, which may come from another machine with the same PyTorch.

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

PROJECT, PYTHON = Path(__file__).resolve().parent.parent, sys.executable
BUILD = PROJECT / "build" / "gpu"
BUILT = PROJECT / "build" / "gpu-built"  # the package, the C++ tests, which commit they are of
CUDA_TESTS, NCCL_TESTS = BUILT / "syncbn_cuda_tests", BUILT / "syncbn_nccl_tests"
LOG, SUMMARY = 20_000, 300  # characters that the report keeps of a failed stage's output, or not
#: Tools of compute-sanitizer, and the tests that they watch. racecheck takes few launches.
WATCHED = {t: "FewRandomStepsExact" for t in ("memcheck", "initcheck", "synccheck")}
WATCHED["racecheck"] = "TypesInTurnExact"


def tool(name: str) -> str:
    """The program's path: PATH's, or that of the Python environment or of CUDA; else its name."""
    cuda = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    places = (os.environ.get("PATH", ""), str(Path(PYTHON).parent), f"{cuda}/bin")
    return shutil.which(name, path=os.pathsep.join(places)) or name


def nccl_root() -> Path | None:
    """NCCL as PyTorch's packages bring it."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(f, "nccl") for f in (spec.submodule_search_locations or ())] if spec else []
    return next((f for f in folders if (f / "include" / "nccl.h").exists()), None)


def building(architecture: str) -> list[Stage]:
    configure = [tool("cmake"), "-S", str(PROJECT), "-B", str(BUILD), "-G", "Ninja"]
    configure += [f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}", "-DCMAKE_BUILD_TYPE=Release"]
    configure += ["-DSYNCBN_CUDA=ON", "-DSYNCBN_TORCH=ON", f"-DPython3_EXECUTABLE={PYTHON}"]
    configure += [f"-DSYNCBN_CUDA_ARCHITECTURES={architecture}-real"]
    configure += [f"-DNCCL_ROOT={nccl}"] if (nccl := nccl_root()) else []
    build = [tool("cmake"), "--build", str(BUILD), "--parallel", "--target"]
    tests = [*configure, "-DSYNCBN_TESTS=ON"]
    if not googletest.problem(googletest.CARRIED):  # the sources came along
        tests += [f"-DFETCHCONTENT_SOURCE_DIR_GOOGLETEST={googletest.CARRIED}"]
        tests += ["-DCMAKE_DISABLE_FIND_PACKAGE_GTest=ON"]
    return [
        ("configure", 60, [*configure, "-DSYNCBN_TESTS=OFF"]),
        ("build", 1200, [*build, "syncbn", "syncbn_torch_cpu", "syncbn_torch_cuda"]),
        ("C++ tests: configure", 60, tests),
        # -k 0: the targets that can be built, where another cannot.
        ("C++ tests: build", 600, [*build, "syncbn_gpu_check", "--", "-k", "0"]),
        ("collect", 10, [PYTHON, __file__, "--collect"]),
    ]


def checking() -> list[list[Stage]]:
    """The stages of a list run side by side."""
    tests = sorted((PROJECT / "tests" / "python" / "cuda").glob("test_*.py"))
    pytest = [PYTHON, "-m", "pytest", "-vv", "-p", "no:cacheprovider"]
    pytest += ["-o", "faulthandler_timeout=40"]
    stages = [(path.stem, 120, [*pytest, str(path)]) for path in tests]
    stages += [("C++ tests", 120, [str(CUDA_TESTS)]), ("C++ tests of NCCL", 120, [str(NCCL_TESTS)])]
    bench = [PYTHON, str(PROJECT / "benchmarks" / "bench_gpu.py"), "--seconds", "75"]
    bench += ["--json", str(BUILD / "benchmarks.json")]
    sanitizer = [tool("compute-sanitizer"), "--error-exitcode", "1", "--tool"]
    only = "--gtest_filter=CudaBatchNorm.Disagreement*:CudaBatchNorm."
    watched = [(t, 60, [*sanitizer, t, str(CUDA_TESTS), only + n]) for t, n in WATCHED.items()]
    return [stages, [("benchmarks", 90, bench)], watched]


def collect() -> int:
    """Puts the Python package with the libraries just built, and the C++ tests, into one folder."""
    library = BUILT / "syncbn" / "lib"
    shutil.rmtree(BUILT, ignore_errors=True)
    ignored = shutil.ignore_patterns("lib", "_build.py", "*.in", "__pycache__")
    shutil.copytree(PROJECT / "python" / "syncbn", library.parent, ignore=ignored)
    library.mkdir()
    for pattern, folder in (
        ("src/libsyncbn*.so*", library),
        ("bindings/torch/**/libsyncbn_torch*.so", library),
        ("bindings/torch/_build.py", library.parent),
        ("tests/cuda/syncbn_*_tests", BUILT),
    ):
        for file in BUILD.glob(pattern):
            shutil.copy2(file, folder, follow_symlinks=False)
    commit = output_of("git", "-C", str(PROJECT), "describe", "--always", "--dirty")
    made = {"commit": commit, "nvcc": output_of(tool("nvcc"), "--version")}
    (BUILT / "made.json").write_text(json.dumps(made))
    return 0


def run(name: str, seconds: float, command: list[str]) -> dict:
    """Runs a stage, and ends it with all its children when its time is up; what came of it."""
    log, begin, nccl = BUILD / "logs" / f"{name}.log", time.monotonic(), nccl_root()
    log.parent.mkdir(parents=True, exist_ok=True)
    paths = {"PYTHONPATH": [BUILT], "LD_LIBRARY_PATH": [BUILT / "syncbn" / "lib"]}
    paths["LD_LIBRARY_PATH"] += [nccl / "lib"] if nccl else []
    own = {n: ":".join([*map(str, p), *filter(None, [os.getenv(n)])]) for n, p in paths.items()}
    own |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    problem, nothing = "", subprocess.DEVNULL
    with log.open("wb") as file:
        options: dict = {"stdin": nothing, "stdout": file, "stderr": subprocess.STDOUT}
        options |= {"cwd": PROJECT, "env": os.environ | own, "start_new_session": True}
        try:
            process = subprocess.Popen(command, **options)
            problem = f"exit code {code}" if (code := process.wait(seconds)) else ""
        except OSError as error:
            problem = str(error)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(5)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            problem = f"not done after {seconds:g} s"
    text, taken = log.read_text(errors="replace"), round(time.monotonic() - begin, 1)
    print(f"{name}: {problem or 'ok'}, {taken} s", text[-2000:] if problem else "", flush=True)
    kept = text[-(LOG if problem else SUMMARY) :]
    return {"stage": name, "problem": problem, "seconds": taken, "log": kept}


def output_of(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--build", metavar="ARCHITECTURE", help="build for it, and run nothing")
    parser.add_argument("--built", action="store_true", help="build nothing")
    parser.add_argument("--collect", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--dry-run", action="store_true", help="print the commands")
    given = parser.parse_args()
    if given.collect:
        return collect()
    import torch

    capability = given.build or "90"
    if not (given.build or given.dry_run):
        if not torch.cuda.is_available():
            print(f"gpu-check: nothing was run: PyTorch {torch.__version__} finds no GPU")
            return 2
        properties = torch.cuda.get_device_properties(0)
        capability = f"{properties.major}{properties.minor}"
    groups = [] if given.built else [[stage] for stage in building(capability)]
    if given.build and not given.dry_run:
        return int(any(run(*stage)["problem"] for (stage,) in groups))
    groups += checking()
    if given.dry_run:
        for name, seconds, command in sum(groups, []):
            print(f"{name} ({seconds} s)\n  {shlex.join(command)}")
        return 0

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
    parts = {"built": BUILT / "made.json", "benchmarks": BUILD / "benchmarks.json"}
    parts["benchmarks"].unlink(missing_ok=True)  # of an earlier run
    path = folder / f"gpu-check-{properties.name.replace(' ', '-')}-{report['date'][:10]}.json"
    for group in groups:
        with ThreadPoolExecutor(len(group)) as pool:
            report["stages"] += pool.map(lambda stage: run(*stage), group)
        report |= {k: json.loads(file.read_text()) for k, file in parts.items() if file.exists()}
        part = path.with_suffix(".part")  # whoever ends this process finds a whole report
        part.write_text(json.dumps(report, indent=1) + "\n")
        part.replace(path)
    print(f"written: {path}")
    return int(any(stage["problem"] for stage in report["stages"]))


if __name__ == "__main__":
    sys.exit(main())
