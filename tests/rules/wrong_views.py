# SPDX-License-Identifier: Apache-2.0
"""Each wrong line of tests/cpp/headers/wrong_views.cpp is an error with its sentence, and nothing
else is an error: python wrong_views.py COMPILER PROJECT_DIR."""

import re
import subprocess
import sys
from pathlib import Path

SAYS = re.compile(r"// says: (.*)")
ASSERTION = re.compile(r"error: static(?: assertion|_assert) failed(?:: | .*?\")(.*)")


def main() -> int:
    compiler, project = sys.argv[1], Path(sys.argv[2])
    source = project / "tests" / "cpp" / "headers" / "wrong_views.cpp"
    command = [compiler, "-std=c++20", "-fsyntax-only", f"-I{project}/include", str(source)]
    told = subprocess.run(command, capture_output=True, text=True).stderr
    lines = enumerate(source.read_text(encoding="utf-8").splitlines(), 1)
    wanted = {number: found[1] for number, line in lines if (found := SAYS.search(line))}
    sentences = sorted(sentence.strip('"') for sentence in ASSERTION.findall(told))
    places = {int(line) for line in re.findall(rf"{source.name}:(\d+):\d+:", told)}
    fits = len(sentences) == len(wanted) == told.count("error: ") and all(
        sentence.startswith(start) for sentence, start in zip(sentences, sorted(wanted.values()))
    )
    if not fits or not wanted.keys() <= places:
        print(f"{told}\ngot {sentences} at {sorted(places)}, expected {wanted}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
