# SPDX-License-Identifier: Apache-2.0
"""Every source names its licence in its first line, or after the `#!` that starts it."""

from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
MADE = {"build", "dist", "demo-output", "__pycache__"}
MARKS = {
    **dict.fromkeys((".c", ".h", ".cpp", ".hpp", ".cu", ".cuh"), "//"),
    **dict.fromkeys((".cmake", ".py", ".sh"), "#"),
}


def mark_of(path: Path) -> str | None:
    """What begins a comment in a source; None for another file."""
    if path.name in ("CMakeLists.txt", "run"):
        return "#"
    return MARKS.get(Path(path.name.removesuffix(".in")).suffix)


def sources() -> list[Path]:
    found = [PROJECT / "CMakeLists.txt", PROJECT / ".ci" / "run"]
    for folder in PROJECT.iterdir():
        if folder.is_dir() and not folder.name.startswith(".") and folder.name not in MADE:
            found += folder.rglob("*")
    return found


def test_sources_name_their_licence() -> None:
    seen = set()
    for path in sources():
        mark = mark_of(path)
        if mark is None or MADE & set(path.relative_to(PROJECT).parts):
            continue
        lines = path.read_text(encoding="utf-8").splitlines()
        line = lines[1] if lines[0].startswith("#!") else lines[0]
        assert line == f"{mark} SPDX-License-Identifier: Apache-2.0", path.relative_to(PROJECT)
        seen.add(path.suffix)
    assert seen >= MARKS.keys() | {".in", ".txt", ""}
