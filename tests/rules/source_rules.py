# SPDX-License-Identifier: Apache-2.0
"""Rules about the text of the sources:
python source_rules.py {wall,manners,kinds,docstrings} PROJECT_DIR."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

SUFFIXES = {".h", ".hpp", ".cpp", ".cu", ".cuh", ".inc"}

# Comments and literals; what a comment says about exit() is nobody's business.
NOT_CODE = re.compile(
    r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])*'""", re.DOTALL
)
TORCH_INCLUDE = re.compile(
    r"^\s*#\s*include\s*[<\"](torch|ATen|c10|pybind11|Python\.h|syncbn/torch\w*)\b.*$", re.M
)
MANNERS = {
    "prints": re.compile(
        r"\b(?:v?[fd]?printf|puts|fputs|putchar|fputc|fwrite|perror)\s*\(|\bstd::(?:cout|cerr|clog)\b"
    ),
    "exits or aborts": re.compile(r"\b(?:_?exit|_Exit|quick_exit|abort|terminate)\s*\("),
    "reads the environment": re.compile(r"\b(?:secure_getenv|getenv|setenv|putenv|environ)\b"),
}
# float32 is what a view has before it is given another one.
KIND = re.compile(r"\b(?:DType::k(?!Float32\b)\w+|ActivationKind::k(?!None\b)\w+)")
# What knows the kinds: the enumerations, and the traits through which everything else does.
KNOWS_KINDS = {"tensor.hpp", "options.hpp", "dtype.hpp", "activation.hpp"}


def files_in(project: Path, folders: tuple[str, ...], suffixes: set[str]) -> list[Path]:
    files = [
        path
        for folder in folders
        for path in sorted((project / folder).rglob("*"))
        if path.suffix in suffixes
    ]
    if not files:
        raise SystemExit(f"no source files under {project}")
    return files


def blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match[0])


def wall(text: str) -> Iterator[tuple[int, str]]:
    """No PyTorch header under include/ or src/."""
    for match in TORCH_INCLUDE.finditer(text):
        yield match.start(), f"includes a PyTorch header: {match[0].strip()}"


def manners(text: str) -> Iterator[tuple[int, str]]:
    """The core never prints, exits, aborts or reads the environment."""
    code = NOT_CODE.sub(blank, text)
    for what, pattern in MANNERS.items():
        for match in pattern.finditer(code):
            yield match.start(), f"{what}: {match[0].strip()}"


def kinds(text: str) -> Iterator[tuple[int, str]]:
    """Only the traits tell dtypes and activations apart, so that a new one has one place."""
    for match in KIND.finditer(NOT_CODE.sub(blank, text)):
        yield (
            match.start(),
            f"names a kind: {match[0]}; ask src/statistics/ for what it needs of it",
        )


def docstrings(text: str) -> Iterator[tuple[int, str]]:
    """A docstring begins with a verb that says what the thing does, or with the article of what it
    is."""
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        said = ast.get_docstring(node)
        if said is not None and not re.match(r"(?:A|An|The|[A-Z]\w*s)\b", said):
            offset = sum(map(len, lines[: node.body[0].lineno - 1]))
            first = said.split("\n")[0]
            yield (
                offset,
                f"the docstring begins with {first!r}; expected a verb (Returns) or A, An, The",
            )


def main() -> int:
    rule = {"wall": wall, "manners": manners, "kinds": kinds, "docstrings": docstrings}[sys.argv[1]]
    project = Path(sys.argv[2])
    where = (
        (("python/syncbn", "bindings/jax"), {".py"})
        if rule is docstrings
        else (("include", "src"), SUFFIXES)
    )
    found = 0
    for path in files_in(project, *where):
        if rule is kinds and path.name in KNOWS_KINDS:
            continue
        text = path.read_text(encoding="utf-8")
        for offset, message in rule(text):
            line = text.count("\n", 0, offset) + 1
            print(f"{path.relative_to(project)}:{line}: {message}")
            found += 1
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
