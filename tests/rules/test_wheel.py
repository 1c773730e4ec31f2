# SPDX-License-Identifier: Apache-2.0
"""What `make wheel` refuses: scripts/check_wheel.py passes the package as it is and tells each
defect by its name alone; scripts/smoke_wheel.py uses the wheel, and no other syncbn that is about.
"""

import base64
import csv
import hashlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
SCRIPT = PROJECT / "scripts" / "check_wheel.py"
sys.path.insert(0, str(SCRIPT.parent))
import check_wheel  # noqa: E402

pytestmark = pytest.mark.skipif(shutil.which("readelf") is None, reason="readelf is not installed")

Files = dict[str, bytes]
Change = Callable[[Files], Files]
INSTALLERS = {"INSTALLER", "REQUESTED", "direct_url.json", "RECORD"}


@pytest.fixture(scope="module")
def package() -> Files:
    """The installed files, as the wheel had them; RECORD is made anew by `pack`."""
    files = {
        str(file): Path(str(file.locate())).read_bytes()
        for file in metadata.files("syncbn") or []
        if "__pycache__" not in file.parts and file.name not in INSTALLERS
    }
    (name,) = (name for name in files if name.endswith("/WHEEL"))
    _, machines, versions = check_wheel.look_at_libraries(files)
    glibc = check_wheel.lowest_policy(versions)
    assert glibc is not None
    tag = f"manylinux_{glibc[0]}_{glibc[1]}_{machines.pop()}"
    files[name] = re.sub(rb"(?m)^Tag: .*", f"Tag: py3-none-{tag}".encode(), files[name])
    return files


def info_of(files: Files) -> str:
    return next(name for name in files if name.endswith("/WHEEL")).partition("/")[0]


def record_of(files: Files) -> bytes:
    out = io.StringIO()
    rows = csv.writer(out, lineterminator="\n")
    for name, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
        rows.writerow([name, f"sha256={digest}", len(content)])
    rows.writerow([f"{info_of(files)}/RECORD", "", ""])
    return out.getvalue().encode()


def pack(files: Files, folder: Path, tag: str | None = None, record: bytes | None = None) -> Path:
    """A wheel of the files; its name has the tag that WHEEL has, unless another is given."""
    info = info_of(files)
    written = re.search(rb"(?m)^Tag: (\S+)", files[f"{info}/WHEEL"])
    assert written is not None
    wheel = folder / f"{info.removesuffix('.dist-info')}-{tag or written[1].decode()}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        archive.writestr(f"{info}/RECORD", record or record_of(files))
    return wheel


def platform_of(files: Files) -> str:
    return re.findall(rb"(?m)^Tag: py3-none-(\S+)", files[f"{info_of(files)}/WHEEL"])[0].decode()


def test_the_package_passes(package: Files, tmp_path: Path) -> None:
    assert check_wheel.check(pack(package, tmp_path)) == []


def added(name: str, content: bytes = b"") -> Change:
    return lambda files: files | {name: content}


def without(name: str) -> Change:
    return lambda files: {key: content for key, content in files.items() if key != name}


def rewritten(name: str, pattern: bytes, replacement: bytes) -> Change:
    """A file of the wheel's information, with another text in it."""

    def change(files: Files) -> Files:
        path = f"{info_of(files)}/{name}"
        return files | {path: re.sub(pattern, replacement, files[path], count=1)}

    return change


