# SPDX-License-Identifier: Apache-2.0
"""The package syncbn_jax: its cases in processes of their own, with each version of JAX."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from support import PROJECT, blocks, snippets

HERE = Path(__file__).parent
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent / "support")])
}
CASES = ("jax_cases.py", "jax_layer_cases.py", "jax_torch_cases.py")


def run_cases(python: str, files: tuple[str, ...], *options: str) -> None:
    command = [python, "-m", "pytest", *options, *(str(HERE / name) for name in files)]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def two_processes(python: str, *epsilons: str) -> list[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    program = str(HERE / "jax_process.py")
    jobs = [
        subprocess.Popen(
            [python, program, str(number), port, epsilon],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )
        for number, epsilon in enumerate(epsilons)
    ]
    told = [job.communicate(timeout=300) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], told
    return [out.splitlines()[-1] for out, _ in told]


def check_processes(python: str) -> None:
    """The bits of one device, or an error on both."""
    program = (
        "from jax_support import *; given = [a.astype(np.float32) for a in samples()];"
        "found = step(*given, fresh());"
        "print('hash', digest(*(found[key] for key in ('y', 'dx', 'mean', 'var'))))"
    )
    command = [python, "-c", program]
    alone = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=True)
    assert two_processes(python, "1e-5", "1e-5") == [alone.stdout.strip()] * 2
    assert two_processes(python, "1e-5", "1e-3") == ["DivergenceError True"] * 2


@pytest.mark.parametrize("files", (CASES[:2], CASES[2:]), ids=("without PyTorch", "with it"))
def test_cases(files):
    run_cases(sys.executable, files)


def test_two_processes_exact():
    check_processes(sys.executable)


def test_imports_nothing_of_the_other_framework():
    for package, others in (("syncbn_jax", {"torch", "flax", "syncbn"}), ("syncbn", {"jax"})):
        program = f"import sys, {package}; print({others} & sys.modules.keys())"
        command = [sys.executable, "-c", program]
        found = subprocess.run(command, capture_output=True, text=True, check=True)
        assert found.stdout == "set()\n", package


def test_the_program_of_the_page_prints_what_it_says():
    program = "\n".join(snippets("docs/jax.md"))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    (printed,) = [b.text for b in blocks(PROJECT / "docs" / "jax.md") if b.kind == ""]
    assert done.stdout == printed, done.stderr[-2000:]


@pytest.mark.weekly
def test_all_cases_of_the_newest():
    run_cases(sys.executable, CASES, "-m", "weekly")


@pytest.mark.weekly
def test_oldest_jax_without_pytorch(tmp_path):
    """In an environment of its own, with the package as its page says that it is installed."""
    venv, python = tmp_path / "venv", str(tmp_path / "venv" / "bin" / "python")
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    oldest = (PROJECT / "requirements" / "jax-oldest.txt", PROJECT / "requirements" / "test.txt")
    install = [python, "-m", "pip", "install", "--quiet", "--no-cache-dir"]
    subprocess.run([*install, *(w for path in oldest for w in ("-r", str(path)))], check=True)
    subprocess.run([*install, str(PROJECT / "bindings" / "jax")], check=True)
    assert not list(venv.glob("lib/*/site-packages/torch"))
    run_cases(python, CASES[:2], "-m", "weekly or not weekly")
    check_processes(python)
