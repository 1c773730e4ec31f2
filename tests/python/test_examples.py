"""Every example and every Python snippet of the docs runs. A snippet's page may expect more."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted(path.name for path in (PROJECT / "examples").glob("*.py"))
PAGES = sorted(
    str(path.relative_to(PROJECT))
    for path in (PROJECT / "docs").glob("*.md")
    if "```python" in path.read_text(encoding="utf-8")
)


def run(*arguments):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, cwd=PROJECT
    )
    assert ended.returncode == 0, f"exit code {ended.returncode}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name):
    assert run(f"examples/{name}"), "it says nothing"


@pytest.mark.parametrize("name", ["06_static_graph.py", "07_activation.py"])
def test_example_on_two_ranks(name):
    assert run("-m", "torch.distributed.run", "--nproc-per-node=2", f"examples/{name}")


@pytest.mark.parametrize("page", PAGES)
def test_page(page):
    text = (PROJECT / page).read_text(encoding="utf-8")
    names: dict = {}
    for snippet in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(snippet, page, "exec"), names)
    EXPECTED.get(page, lambda names: None)(names)


def _devices(names):
    assert [len(y) for y in names["outputs"]] == [3, 3, 2, 2]
    assert all(p.grad is not None for p in names["network"].parameters())


def _static_graph(names):
    targets = [str(node.target) for node in names["program"].graph.nodes]
    assert any("conv" in name for name in targets)
    assert not any("batch_norm" in name for name in targets)


def _activation(names):
    assert names["y"].data_ptr() == names["x"].data_ptr()
    assert not names["local"].sync


def _masks(names):
    assert not names["y"].movedim(1, -1)[~names["mask"]].any()
    assert not names["x"].grad.movedim(1, -1)[~names["mask"]].any()


EXPECTED = {
    "docs/masks.md": _masks,
    "docs/devices.md": _devices,
    "docs/static_graph.md": _static_graph,
    "docs/activation.md": _activation,
}
