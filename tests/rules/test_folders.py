# SPDX-License-Identifier: Apache-2.0
"""The folders of tests/python are those of the package, and a few for what is about the whole."""

from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
TESTS = PROJECT / "tests" / "python"
#: What is about the whole, and what several folders need.
OTHERS = {"bindings", "bits", "cuda", "interop", "project", "support"}


def test_python_tests_lie_in_the_folders_of_the_package(pytestconfig):
    package = {path.parent.name for path in (PROJECT / "python" / "syncbn").glob("*/__init__.py")}
    folders = {path.parent for path in TESTS.glob("*/*.py")}
    assert {folder.name for folder in folders} == package | OTHERS
    assert not list(TESTS.glob("*.py"))
    # Their modules import each other by bare name.
    assert set(pytestconfig.getini("pythonpath")) == folders
    modules = [path.stem for path in TESTS.glob("*/*.py")]
    assert len(modules) == len(set(modules))