CPU = "libsyncbn_torch_cpu.so"
_OTHERS = ("syncbn/lib/libcudart.so.13", "syncbn.libs/libtorch_cpu.so", "syncbn.libs/libnccl.so.2")
_UNEXPECTED = ("syncbn/notes.txt", "tests/a.py", "syncbn/lib/libsyncbn.so.0.1")
_MISSING = ("nn.py", "include/syncbn/tensor.hpp", "cmake/syncbn-config.cmake", f"lib/{CPU}")
#: What is wrong with a wheel, and what is said of it.
DEFECTS: list[tuple[Change, str]] = [
    *(
        (added(name, b"\x7fELF"), f"{name}: comes with PyTorch, the driver or the system")
        for name in _OTHERS
    ),
    *((added(name), f"{name}: not an expected file") for name in _UNEXPECTED),
    *((without(f"syncbn/{name}"), f"syncbn/{name}: is missing") for name in _MISSING),
    (
        rewritten("METADATA", rb"(?m)^(Requires-Dist: torch.*)$", rb"\1\nRequires-Dist: numpy"),
        "METADATA: Requires-Dist: got ['torch>=2.11', 'numpy', 'greenlet<4,>=3.1'], expected "
        "['torch>=2.11', 'greenlet<4,>=3.1']",
    ),
    (
        rewritten("METADATA", rb"(?m)^(Requires-Python: ).*$", rb"\1>=3.8"),
        "METADATA: Requires-Python: got ['>=3.8'], expected ['>=3.10']",
    ),
    (
        rewritten("METADATA", rb"(?m)^License-Expression: .*\n", b""),
        "METADATA: License-Expression: got [], expected ['Apache-2.0']",
    ),
    (
        rewritten("METADATA", rb"\Z", b"[CUDA](docs/cuda.md)"),
        "METADATA: description: docs/cuda.md is not beside it on the package index",
    ),
    (
        rewritten("WHEEL", b"Purelib: false", b"Purelib: true"),
        "WHEEL: Root-Is-Purelib: got true, expected false",
    ),
    (added(f"syncbn/lib/{CPU}", b"a link, unpacked"), f"syncbn/lib/{CPU}: not an ELF"),
]


@pytest.mark.parametrize("change, told", DEFECTS, ids=[told for _, told in DEFECTS])
def test_defects_are_told(package: Files, tmp_path: Path, change: Change, told: str) -> None:
    (problem,) = check_wheel.check(pack(change(package), tmp_path))
    assert problem.startswith(told)


def test_the_cuda_library_is_there_where_the_build_says_so(package: Files, tmp_path: Path) -> None:
    build, library = "syncbn/_build.py", "syncbn/lib/libsyncbn_torch_cuda.so"
    version = rb"(?m)^(cuda_version: .* = ).+$"
    lacking = without(library)(package)
    lacking[build] = re.sub(version, rb'\1"13.0"', package[build])
    assert check_wheel.check(pack(lacking, tmp_path)) == [f"{library}: is missing"]
    stale = lacking | {library: package["syncbn/lib/libsyncbn_torch_cpu.so"]}
    assert check_wheel.check(pack(stale, tmp_path)) == []
    stale[build] = re.sub(version, rb"\1None", package[build])
    assert check_wheel.check(pack(stale, tmp_path)) == [f"{library}: not an expected file"]


@pytest.mark.parametrize("platform", ("linux_{}", "manylinux_2_17_{}", "manylinux_2_41_ppc64le"))
def test_a_tag_that_promises_too_much_is_refused(
    package: Files, tmp_path: Path, platform: str
) -> None:
    right = platform_of(package)
    platform = platform.format(re.sub(r"manylinux_\d+_\d+_", "", right))
    name = f"{info_of(package)}/WHEEL"
    files = package | {name: package[name].replace(right.encode(), platform.encode())}
    told = f"tag: got {platform}, expected {right} or newer"
    assert check_wheel.check(pack(files, tmp_path)) == [told]


