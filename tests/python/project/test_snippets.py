# SPDX-License-Identifier: Apache-2.0
"""Every fenced block of the docs is run, compiled, quoted from a file that is, or a known command.

PyTorch's docs run their doctests only; no page quotes a program.
"""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import test_docs
import test_examples
from commands import problem_of
from snippets import Block, blocks
from support import PROJECT

PAGES = test_docs.PAGES
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name + page.name)
EXAMPLES = sorted((PROJECT / "examples").glob("[0-9][0-9]_*"))
PROGRAMS = [path for path in EXAMPLES if path.suffix in (".c", ".cpp")]


def is_covered(page: Path, block: Block) -> bool:
    """By a test that runs or compiles it, or below; a block without a kind is what is printed."""
    name = str(page.relative_to(PROJECT))
    return {
        "": True,
        "sh": True,
        "python": name in test_examples.PAGES or name in test_examples.ELSEWHERE,
        "python ultralytics": name == "docs/engines.md",  # training_loops.py
        "python lightning": name == "docs/engines.md",  # training_loops.py
        "python shares": name == "docs/engines.md",  # test_trainers.py
        "cpp": block.source is not None or name in test_docs.CPP_PAGES,
        "c++": name == "docs/libtorch.md",  # test_libtorch.py
        "c": block.source is not None,
        "cmake": block.source is not None or name == "docs/cpp.md",
    }.get(block.kind, False)


@each_page
def test_every_block_is_covered(page):
    assert [block for block in blocks(page) if not is_covered(page, block)] == []


@pytest.mark.parametrize(("page", "file"), test_examples.ELSEWHERE.items())
def test_pages_that_run_elsewhere_do(page, file):
    runs = rf'snippets\("{page}"\)|parametrize\(\s*"page\b[^=]*?"{page}"'
    (path,) = (PROJECT / "tests" / "python").glob(f"*/{file}")
    assert re.search(runs, path.read_text(encoding="utf-8"))


@each_page
def test_commands_exist(page):
    lines = [line for b in blocks(page) if b.kind == "sh" for line in b.text.splitlines() if line]
    assert [problem for line in lines if (problem := problem_of(line))] == []


@each_page
def test_quotes_are_what_the_files_say(page):
    for block in blocks(page):
        if block.source is not None:
            text = (PROJECT / block.source).read_text(encoding="utf-8")
            indented = (textwrap.indent(block.text, " " * n) for n in (0, 2, 4, 6, 8))
            assert any(f"\n{quote}" in text for quote in indented), block.text
            kinds = {".c": "c", ".cpp": "cpp", ".py": "python", ".txt": "cmake"}
            assert block.kind == kinds[Path(block.source).suffix]


def test_every_example_is_listed_and_every_compiled_one_has_a_link_in_the_docs():
    page = PROJECT / "examples" / "README.md"
    docs = "".join(path.read_text(encoding="utf-8") for path in test_docs.DOCS)
    assert [path for path in PROGRAMS if f"](../examples/{path.name})" not in docs] == []
    listed = re.findall(r"^\| `(\d\d_.*?)` \|", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert listed == [path.name + "/" * path.is_dir() for path in EXAMPLES]


@pytest.mark.parametrize("page", ("README.md", "docs/cpp.md"))
def test_the_project_of_the_page_builds_a_program_that_prints_what_follows(tmp_path, page):
    (project,) = (b.text for b in blocks(PROJECT / "docs" / "cpp.md") if b.kind == "cmake")
    found = blocks(PROJECT / page)
    (at,) = (i for i, b in enumerate(found) if b.kind == "cpp" and "int main()" in b.text)
    (tmp_path / "CMakeLists.txt").write_text(project, encoding="utf-8")
    (tmp_path / "main.cpp").write_text(found[at].text, encoding="utf-8")
    tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    cmake = shutil.which("cmake", path=tools)
    package = [sys.executable, "-m", "syncbn", "--cmake-dir"]
    package = subprocess.run(package, capture_output=True, text=True, check=True).stdout.strip()
    subprocess.run(
        [cmake, "-S", ".", "-B", "build", f"-Dsyncbn_DIR={package}"], cwd=tmp_path, check=True
    )
    subprocess.run([cmake, "--build", "build"], cwd=tmp_path, check=True)
    program = [tmp_path / "build" / "train"]
    printed = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    assert printed == next(b.text for b in found[at:] if not b.kind)


def cuda_headers() -> Path | None:
    """Of a toolkit, or of the Python packages that PyTorch for CUDA brings."""
    folders = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"]
    for package in ("nvidia", "triton"):
        spec = importlib.util.find_spec(package)
        for place in (spec.submodule_search_locations or ()) if spec else ():
            folders += Path(place).glob("cu1*/include")
            folders += Path(place).glob("backends/nvidia/include")
    # PyTorch's own lack the second one, which triton has.
    headers = ("cuda_runtime_api.h", "crt/host_defines.h")
    return next((f for f in folders if all((f / h).exists() for h in headers)), None)


def test_the_example_of_nccl_compiles(tmp_path):
    """Where the build has no CUDA. With it, CMake builds and runs the example."""
    headers = cuda_headers()
    if headers is None:
        pytest.skip("neither a CUDA toolkit nor PyTorch's headers of one")
    command = [*shlex.split(os.environ.get("CXX", "c++")), "-std=c++20", "-Wall", "-Wextra"]
    command += ["-Werror", "-fsyntax-only", "-I", str(PROJECT / "include"), "-isystem"]
    command += [str(headers), str(PROJECT / "examples" / "13_nccl.cpp")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
