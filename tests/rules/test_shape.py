# SPDX-License-Identifier: Apache-2.0
"""What the tree keeps to: ranks have one verb, sum, and fail together in one of two ways; an
operator has few arguments, of which one holds a layer's options; functions, and tests, are short.
"""

import ast
import re
from pathlib import Path

PROJECT = Path(__file__).parents[2]
MOST_ARGUMENTS = 12
#: The folders of src/, from the bottom up: none includes a header of one above it.
ROOMS = ("statistics", "tensors", "cpu", "step", "cuda", "comm", "layer", "c_api")

#: Lines of a function's body. Kernels keep their sums in registers, within one function.
MOST_LINES, MOST_OF_A_KERNEL = 60, 90
#: From the name of a function, which ends its line with the brace, to the brace in its column.
BODY = re.compile(
    r"^( {0,2})(?! |.*\b(?:struct|class)\b|(?:if|for|while|switch|else|do|try|\})\b)"
    r"(.*\).*)\{\n((?:(?!\1\}).*\n)*)",
    re.M,
)


def sources(*folders: str) -> dict[str, str]:
    suffixes = {".cpp", ".hpp", ".h", ".cu", ".cuh", ".py"}
    paths = [p for folder in folders for p in (PROJECT / folder).rglob("*") if p.suffix in suffixes]
    return {str(p.relative_to(PROJECT)): p.read_text(encoding="utf-8") for p in sorted(paths)}


def test_no_include_goes_up():
    sources_of = {room: sources(f"src/{room}") for room in ROOMS}
    assert sum(map(len, sources_of.values())) == len(sources("src"))
    up = [
        f"{path} includes {room}/, which is above {own}/: ROOMS of {Path(__file__).name} says so"
        for own, found in sources_of.items()
        for path, text in found.items()
        for room in re.findall(r'#include "(\w+)/', text)
        if room in ROOMS and ROOMS.index(room) > ROOMS.index(own)
    ]
    assert not up, "\n".join(up)


def test_ranks_have_one_verb():
    """Making a group may gather its ranks' offers; an exchange of a step sums."""
    gathers = re.compile(r"\b(?:all_gather|allgather|gather_words|ncclAllGather)\w*\(")
    allowed = {"python/syncbn/exchange/connections.py"}
    folders = ("include", "src", "bindings/torch", "bindings/libtorch", "python/syncbn/exchange")
    found = {
        path: match[0]
        for path, text in sources(*folders, "python/syncbn/step").items()
        if path not in allowed and (match := gathers.search(text))
    }
    assert not found


#: How the ranks of a group fail together: by the one word of a barrier in memory, by the frame
#: before a message, or as the group to which a sum is handed on says. NCCL and the caller have
#: their own ways, and one rank has none.
PROTOCOLS = {
    "barrier": {"SlotExchange", "SharedMemoryGroup"},
    "frame": {"FramedExchange", "MpiExchange", "ProcessGroupCommunicator"},
    "another group's": {"MpiCommunicator", "MpiNodes", "StagedCommunicator", "LayerExchange"},
    "not ours": {"NcclCommunicator", "Callbacks"},
    "none": {"SelfCommunicator"},
}


def test_groups_fail_in_one_of_two_ways():
    """A third one would have to agree with both."""
    derived = re.compile(r"class (?:SYNCBN_API )?(\w+) (?:final )?: public (?:\w+::)*(\w+)")
    found = [
        m for text in sources("include", "src", "bindings").values() for m in derived.findall(text)
    ]
    groups = {name for name, base in found if base in ("Communicator", "FramedExchange")}
    assert groups == set().union(*PROTOCOLS.values()), "say in PROTOCOLS in which way it fails"
    framed = {name for name, base in found if base == "FramedExchange"}
    assert framed < PROTOCOLS["frame"]


def test_arguments_are_checked_at_the_doors():
    """Once, for both devices, before anything is written. What a message says is checked where it
    is read; how many axes a kernel takes only its launcher knows."""
    doors = {f"src/step/{name}" for name in ("step.cpp", "door_checks.hpp", "message.cpp")}
    elsewhere = {"check_header", "check_count", "check_on_cpu", "check_call"}
    found = {
        path: names
        for path, text in sources("src/step", "src/cuda").items()
        if path not in doors
        and (names := set(re.findall(r"\b(?:check_\w+|refuse)(?=\()", text)) - elsewhere)
    }
    refusals = {p: t.count("throw InvalidArgument") for p, t in sources("src/cuda").items()}
    refusals = {path: n for path, n in refusals.items() if n}
    assert (found, refusals) == ({}, {"src/cuda/launch.cuh": 1})


def schemas() -> dict[str, list[str]]:
    """The arguments of each operator in C++."""
    found = {}
    for text in sources("bindings/torch").values():
        for call in re.findall(r"\bm\.def\(((?:\s*\"[^\"]*\")+)\)", text):
            schema = "".join(re.findall(r'"([^"]*)"', call))
            name, arguments = re.match(r"(\w+)\((.*?)\) -> ", schema).groups()
            found[name] = [a for a in arguments.split(", ") if a]
    return found


def test_operators_have_few_arguments():
    assert len(schemas()) > 15
    long = {name: len(given) for name, given in schemas().items() if len(given) > MOST_ARGUMENTS}
    assert not long


def test_options_of_a_layer_are_one_argument():
    """The form stands for them."""
    of_steps = {name: given for name, given in schemas().items() if "Tensor form" in given}
    assert len(of_steps) > 4
    for name, arguments in of_steps.items():
        assert not [a for a in arguments if re.match(r"(?:float|str)\b", a)], name


def bodies_in_python(text: str) -> dict[str, int]:
    functions = (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef))
    docstring = {
        n: n.body[0].lineno if ast.get_docstring(n) is None else n.body[0].end_lineno + 1
        for n in functions
    }
    return {n.name: n.end_lineno - first + 1 for n, first in docstring.items()}


def test_functions_are_short():
    """Longer ones tell several things."""
    long = []
    for path, text in sources("python", "include", "src", "bindings").items():
        kernel = path.startswith("src/cpu/vector/") or path.endswith(".cuh")
        if path.endswith(".py"):
            found = bodies_in_python(text)
        else:
            found = {m[2]: m[3].count("\n") for m in BODY.finditer(text)}
        most = MOST_OF_A_KERNEL if kernel else MOST_LINES
        long += [
            f"{path}: the body of {name.strip()} has {n} lines, expected at most {most}; split it"
            for name, n in found.items()
            if n > most
        ]
    assert not long, "\n".join(long)


def test_tests_are_not_much_longer_than_what_they_test():
    """Without the lists of symbols, which nobody writes."""

    def lines_in(*folders: str) -> int:
        paths = [path for folder in folders for path in (PROJECT / folder).rglob("*")]
        made = (".md", ".pyc", "symbols.txt", "symbols_mpi.txt", "symbols_nccl.txt")
        ours = [path for path in paths if path.is_file() and not path.name.endswith(made)]
        return sum(path.read_bytes().count(b"\n") for path in ours)

    tests, product = lines_in("tests"), lines_in("include", "src", "bindings", "python")
    assert tests <= 1.2 * product, f"{tests} lines of tests for {product}: shorten or join some"
