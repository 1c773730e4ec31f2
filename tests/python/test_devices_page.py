"""The example and the snippet of docs/devices.md run."""

import re
import runpy
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("devices", ("1", "3"))
def test_example(devices, capsys):
    example = runpy.run_path(str(PROJECT / "examples" / "03_devices.py"))
    assert example["main"]([devices]) == 0
    assert f"{devices} x cpu" in capsys.readouterr().out


def test_snippet():
    text = (PROJECT / "docs" / "devices.md").read_text(encoding="utf-8")
    (snippet,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict = {}
    exec(snippet, names)
    assert [len(y) for y in names["outputs"]] == [3, 3, 2, 2]
    assert all(p.grad is not None for p in names["network"].parameters())
