# SPDX-License-Identifier: Apache-2.0
"""A dtype or an activation that is added to its enumeration, and nowhere else, does not compile.

python made_up_kinds.py COMPILER PROJECT_DIR. What else there is asks the traits, or is refused at
run time (tests/cpp/numbers_test.cpp); the rule `kinds` of source_rules.py looks after that.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

# The header, what is added to it, and the places where the compiler has to stop.
CASES = [
    (
        "tensor.hpp",
        {"kFloat32, kFloat64 }": "kFloat32, kFloat64, kMadeUp }"},
        {"tensor.hpp: kMadeUp", "dtype.hpp: kMadeUp"},
    ),
    (
        "tensor.hpp",
        {
            "kFloat32, kFloat64 }": "kFloat32, kFloat64, kMadeUp }",
            "kDtypeCount = 4": "kDtypeCount = 5",
        },
        {
            "tensor.hpp: kMadeUp",
            "dtype.hpp: kMadeUp",
            "header.hpp: ",
            "checks.cpp: ",
            "arguments.hpp: ",
        },
    ),
    ("options.hpp", {"kLeakyRelu }": "kLeakyRelu, kMadeUp }"}, {"activation.hpp: kMadeUp"}),
    (
        "options.hpp",
        {"kLeakyRelu }": "kLeakyRelu, kMadeUp }", "kActivationCount = 3": "kActivationCount = 4"},
        {"activation.hpp: kMadeUp", "checks.cpp: ", "arguments.hpp: "},
    ),
]
ERROR = re.compile(r"([^/\s]+):\d+:\d+: error: (.*)")
MISSING = re.compile(r"\bkMadeUp\b")


def stops(compiler: str, project: Path, header: str, changes: dict[str, str]) -> set[str]:
    """ "file: kMadeUp" of each switch without it, "file: " of each assertion that fails."""
    text = (project / "include" / "syncbn" / header).read_text(encoding="utf-8")
    for old, new in changes.items():
        if text.count(old) != 1:
            raise SystemExit(f"{header}: expected {old!r} once")
        text = text.replace(old, new)
    with tempfile.TemporaryDirectory() as folder:
        overlay = Path(folder, "syncbn")
        overlay.mkdir()
        (overlay / header).write_text(text, encoding="utf-8")
        found = set()
        for source in ("tensors/checks.cpp", "c_api/c_api.cpp"):
            command = [compiler, "-std=c++20", "-fsyntax-only", "-Werror=switch", f"-I{folder}"]
            command += [f"-I{project}/include", f"-I{project}/src", f"{project}/src/{source}"]
            done = subprocess.run(command, capture_output=True, text=True)
            for file, error in ERROR.findall(done.stderr):
                if MISSING.search(error):
                    found.add(f"{file}: kMadeUp")
                elif "static assertion failed" in error or "static_assert failed" in error:
                    found.add(f"{file}: ")
    return found


def main() -> int:
    compiler, project = sys.argv[1], Path(sys.argv[2])
    failed = 0
    for header, changes, wanted in CASES:
        found = stops(compiler, project, header, changes)
        if found != wanted:
            print(f"{header} with {changes}: stopped at {sorted(found)}, expected {sorted(wanted)}")
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
