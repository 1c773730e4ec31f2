# SPDX-License-Identifier: Apache-2.0
"""scripts/gpu_check.py from its first line to its last, as on a bare machine with a GPU: a fresh
copy of the tree with GoogleTest in build/googletest, a PATH with compilers, CMake and Ninja and no
more, nothing that could be fetched.

Real: the script and its stages, CMake, both builds with nvcc and GoogleTest, the overlay, pytest
and the bodies of the tests, CTest, the benchmarks, the reports. Fake: the GPU that PyTorch finds is
this CPU, as fake_machine/fake_device.py says; nvidia-smi and compute-sanitizer are scripts; the
compilers do not optimize, and stages have more time, as this machine may be slow. CUDA itself
finds no device: what of the tests must fail then is written down here, and nothing else may.
test_gpu_check.py has runs that are killed, that hang, and that pass.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support import PROJECT

pytestmark = pytest.mark.weekly  # .ci/run calls it by itself
NVCC = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
GOOGLE_TEST = Path("/usr/src/googletest")
PROGRAMS = ("sh", "env", "cat", "rm", "as", "ld", "ar", "ranlib", "nm", "objcopy", "uname")
FROM_PYTHON = ("cmake", "ctest", "ninja")

# What the CPU cannot play: another device than its own, kernels on it, errors of CUDA.
NOT_ON_A_CPU = {
    "test_tensors_on_several_devices_are_an_error",
    "test_doctor_and_report_name_cuda",
    "test_device_errors_carry_a_text[read_in_a_capture]",
    "test_device_errors_carry_a_text[replay_that_fails]",
}
# (A compiler asks CUDA for its device.)
RANKS_NOT_ON_A_CPU = {
    f"test_on_two_ranks[nccl-case_{name}]" for name in ("engine", "compiled_step_exact")
}
# Gloo plays NCCL here: once is enough.
NOT_AGAIN = "not (test_on_two_ranks and gloo)"

SCRIPTS = {
    "c++": '#!/bin/sh\nexec {cxx} "$@" -O0\n',
    "nvcc": '#!/bin/sh\nexec {nvcc} "$@" -Xcicc -O0 -Xptxas -O0\n',
    "nvidia-smi": "#!/bin/sh\n[ ! -e {lost} ] && echo 580.95\n",
    # It runs the tests, does not support the device, and is there when the GPU vanishes.
    "compute-sanitizer": """#!/bin/sh
case "$2" in
  memcheck) shift 4; exec "$@" ;;
  racecheck) echo "========= Error: Device not supported"; exit 1 ;;
  initcheck) : > {lost}; echo "CUDA error 999"; exit 1 ;;
esac
""",
}
DRIVER = """
import dataclasses, sys
sys.path.insert(0, "scripts")
import gpu_check
real = gpu_check.stages
gpu_check.stages = lambda a: [dataclasses.replace(s, seconds=4 * s.seconds) for s in real(a)]
sys.exit(gpu_check.main())
"""


def copy_tree(to: Path) -> None:
    """What travels: files that are tracked, or that git does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=PROJECT, check=True, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        source, target = PROJECT / name, to / name
        if source.is_file() and not source.is_symlink():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


