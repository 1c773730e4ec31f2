# SPDX-License-Identifier: Apache-2.0
"""Imports of the Python package go down: no module imports one above it, and none itself again. A
reader of one module follows few others."""

import ast
import functools
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "python" / "syncbn"
#: From the bottom up; a folder stands for its modules, which may import each other.
LAYERS = (
    ("_build", "errors", "fingerprints", "recognition"),
    ("operators",),
    ("exchange",),
    ("step", "baton"),
    ("devices", "namespaces"),
    ("functional", "ops"),
    ("nn",),
    ("meeting_point",),
    ("models.classes", "models.frozen"),
    ("graph", "parallel"),
    ("models", "shares"),
    ("prove",),
    ("__main__", "__init__"),
)


def modules() -> dict[str, Path]:
    found = {"_build": PACKAGE / "_build.py.in"}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        package = parts[:-1] if parts[-1] == "__init__" else parts
        found[".".join(package) or "__init__"] = path
    return found


def imported(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """The modules of this package that it imports, anywhere in its text."""
    parts = [] if name == "__init__" else name.split(".")
    package = parts if path.name == "__init__.py" else parts[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            base += node.module.split(".") if node.module else []
            for alias in node.names:
                whole = ".".join((*base, alias.name))
                found.add(whole if whole in known else ".".join(base))
    return found - {name}


def layer_of(name: str) -> int:
    """The number of the longest entry that the name begins with."""
    fits = [
        (len(entry), number)
        for number, entries in enumerate(LAYERS)
        for entry in entries
        if name == entry or name.startswith(f"{entry}.")
    ]
    assert fits, f"{name}: say in LAYERS where it belongs"
    return max(fits)[1]


def graph() -> dict[str, set[str]]:
    known = modules()
    return {
        name: imported(name, path, known) if path.suffix == ".py" else set()
        for name, path in known.items()
    }


def cycle(edges: dict[str, set[str]]) -> list[str]:
    """One, if there is any."""
    done: set[str] = set()

    def search(name: str, way: list[str]) -> list[str]:
        if name in way:
            return [*way[way.index(name) :], name]
        if name in done:
            return []
        for other in sorted(edges[name]):
            if found := search(other, [*way, name]):
                return found
        done.add(name)
        return []

    return next((found for name in sorted(edges) if (found := search(name, []))), [])


def test_no_import_goes_up():
    wrong = [
        f"{name} imports {other}, which is above it: LAYERS of {Path(__file__).name} says so"
        for name, others in graph().items()
        for other in others
        if layer_of(other) > layer_of(name)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_import_goes_in_a_circle():
    assert cycle(graph()) == []


def test_no_chain_of_imports_is_long():
    edges = graph()
    edges["operators"].discard("_build")  # two constants of the build

    @functools.cache
    def chain(name: str) -> list[str]:
        return [name, *max(map(chain, edges[name]), key=len, default=[])]

    assert len(longest := max(map(chain, edges), key=len)) <= 12, " -> ".join(longest)
