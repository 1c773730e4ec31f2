# SPDX-License-Identifier: Apache-2.0
"""The folders of tests/python are those of the package, some of its modules, and a few for what is
about the whole."""

from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
TESTS = PROJECT / "tests" / "python"
#: What is about the whole, and what several folders need.
OTHERS = {"bindings", "bits", "cuda", "interop", "jax", "project", "support"}


def test_python_tests_lie_in_the_folders_of_the_package(pytestconfig):
    source = PROJECT / "python" / "syncbn"
    package = {path.parent.name for path in source.glob("*/__init__.py")}
    modules_of_package = {path.stem for path in source.glob("*.py")}
    folders = {path.parent for path in TESTS.glob("*/*.py")}
    names = {folder.name for folder in folders}
    assert package | OTHERS <= names <= package | modules_of_package | OTHERS
    assert not list(TESTS.glob("*.py"))
    # Their modules import each other by bare name.
    assert set(pytestconfig.getini("pythonpath")) == folders
    modules = [path.stem for path in TESTS.glob("*/*.py")]
    assert len(modules) == len(set(modules))
