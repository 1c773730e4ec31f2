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
#: Pages whose snippets want several ranks.
PAGES_ON_TWO_RANKS = ["docs/uneven_inputs.md"]


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


def snippets(page):
    text = (PROJECT / page).read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize("page", PAGES_ON_TWO_RANKS)
def test_page_on_two_ranks(page, tmp_path):
    script = tmp_path / "page.py"
    script.write_text("\n".join(snippets(page)), encoding="utf-8")
    assert run("-m", "torch.distributed.run", "--nproc-per-node=2", str(script))


@pytest.mark.parametrize("page", sorted(set(PAGES) - set(PAGES_ON_TWO_RANKS)))
def test_page(page):
    names: dict = {}
    for snippet in snippets(page):
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


EXPECTED = {
    "docs/devices.md": _devices,
    "docs/static_graph.md": _static_graph,
    "docs/activation.md": _activation,
}
