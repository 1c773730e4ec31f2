# SPDX-License-Identifier: Apache-2.0
"""Rules about the installed Python package, as a user gets it."""

import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from binary_rules import wanted_of_torch

PROJECT = Path(__file__).resolve().parents[2]


def libraries() -> list[Path]:
    files = metadata.files("syncbn") or []
    return [Path(str(file.locate())) for file in files if file.suffix == ".so"]


def dynamic_section(library: Path) -> str:
    if shutil.which("readelf") is None:
        pytest.skip("readelf is not installed")
    command = ["readelf", "--dynamic", "--wide", str(library)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_is_the_installed_package() -> None:
    import syncbn

    assert PROJECT / "python" not in Path(syncbn.__file__).parents


def test_wheel_serves_every_python() -> None:
    wheel = metadata.distribution("syncbn").read_text("WHEEL")
    assert wheel is not None
    assert re.findall(r"^Tag: (\S+?-\S+?)-", wheel, re.M) == ["py3-none"]


def test_holds_its_libraries_and_nothing_else_compiled() -> None:
    from syncbn import _build

    expected = ["libsyncbn.so", "libsyncbn_torch_cpu.so"]
    expected += ["libsyncbn_torch_cuda.so"] if _build.cuda_version else []
    assert sorted(path.name for path in libraries()) == expected
    assert {path.parent.name for path in libraries()} == {"lib"}


def test_wants_only_the_stable_interface_of_pytorch() -> None:
    """So that one build serves PyTorch 2.11 and what comes after it."""
    for library in libraries():
        cpp, c = wanted_of_torch(library)
        assert cpp == [], library.name
        assert bool(c) == ("torch" in library.name), (library.name, c)


# The C and C++ runtimes, PyTorch's own libraries and ours. No CUDA or NCCL: the CUDA runtime is
# linked statically and the driver is opened when it is needed, so all load without it.
NEEDED = (
    r"libsyncbn\.so|libtorch(_cpu|_cuda)?\.so|(libstdc\+\+|libm|libgcc_s|libc|ld-linux\S*)\.so\S*"
)
MEGABYTES = 40


def test_needs_no_library_that_pytorch_does_not_bring() -> None:
    for library in libraries():
        needed = re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic_section(library))
        assert [name for name in needed if not re.fullmatch(NEEDED, name)] == [], library.name
        assert library.name == "libsyncbn_torch_cuda.so" or "libtorch_cuda.so" not in needed


def test_is_small() -> None:
    """With the kernels of all architectures, too."""
    assert sum(library.stat().st_size for library in libraries()) < MEGABYTES * 1e6


def test_holds_headers_and_the_cmake_package_and_no_other_build_files() -> None:
    names = [str(file) for file in metadata.files("syncbn") or []]
    rest = [name for name in names if not re.match(r"syncbn/(include/syncbn|cmake)/[^/]+$", name)]
    assert not [name for name in rest if name.endswith((".in", ".cmake", ".h", ".hpp", ".cpp"))]
    headers = {name.rpartition("/")[2] for name in names if name.startswith("syncbn/include/")}
    folders = ("include/syncbn", "bindings/libtorch/syncbn")
    assert headers == {path.name for folder in folders for path in (PROJECT / folder).iterdir()}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads ELF files")
def test_operators_find_the_core_beside_them_and_no_python() -> None:
    for operators in (path for path in libraries() if "torch" in path.name):
        section = dynamic_section(operators)
        needed = re.findall(r"\(NEEDED\).*\[(.+)\]", section)
        assert "libsyncbn.so" in needed
        assert not [name for name in needed if "python" in name]
        assert re.findall(r"\((?:RUNPATH|RPATH)\).*\[(.+)\]", section) == ["$ORIGIN"]
    (core,) = (path for path in libraries() if "torch" not in path.name)
    assert "RPATH" not in dynamic_section(core) and "RUNPATH" not in dynamic_section(core)


def test_libraries_hold_no_build_paths() -> None:
    for library in libraries():
        assert str(PROJECT).encode() not in library.read_bytes(), library.name
