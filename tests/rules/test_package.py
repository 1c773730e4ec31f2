"""Rules about the installed Python package, as a user gets it."""

import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

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
    expected += ["libsyncbn_torch_cuda.so"] if _build.cuda else []
    assert sorted(path.name for path in libraries()) == expected
    assert {path.parent.name for path in libraries()} == {"lib"}


def test_holds_no_build_files() -> None:
    names = [str(file) for file in metadata.files("syncbn") or []]
    assert not [name for name in names if name.endswith((".in", ".cmake", ".hpp", ".cpp"))]


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
