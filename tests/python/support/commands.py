# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a command line of a workflow or of the docs, found without running it."""

import os
import re
import shlex

from support import PROJECT

#: make's `package` runs the latter; the former differs in where pip finds the build's tools.
PIP = {
    "pip install torch numpy",
    "pip install .",
    "pip install ./bindings/jax",
    "pip install --no-build-isolation --no-deps .",
}


def make_targets() -> set[str]:
    """The targets that are commands: those that .PHONY lists."""
    makefile = (PROJECT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    (phony,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.M)
    rules = re.findall(r"^([a-z][a-z0-9 -]*):(?!=)", makefile, re.M)
    assert set(phony.split()) <= {target for rule in rules for target in rule.split()}
    return set(phony.split())


def cmake_names() -> set[str]:
    """Options and targets of the project."""
    files = [PROJECT / "CMakeLists.txt", *(PROJECT / "cmake").glob("*.cmake")]
    files += (PROJECT / folder / "CMakeLists.txt" for folder in ("src", "bindings/torch"))
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    names = re.findall(r"^ *(?:option|set)\((SYNCBN_\w+) (?:.*CACHE|\")", text, re.M)
    return {*names, *re.findall(r"^ *add_library\((\w+)", text, re.M)}


def script_problem(words: list[str]) -> str | None:
    """Of a Python program and its options, or of a module."""
    if words[0] == "-m":
        module = PROJECT / "python" / words[1] / "__main__.py"
        return None if module.is_file() else f"no such module: {words[1]}"
    script = PROJECT / words[0]
    if not script.is_file():
        return f"no such script: {words[0]}"
    sources = "".join(path.read_text(encoding="utf-8") for path in script.parent.glob("*.py"))
    options = [word for word in words[1:] if word.startswith("--") and f'"{word}"' not in sources]
    return f"no such option: {options}" if options else None


def cmake_problem(words: list[str]) -> str | None:
    known = cmake_names() | {"syncbn_DIR"}  # of a project that uses the package
    defined = re.findall(r"-D ?(\w+)=", " ".join(words))
    targets = [words[i + 1] for i, word in enumerate(words) if word == "--target"]
    unknown = [n for n in defined + targets if n not in known and not n.startswith("CMAKE_")]
    return f"unknown to CMake: {unknown}" if unknown else None


def problem_of(command: str) -> str | None:
    """Of one command; of those that the project's workflows and docs need, others are wrong."""
    words = shlex.split(command, comments=True)
    if "&&" in words:
        at = words.index("&&")
        return problem_of(shlex.join(words[:at])) or problem_of(shlex.join(words[at + 1 :]))
    name, rest = words[0], words[1:]
    if name == "make":
        targets = [word for word in rest if "=" not in word]
        unknown = set(targets) - make_targets()
        return f"no such target of make: {unknown}" if unknown or not targets else None
    if name in ("python", "python3"):
        return script_problem(rest)
    if name == "torchrun":
        return script_problem([word for word in rest if not word.startswith("-")])
    if name == "cmake":
        return cmake_problem(rest)
    if name == "mpiexec":
        return problem_of(shlex.join(rest[2:]))  # -n 2
    if " ".join(words) in PIP or words[:2] == ["sudo", "apt-get"] or name == "ls":
        return None
    if "/example_" in name:
        stem = name.partition("/example_")[2]
        found = [*(PROJECT / "examples").glob(f"{stem}.c*")]
        return None if found else f"no such example: {name}"
    runnable = "/" in name and os.access(PROJECT / name, os.X_OK)
    return None if runnable else f"no such program of the repository: {name}"