def bare_path(folder: Path, lost: Path) -> Path:
    """A folder with all programs that the machine has."""
    folder.mkdir()
    for name in PROGRAMS:
        (folder / name).symlink_to(shutil.which(name))
    for name in FROM_PYTHON:
        (folder / name).symlink_to(Path(sys.executable).parent / name)
    for name, text in SCRIPTS.items():
        program = folder / name
        program.write_text(text.format(cxx=shutil.which("g++"), nvcc=NVCC, lost=lost))
        program.chmod(0o755)
    for other in ("g++", "gcc", "cc"):
        compiler = shutil.which("gcc" if other != "g++" else "g++")
        (folder / other).write_text(SCRIPTS["c++"].format(cxx=compiler))
        (folder / other).chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory):
    """The process that has ended, its report, and the tree."""
    if not Path(NVCC).exists() or not GOOGLE_TEST.exists():
        pytest.skip("needs nvcc and Debian's package googletest")
    folder = tmp_path_factory.mktemp("machine")
    tree, out, tools = folder / "tree", folder / "out", bare_path(folder / "bin", folder / "lost")
    copy_tree(tree)
    script = [sys.executable, str(tree / "scripts" / "googletest.py"), str(GOOGLE_TEST)]
    subprocess.run(script, check=True, capture_output=True)
    environment = {
        "PATH": str(tools),
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "OUT": str(out),
        "CUDA_HOME": str(folder / "cuda"),
        "PYTHONPATH": str(tree / "tests" / "python" / "project" / "fake_machine"),
        "PYTEST_ADDOPTS": f"-p fake_device_tests -k '{NOT_AGAIN}'",
        "GIT_ALLOW_PROTOCOL": "none",  # as without a network
        "all_proxy": "http://127.0.0.1:9",
    }
    (folder / "cuda").mkdir()
    (folder / "cuda" / "bin").symlink_to(tools)
    command = [sys.executable, "-c", DRIVER]
    options = {"cwd": tree, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run(command, timeout=1500, **options)
    reports = list(out.iterdir()) if out.exists() else []
    assert [path.suffix for path in reports] == [".json"], done.stdout + done.stderr
    return done, json.loads(reports[0].read_text()), tree


def failed_tests(stage: dict) -> set[str]:
    return {name.rpartition(".")[2] for name in stage["failures"]}


def test_googletest_is_found_by_itself(rehearsal):
    done, report, tree = rehearsal
    first = done.stdout.splitlines()[0]
    assert f"-DFETCHCONTENT_SOURCE_DIR_GOOGLETEST={tree}/build/googletest" in first
    assert done.returncode == 1 and report["complete"] is True
    assert report["device"]["name"] == "Fake GPU" and report["versions"]["driver"] == "580.95"


def test_stages_run_in_order_and_fail_for_nothing_but_the_missing_device(rehearsal):
    done, report, _ = rehearsal
    states = [(stage["name"], stage["status"]) for stage in report["stages"]]
    assert states == [
        ("build", "ok"),
        ("Python tests: one process", "failed"),
        ("C++ tests: build", "ok"),
        ("C++ tests", "failed"),
        ("benchmarks", "ok"),
        ("Python tests: several processes", "failed"),
        ("memcheck", "failed"),
        ("racecheck", "not possible here"),
        ("initcheck", "failed"),
        ("synccheck", "failed"),
    ], done.stdout
    for name, status in states:
        assert f"\n{name} " in done.stdout and status in done.stdout.replace("FAILED", "failed")


def stage_of(rehearsal, name: str) -> dict:
    (found,) = [stage for stage in rehearsal[1]["stages"] if stage["name"] == name]
    return found


def test_bodies_of_gpu_tests_run(rehearsal):
    stage = stage_of(rehearsal, "Python tests: one process")
    assert failed_tests(stage) == NOT_ON_A_CPU, stage["log"]
    assert int(stage["summary"].split(": ")[1].split(" passed")[0]) > 200
    ranks = stage_of(rehearsal, "Python tests: several processes")
    assert failed_tests(ranks) == RANKS_NOT_ON_A_CPU, ranks["log"]


def test_cpp_tests_that_found_no_device_are_failures_that_say_so(rehearsal):
    """All of them but the ones that need two."""
    for name in ("C++ tests", "memcheck"):
        stage = stage_of(rehearsal, name)
        assert stage["summary"].startswith("tests that did not run: 0 passed, "), stage
        assert all("needs a GPU" in text for text in stage["failures"].values())
    names = " ".join(stage_of(rehearsal, "C++ tests")["failures"])
    assert "gpu.CudaBatchNorm.RandomStepsExact" in names and "gpu.Nccl.Captured" in names


def test_gpu_that_vanishes_is_the_reason_of_what_comes_after(rehearsal):
    assert stage_of(rehearsal, "racecheck")["summary"] == "Device not supported"
    assert stage_of(rehearsal, "initcheck")["summary"] == "exit code 1"
    last = stage_of(rehearsal, "synccheck")
    assert last["summary"] == "the GPU is gone: nvidia-smi no longer answers"
    assert last["seconds"] == 0


def test_benchmarks_measure_what_fits_and_say_why_not_for_the_rest(rehearsal):
    layers = rehearsal[1]["benchmarks"]["layers"]
    fits = [layer for layer in layers if "problem" not in layer]
    assert {tuple(layer["shape"]) for layer in fits} == {(64, 2048)}
    assert all(layer["graph"]["sums"]["us"] > 0 for layer in fits)
    rest = [layer["problem"] for layer in layers if layer not in fits]
    assert len(rest) > 30 and all("out of memory" in problem for problem in rest)
