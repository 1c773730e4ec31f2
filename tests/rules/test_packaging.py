# SPDX-License-Identifier: Apache-2.0
"""Recipes in packaging/ are of this version, and name options and versions that there are."""

import json
import re
from pathlib import Path

import yaml

PROJECT = Path(__file__).resolve().parents[2]
PACKAGING = PROJECT / "packaging"
DEBIAN = PACKAGING / "debian"


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


HEADER = read(PROJECT / "include" / "syncbn" / "version.hpp")
VERSION = ".".join(re.findall(r"VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", HEADER))
CONDA = yaml.safe_load(read(PACKAGING / "conda" / "recipe.yaml"))
VCPKG = json.loads(read(PACKAGING / "vcpkg" / "syncbn" / "vcpkg.json"))
SPACK = read(PACKAGING / "spack/spack_repo/syncbn/packages/syncbn/package.py")


def test_recipes_are_of_this_version() -> None:
    assert CONDA["context"]["version"] == VCPKG["version"] == VERSION
    assert re.findall(r'version\("(.*?)", tag="v(.*?)"', SPACK) == [(VERSION, VERSION)]
    assert read(DEBIAN / "changelog").startswith(f"syncbn ({VERSION}-")
    library = (
        f"libsyncbn{VERSION.rpartition('.')[0]}"  # the library's own name has the minor version
    )
    assert re.findall(r"^Package: (.*)", read(DEBIAN / "control"), re.M) == [
        library,
        "libsyncbn-dev",
    ]
    assert (DEBIAN / f"{library}.install").exists()


def test_recipes_name_options_that_there_are() -> None:
    options = read(PROJECT / "CMakeLists.txt")
    used = {
        name
        for path in PACKAGING.rglob("*")
        if path.is_file()
        for name in re.findall(r"\bSYNCBN_[A-Z]+\b", read(path).replace("-DSYNCBN", " SYNCBN"))
    }
    assert used == {"SYNCBN_CUDA", "SYNCBN_MPI", "SYNCBN_NCCL"}
    assert all(re.search(rf"^(?:option|set)\({name} ", options, re.M) for name in used)


def test_recipes_want_what_the_project_wants() -> None:
    (python,) = (out for out in CONDA["outputs"] if out["package"]["name"] == "syncbn")
    project = read(PROJECT / "pyproject.toml")
    wanted = re.findall(r'requires-python = "(.*)"|"torch(>=.*?)"', project)
    assert [r.split(" ")[1] for r in python["requirements"]["run"]] == list(map("".join, wanted))
    (cmake,) = re.findall(
        r"^cmake_minimum_required\(VERSION (.*)\)", read(PROJECT / "CMakeLists.txt"), re.M
    )
    assert f"cmake >={cmake}" in python["requirements"]["build"]
    assert f"cmake (>= {cmake})" in read(DEBIAN / "control")
    assert f'"cmake@{cmake}:"' in SPACK


def test_recipes_have_the_licences() -> None:
    assert CONDA["about"]["license"] == VCPKG["license"] == "Apache-2.0"
    assert all((PROJECT / name).exists() for name in CONDA["about"]["license_file"])
    assert 'license("Apache-2.0")' in SPACK
