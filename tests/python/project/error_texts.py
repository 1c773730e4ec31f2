# SPDX-License-Identifier: Apache-2.0
"""The texts of all errors, collected from the sources of the package, its operators and the core.

What is known at run time only is "…": `raise ValueError(f"x: got {x}")` has the text "x: got …".
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from support import PROJECT

GAP = "…"
#: Functions of the package that make an error of a text, and the place of the text.
_PYTHON_MAKERS = {
    **{"fail": 1, "_refusal": 1, "_Over": 1, "refuse": 0, "shm_leave": 1, "warning": 0},
    "Malformed": 0,
}
#: In these files the text of an error is in a variable, or what a function returns.
_PYTHON_WORDS = {
    "failing.py": ("broken", "why", "late"),
    "call.py": ("reason_of",),
    "operators.py": ("why_not_cuda",),
    "agreement.py": ("reason",),
    "callers.py": ("alone_text",),
    "meeting_point.py": ("_difference",),
    "devices.py": ("text",),
    "turns.py": ("_past",),
}
_CPP_TEXT = re.compile(r"\bthrow\s+\w+(?=\()|(?<!void )\b(?:refuse|require|abandon|break_at)(?=\()")
#: The same, in the core.
_CPP_WORDS = {
    "mpi_exchange.cpp": r"\b(?:text|reason) =",
    "mpi.cpp": r"\bk(?:NotRunning|WrongThread) =",
    "nccl.cpp": r"\btext =",
    "no_memory.hpp": r"\btext_\(",
    "rank_texts.hpp": r"\breturn\b",
    "torch_autograd.hpp": r"\btext =",
    "torch_process_group.hpp": r"\b(?:why|text) \+?=",
    "groups.cpp": r"\breason =",
}
_CPP_SKIPPED = re.compile(r"//[^\n]*|^[ \t]*#[ \t]*include[^\n]*", re.M)
_LITERAL = r'"((?:\\.|[^"\\\n])*)"'
_SUFFIXES = {".cpp", ".hpp", ".cu", ".cuh"}


def tidy(text: str) -> str:
    """One space for all white space, one gap for several, none at the ends."""
    text = re.sub(rf"(?:\s*{GAP})+", lambda m: f" {GAP}" if m[0][0].isspace() else GAP, text)
    return " ".join(text.split()).strip(f"{GAP} :;,")


def says_something(text: str) -> bool:
    """Not only what is known at run time, and what stands between."""
    return len(re.findall(r"[A-Za-z]{2,}", text)) > 1


def _python_text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_python_text, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _python_text(node.left) + _python_text(node.right)
    if isinstance(node, ast.Subscript):  # cut to a length
        return _python_text(node.value)
    return GAP


def _alternatives(node: ast.expr | None) -> list[str]:
    if isinstance(node, ast.IfExp):
        return [*_alternatives(node.body), *_alternatives(node.orelse)]
    return [_python_text(node).replace("%s", GAP)]


def _name(node: ast.AST) -> str:
    """Of a function that is called, or of a variable, an attribute or what has an index."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return getattr(node, "id", None) or getattr(node, "attr", "")


def _python_texts(path: Path) -> Iterator[tuple[int, str]]:
    words = _PYTHON_WORDS.get(path.name, ())
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        found: list[ast.expr | None] = []
        if isinstance(node, ast.Call):
            name = _name(node.func)
            if name.endswith("Error") or name in ("ExchangeTimeout", "PeerLost"):
                found = node.args[:1]
            elif name in _PYTHON_MAKERS:
                found = node.args[_PYTHON_MAKERS[name] :][:1]
        elif isinstance(node, ast.Assign) and _name(node.targets[0]) in words:
            found = [node.value]
        elif isinstance(node, ast.FunctionDef) and node.name in words:
            found = [n.value for n in ast.walk(node) if isinstance(n, ast.Return)]
        for value in found:
            for text in _alternatives(value):
                yield node.lineno, text


def _arguments(code: str, begin: int) -> list[str]:
    """Of the call whose parenthesis opens at `begin`; or up to the semicolon."""
    depth, start, found = 0, begin + (code[begin] == "("), []
    position = begin
    while position < len(code):
        if match := re.compile(_LITERAL).match(code, position):
            position = match.end()
            continue
        character = code[position]
        depth += (character in "([{") - (character in ")]}")
        if character == ";" or (depth == 0 and character == ")"):
            break
        if depth == 1 and character == ",":
            found.append(code[start:position])
            start = position + 1
        position += 1
    return [*found, code[start:position]]


def _cpp_text(expression: str) -> str:
    """The literals, with gaps where something that is no literal lies between them."""
    expression = re.sub(rf'(?<=")\s+(?=")|\bstd::string\(({_LITERAL})\)', r"\1", expression)
    expression = expression.replace('""', "")  # adjacent literals are one
    parts, end = [], 0
    for match in re.finditer(_LITERAL, expression):
        if expression[end : match.start()].strip(" \n+"):
            parts.append(GAP)
        parts.append(match[1].replace('\\"', '"'))
        end = match.end()
    return "".join([*parts, GAP if expression[end:].strip(" \n+") else ""])


def _cpp_texts(path: Path) -> Iterator[tuple[int, str]]:
    code = path.read_text(encoding="utf-8")
    code = _CPP_SKIPPED.sub(lambda m: " " * len(m[0]), code)
    for match in _CPP_TEXT.finditer(code):
        texts = [_cpp_text(argument) for argument in _arguments(code, match.end())]
        line = code.count("\n", 0, match.start()) + 1
        if match[0] == "refuse" and len(texts) == 3:  # not a communicator's
            yield line, f"{texts[0]}: got {texts[1]}, expected {texts[2]}"
        elif match[0] == "require":
            yield line, f"CUDA: {texts[0]} failed: "
        else:
            yield line, GAP.join(texts)
    if path.name in _CPP_WORDS:
        for match in re.finditer(_CPP_WORDS[path.name], code):
            line = code.count("\n", 0, match.start()) + 1
            yield line, _cpp_text(code[match.end() : code.index(";", match.end())])


def error_texts() -> dict[str, list[str]]:
    """Where each text is raised, "file:line"."""
    found: dict[str, list[str]] = {}
    for path in sorted((PROJECT / "python" / "syncbn").rglob("*.py")):
        for line, text in _python_texts(path):
            found.setdefault(tidy(text), []).append(f"{path.relative_to(PROJECT)}:{line}")
    for folder in ("include", "src", "bindings"):
        for path in sorted((PROJECT / folder).rglob("*")):
            if path.suffix in _SUFFIXES:
                for line, text in _cpp_texts(path):
                    found.setdefault(tidy(text), []).append(f"{path.relative_to(PROJECT)}:{line}")
    return found
