# SPDX-License-Identifier: Apache-2.0
""".github/workflows: they parse, call what is there, and may do no more than they need."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from commands import problem_of

PROJECT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((PROJECT / ".github" / "workflows").iterdir())
each_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)


def read(path: Path) -> dict[Any, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in read(path)["jobs"].values() for step in job["steps"]]


def test_there_are_workflows_for_changes_wheels_and_long_runs() -> None:
    assert [path.name for path in WORKFLOWS] == ["ci.yml", "weekly.yml", "wheel.yml"]
    assert ".ci/run" in [step.get("run") for step in steps(WORKFLOWS[0])]


@each_workflow
def test_commands_exist(path: Path) -> None:
    lines = [line for step in steps(path) for line in step.get("run", "").splitlines()]
    assert lines
    assert [problem for line in lines if (problem := problem_of(line))] == []


@each_workflow
def test_actions_are_pinned(path: Path) -> None:
    lines = re.findall(r"uses: *(.*)", path.read_text(encoding="utf-8"))
    assert len(lines) == sum("uses" in step for step in steps(path)) > 0
    wrong = [x for x in lines if not re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}  # v[\d.]+", x)]
    assert wrong == []


def test_an_action_has_one_version() -> None:
    lines = {line for path in WORKFLOWS for line in re.findall(r"uses: *(.*)", path.read_text())}
    names = [line.partition("@")[0] for line in lines]
    assert len(names) == len(set(names)), sorted(lines)


@each_workflow
def test_rights_and_limits(path: Path) -> None:
    workflow = read(path)
    assert workflow["permissions"] == {"contents": "read"}
    assert "group" in workflow["concurrency"]
    for name, job in workflow["jobs"].items():
        assert 0 < job["timeout-minutes"] <= 120, name
        assert ("permissions" in job) == (name == "publish"), name
    for step in steps(path):
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


def test_the_weekly_run_covers_each_pytorch_from_the_floor() -> None:
    """One version of each minor. The floor's wheel is tried with all of them, on each Python."""
    workflow = read(PROJECT / ".github" / "workflows" / "weekly.yml")
    job = workflow["jobs"]["pytorch"]
    versions = job["strategy"]["matrix"]["torch"]
    minors = [int(re.fullmatch(r"2\.(\d+)\.\d+", version)[1]) for version in versions]
    assert minors == list(range(minors[0], minors[-1] + 1))
    project = (PROJECT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"torch>=2.{minors[0]}"' in project
    assert f"torch=={versions[0]}\n" in (PROJECT / "requirements/build.txt").read_text()
    assert f"PyTorch 2.{minors[0]} to 2.{minors[-1]}" in (PROJECT / "README.md").read_text()
    assert job["env"]["TORCH"] == "${{ matrix.torch }}"
    assert "make test-python" in [step.get("run") for step in job["steps"]]
    assert "make wheel" in [step.get("run") for step in workflow["jobs"]["wheel"]["steps"]]
    tried = workflow["jobs"]["versions"]
    assert tried["needs"] == "wheel"
    matrix = tried["strategy"]["matrix"]
    assert matrix["torch"] == versions
    pythons = re.findall(r"Python :: (3\.\d+)", project)
    assert matrix["python"] == pythons and f'requires-python = ">={pythons[0]}"' in project
    smoke = "python scripts/smoke_wheel.py --torch ${{ matrix.torch }} dist/*.whl"
    assert tried["steps"][-1]["run"] == smoke


def test_only_a_tag_publishes_what_was_installed_and_tried() -> None:
    workflow = read(PROJECT / ".github" / "workflows" / "wheel.yml")
    publish = workflow["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"}  # trusted publishing, no password
    assert publish["environment"] == "pypi"
    assert publish["if"] == "startsWith(github.ref, 'refs/tags/v')"
    assert publish["needs"] == "install" and workflow["jobs"]["install"]["needs"] == "build"
    assert not [step for step in publish["steps"] if "password" in step.get("with", {})]
    assert "secrets." not in str(workflow)