def test_policies_are_chosen_by_the_newest_symbol() -> None:
    lowest = check_wheel.lowest_policy
    old = {"GLIBC_2.2.5", "GLIBCXX_3.4.11", "CXXABI_1.3", "GCC_3.0"}
    assert lowest(old) == lowest(set()) == (2, 28)
    assert lowest(old | {"GLIBC_2.29"}) == lowest(old | {"GLIBC_2.31"}) == (2, 31)
    assert lowest(old | {"GLIBC_2.34", "GLIBCXX_3.4.29"}) == (2, 34)
    assert lowest(old | {"GLIBC_2.34", "GLIBCXX_3.4.30"}) == (2, 35)
    assert lowest(old | {"GLIBC_ABI_DT_RELR"}) == (2, 36)
    assert lowest(old | {"GCC_14.0.0"}) == (2, 39)
    for unknown in ("GLIBC_2.99", "GLIBC_PRIVATE", "GLIBCXX_3.4.99", "CXXABI_TM_1", "OMP_1.0"):
        assert lowest(old | {unknown}) is None, unknown


def test_what_a_library_may_not_need_is_refused(package: Files, tmp_path: Path) -> None:
    """The runtime of CUDA, and a path in which libraries are searched."""

    def build(name: str, source: str, *options: str) -> bytes:
        compiler = shlex.split(os.environ.get("CXX", "c++"))
        command = [
            *compiler,
            "-x",
            "c",
            "-",
            "-shared",
            "-fPIC",
            "-nostdlib",
            "-o",
            tmp_path / name,
        ]
        subprocess.run([*command, *options], check=True, input=source, text=True)
        return (tmp_path / name).read_bytes()

    build("libcudart.so.13", "int later(void) { return 1; }")
    needs = (f"-L{tmp_path}", "-l:libcudart.so.13", "-Wl,-rpath,/opt/cuda/lib64")
    library = build("libsyncbn.so", "int later(void); int now(void) { return later(); }", *needs)
    name = "syncbn/lib/libsyncbn.so"
    mark = check_wheel.CUDART if check_wheel.CUDART in package[name] else b""
    assert sorted(check_wheel.check(pack(package | {name: library + mark}, tmp_path))) == [
        "libsyncbn.so: needs libcudart.so.13",
        "libsyncbn.so: search path: got ['/opt/cuda/lib64'], expected []",
    ]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True)


def test_retag_writes_the_tag_that_the_libraries_fit(package: Files, tmp_path: Path) -> None:
    right = platform_of(package)
    name = f"{info_of(package)}/WHEEL"
    plain = "linux_" + re.sub(r"manylinux_\d+_\d+_", "", right)
    files = package | {name: package[name].replace(right.encode(), plain.encode())}
    wheel = pack(files, tmp_path)
    refused = run(str(wheel))
    assert refused.returncode == 1
    assert refused.stderr == f"{wheel.name}: tag: got {plain}, expected {right} or newer\n"
    written = run("--retag", str(wheel))
    assert written.returncode == 0, written.stderr
    (left,) = tmp_path.glob("*.whl")
    assert left.name == wheel.name.replace(plain, right)
    assert check_wheel.check(left) == []


LOCAL = b"""
import torch
SyncBatchNorm.forward = lambda self, x: torch.nn.functional.batch_norm(
    x, self.running_mean, self.running_var, self.weight, self.bias, True)
"""


@pytest.mark.weekly
@pytest.mark.parametrize(
    ("name", "append", "told"),
    (
        ("syncbn/nn.py", None, "No module named 'syncbn.nn'"),
        ("syncbn/__init__.py", LOCAL, "assert torch.equal(y, whole[0][mine])"),
    ),
    ids=("incomplete", "not synchronized"),
)
def test_smoke_fails_with_a_wheel_that_does_not_work(
    package: Files, tmp_path: Path, name: str, append: bytes | None, told: str
) -> None:
    """Although the interpreter that runs it has a syncbn that works."""
    files = {key: content for key, content in package.items() if key != name or append is not None}
    if append is not None:
        files[name] += append
    smoke = [sys.executable, PROJECT / "scripts" / "smoke_wheel.py", pack(files, tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(PROJECT / "python")}
    done = subprocess.run(smoke, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 1 and told in done.stderr, done.stdout + done.stderr
