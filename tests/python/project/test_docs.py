# SPDX-License-Identifier: Apache-2.0
"""The documentation says what the sources say: texts of errors, public names, links, formats.

PyTorch's own pages have no such list of errors to compare with.
"""

import inspect
import os
import pkgutil
import re
import shlex
import subprocess
from fractions import Fraction

import pytest
import torch

import syncbn
from error_texts import error_texts, says_something, tidy
from rank import Rank
from snippets import blocks
from support import PROJECT

DOCS = sorted((PROJECT / "docs").glob("*.md"))
OTHERS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "examples/README.md")
OTHERS += ("examples/segmentation/README.md", "benchmarks/README.md", "src/cuda/README.md")
OTHERS += ("src/README.md", "tests/python/exchange/README.md")
PAGES = [*DOCS, *(PROJECT / name for name in OTHERS)]


def read(path) -> str:
    return (PROJECT / path).read_text(encoding="utf-8")


def outside_of_code(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def names_in_tables(text: str) -> list[str]:
    """The code spans of the first columns."""
    cells = re.findall(r"^\| (`.*?`(?:<br>`.*?`)*) \|", text, re.M)
    return [span for cell in cells for span in re.findall(r"`([^`]*)`", cell)]


def test_troubleshooting_has_the_errors_that_do_not_say_what_was_expected():
    """In a heading or below one, at least the beginning of the text."""
    raised = [text for text in error_texts() if says_something(text)]
    assert len(raised) > 150
    page = outside_of_code(read("docs/troubleshooting.md"))
    spans = {tidy(text) for text in re.findall(r"`([^`]+)`", page)}
    told = tuple(text for text in spans if says_something(text))
    missing = [text for text in raised if "expected" not in text and not text.startswith(told)]
    assert not missing, f"not on the page: {missing}"
    headings = {tidy(text) for text in re.findall(r"^### `(.*)`$", page, re.M)}
    stale = {text for text in headings if not any(r.startswith(text) for r in raised)}
    assert stale <= ELSEWHERE and len(headings) > 40, f"raised nowhere: {stale - ELSEWHERE}"


#: The sources put one together of several parts, and the other is the package's for JAX.
ELSEWHERE = {
    "got a forward on the object that is not seen to call the layer's",
    "syncbn_jax.DivergenceError: bn1: the devices did not make the same call",
}


def test_python_reference_has_all_public_names():
    entries = names_in_tables(read("docs/api.md"))
    wanted = set()
    for name in set(syncbn.__all__) - {"__version__"}:
        value = getattr(syncbn, name)
        if not inspect.ismodule(value):
            wanted.add(f"syncbn.{name}")
            continue
        public = getattr(value, "__all__", None) or PUBLIC[name]
        wanted |= {f"syncbn.{name}.{n}" for n in public}
    assert set(entries) == wanted and len(entries) == len(wanted)


#: Of the modules without __all__.
PUBLIC = {
    "functional": {"sync_batch_norm"},
    "ops": {"batch_norm", "batch_norm_", "BatchNormOutputs"},
}

# Those with snippets of their own; others quote programs.
CPP_PAGES = ["README.md", "docs/cpp.md"]


@pytest.mark.parametrize("page", CPP_PAGES)
def test_cpp_snippets_compile(page):
    snippets = [b.text for b in blocks(PROJECT / page) if b.kind == "cpp" and b.source is None]
    assert snippets
    code = "\n".join(snippets)
    options = ["-std=c++20", "-fsyntax-only", "-Wall", "-Werror", "-I", PROJECT / "include"]
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    command = [*compiler, *options, "-x", "c++", "-"]
    done = subprocess.run(command, input=code, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr


def anchors(page) -> set[str]:
    """As GitHub and the site name them."""
    titles = re.findall(r"^#+ (.*)$", outside_of_code(page.read_text(encoding="utf-8")), re.M)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = outside_of_code(page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        if path == "index.md" and page.parent.name == "docs":  # the site's name of the README
            path = "../README.md"
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lists_and_tables_begin_after_an_empty_line(page):
    """Or the site's Markdown makes no list of them, where GitHub does."""
    lines = outside_of_code(page.read_text(encoding="utf-8")).split("\n")
    for before, line in zip(lines, lines[1:]):
        if re.match(r"(?:[-*]|\d+\.) ", line):
            assert re.match(r"[-*] |\d+\. |  |$", before), line
        if line.startswith("| "):
            assert re.match(r"\| |$", before) or before.startswith("|---"), line


def test_every_page_is_in_the_navigation():
    navigation = read("mkdocs.yml").partition("\nnav:\n")[2]
    listed = re.findall(r": (\w+\.md)$", navigation, re.M)
    made = {"index.md", "contributing.md", "changelog.md", "security.md", "design.md"}
    made |= {"cpp_reference.md"}
    assert sorted(listed) == sorted(made | {page.name for page in DOCS})
    linked = re.findall(r"\]\((\w+\.md)", read("docs/start.md"))
    assert {*linked, "start.md"} == {page.name for page in DOCS}


#: Facts that would like to be told on several pages, and the page that tells them.
FACTS = {
    r"no gpu has\s+run": "shares.md",
    r"2,048 (ranks|devices)": "guarantees.md",
    r"2\^36 elements": "guarantees.md",
    r"about a million": "guarantees.md",
    r"512 channels": "guarantees.md",
    r"152 bytes": "performance.md",
    r"linux 5\.3": "platforms.md",
    r"nvcc 12\.8": "platforms.md",
    r"libsyncbn\.so\.\d": "cpp_guide.md",
    r"several gpus[^.]*\snot\s+been\s+tried": "cuda.md",
    r"24 bytes": "training.md",
    r"g\+\+ 12": "platforms.md",
}
# The contract, and the texts of errors.
REPEATING = ("numerics.md", "troubleshooting.md")


@pytest.mark.parametrize("fact", FACTS)
def test_a_fact_stands_on_one_page(fact):
    """Besides the README, which is the first that people read."""
    pages = [page for page in DOCS if page.name not in REPEATING]
    telling = [p.name for p in pages if re.search(fact, p.read_text(encoding="utf-8"), re.I)]
    assert telling == [FACTS[fact]]


def assert_tests_exist(named: str) -> None:
    """Looks for `file: function` and `file`, whose path may lack its beginning."""
    found = re.findall(r"([\w/]+\.\w+)(?:: (\w+))?", named)
    assert found or "tests/" in named, named
    for name, function in found:
        paths = [p for p in FILES if f"/{p.relative_to(PROJECT).as_posix()}".endswith(f"/{name}")]
        assert paths, name
        assert function in paths[0].read_text(encoding="utf-8"), (name, function)


FOLDERS = ("tests", "examples", "benchmarks")
FILES = [p for folder in FOLDERS for p in (PROJECT / folder).rglob("*.*")]


def test_each_promise_has_tests_that_are_there():
    """tests/guarantees.txt names them by the row of docs/guarantees.md."""
    rows = dict(re.findall(r"^([^#:]+): (.*)$", read("tests/guarantees.txt"), re.M))
    assert list(rows) == re.findall(r"^\| (\S.*?) \| .* \|$", read("docs/guarantees.md"), re.M)
    for named in rows.values():
        assert_tests_exist(named)


def assert_exists(name: str, argument: str) -> None:
    """Of Python, with an argument perhaps, or of a C++ header."""
    if name.startswith("syncbn::"):
        headers = [path.read_text("utf-8") for path in (PROJECT / "include").rglob("*.hpp")]
        kind = rf"(?:class|struct)[^;{{(]*? {name[8:]}\b|\w {name[8:]}\("
        assert re.search(kind, "\n".join(headers)), name
    else:
        value = pkgutil.resolve_name(name)
        assert not argument or argument in inspect.signature(value).parameters, (name, argument)


def test_the_five_documents_name_what_is_there():
    page = read("docs/documents.md")
    claims = re.findall(r"^\| ([^|*]+) \| [^|]+ \| ([^|]+) \| ([^|]+) \|$", page, re.M)[2:]
    documents = re.findall(r"^\| \*\*(.+):\*\* ", page, re.M)
    assert len(claims) >= 45 and {document for document, *_ in claims} == set(documents)
    for _, where, test in claims:
        (symbol,) = re.findall(r"`([\w.:]+)(?:\((\w+)=\))?`", where)
        assert_exists(*symbol)
        assert_tests_exist(test.replace("`", ""))


def test_pytorchs_layer_without_a_process_group_is_plain_batch_norm():
    """A fact that docs/conversion.md states."""
    x = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(9))
    theirs, plain = torch.nn.SyncBatchNorm(3), torch.nn.BatchNorm2d(3)
    assert torch.equal(theirs(x), plain(x))
    assert torch.equal(theirs.running_var, plain.running_var)


# Section 2 of docs/numerics.md: largest binary exponent of |x|, unit, digits and slots of the sums.
FORMATS = {
    "half": ((16, 24, 2, 3), (32, 48, 3, 4)),
    "single": ((128, 149, 6, 10), (256, 298, 12, 19)),
    "double": ((1024, 1074, 41, 67), (1024, 1074, 41, 67)),
}


@pytest.mark.parametrize("shift", (0.0, 1e4))
def test_mean_and_variance_are_within_the_derived_bounds(shift):
    """docs/numerics.md, "Limits", against rational numbers. PyTorch's own layers state no bound.

    A lane takes at most 512 / 16 = 32 elements: the first addition is exact, 31 round, the fold
    rounds four times, and the merge is exact. D = N Q - S^2 is exact, too, so nothing cancels that
    was not lost in S and Q already.
    """
    x = torch.randn(3, 1, 25, 41, generator=torch.Generator().manual_seed(7)) + shift
    rank = Rank(x)
    rank.step()
    values = [Fraction(v) for v in x.flatten().tolist()]
    count = len(values)
    mean, square = sum(values) / count, sum(v * v for v in values) / count
    var = square - mean**2
    u = Fraction(1, 2**53)
    gamma = (1 + u) ** 35 - 1
    size = sum(map(abs, values)) / count
    # The second term is of what was computed, which is the true value up to the first.
    bound = gamma * size + 2 * u * (abs(mean) + gamma * size)
    assert abs(Fraction(rank.mean.item()) - mean) <= bound
    bound = (3 * gamma + gamma**2) * square
    bound += ((1 + u) ** 3 - 1) * (var + bound)
    assert abs(Fraction(rank.var.item()) - var) <= bound


@pytest.mark.parametrize("name", FORMATS)
def test_digits_and_slots_hold_the_largest_sums_exact(name):
    """docs/numerics.md, "Limits": 2^36 elements on 2,048 ranks, two partials each for double.

    Partials are integers of their unit: every finite input is a multiple of its type's smallest
    number, and rounding to binary64 keeps multiples of a power of two. For double the second sum's
    unit is not the square, because p, q and d are binary64 numbers. k digits hold 2^(52(k-1)+62):
    the top one is a signed word, of which a bit is left for the carry.
    """
    row = next(r for r in read("docs/numerics.md").splitlines() if re.match(rf"\| {name} +\|", r))
    partials = 2**37 if name == "double" else 2**36
    for k, (largest, unit, digits, slots) in enumerate(FORMATS[name]):
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert cells[2 + 2 * k : 4 + 2 * k] == [f"2^-{unit}", str(digits)]
        # Below this in units; rounding on the way adds less than a factor of (1 + 2^-53)^35 < 2.
        total = 2 * partials * 2 ** (largest + unit)
        for count, bits in ((digits, 52), (slots, 32)):
            assert total <= 2 ** (bits * (count - 1) + 62), (name, bits)
    assert 2048 * (2**52 - 1) < 2**63  # a lower digit, summed over ranks
    assert 2048 * 2048 * (2**20 - 1) ** 2 < 2**63  # ranks times the sum of squared fingerprints
    assert 31 + 53 <= 3 * 32  # a significand that begins in a slot's last bit
