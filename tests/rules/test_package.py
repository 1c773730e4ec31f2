# SPDX-License-Identifier: Apache-2.0
"""Rules about the installed package beyond what check_wheel.py tells of it (test_wheel.py)."""

import subprocess
from importlib import metadata
from pathlib import Path

from binary_rules import wanted_of_torch

PROJECT = Path(__file__).resolve().parents[2]


def libraries() -> list[Path]:
    files = metadata.files("syncbn") or []
    return [Path(str(file.locate())) for file in files if file.suffix == ".so"]


def test_is_the_installed_package() -> None:
    import syncbn

    assert PROJECT / "python" not in Path(syncbn.__file__).parents


def test_wants_only_the_stable_interface_of_pytorch() -> None:
    """So that one build serves PyTorch 2.11 and what comes after it."""
    for library in libraries():
        cpp, c = wanted_of_torch(library)
        assert cpp == [], library.name
        assert bool(c) == ("torch" in library.name), (library.name, c)


def test_operators_need_the_core_beside_them() -> None:
    operators = [path for path in libraries() if "torch" in path.name]
    assert operators
    for library in operators:
        dynamic = subprocess.check_output(["readelf", "--dynamic", library], text=True)
        assert "[libsyncbn.so]" in dynamic, library.name


def test_libraries_hold_no_build_paths() -> None:
    for library in libraries():
        assert str(PROJECT).encode() not in library.read_bytes(), library.name
