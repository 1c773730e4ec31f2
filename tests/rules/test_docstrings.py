# SPDX-License-Identifier: Apache-2.0
"""A Python change is tried without the C++ tests, which are what runs the other rules of
source_rules.py."""

import subprocess
import sys
from pathlib import Path

RULES = Path(__file__).with_name("source_rules.py")


def run(project: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, RULES, "docstrings", project]
    return subprocess.run(command, capture_output=True, text=True)


def test_docstrings_begin_with_a_verb_or_an_article():
    ended = run(RULES.parents[2])
    assert ended.returncode == 0, ended.stdout


def test_another_beginning_is_named(tmp_path):
    for folder in ("python/syncbn", "bindings/jax"):
        (tmp_path / folder).mkdir(parents=True)
    wrong = tmp_path / "python/syncbn/module.py"
    wrong.write_text('def size():\n    """how many there are."""\n', encoding="utf-8")
    assert run(tmp_path).stdout == (
        "python/syncbn/module.py:2: the docstring begins with 'how many there are.'; expected a "
        "verb (Returns) or A, An, The\n"
    )
