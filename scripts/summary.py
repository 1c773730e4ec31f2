# SPDX-License-Identifier: Apache-2.0
"""One line with the counts of JUnit files: python scripts/summary.py FOLDER {cpp,python}..."""

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

TITLES = {"cpp": "C++", "python": "Python"}


def counts(report: Path) -> str:
    if not report.exists():
        return "no result"
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))

    def total(attribute: str) -> int:
        return sum(int(suite.get(attribute, 0)) for suite in suites)

    failed = total("failures") + total("errors")
    skipped = total("skipped") + total("disabled")
    parts = [f"{total('tests') - failed - skipped} passed"]
    parts += [f"{failed} failed"] if failed else []
    parts += [f"{skipped} skipped"] if skipped else []
    return ", ".join(parts)


def main() -> int:
    folder = Path(sys.argv[1])
    reports = {suite: folder / f"{suite}.xml" for suite in sys.argv[2:]}
    print("; ".join(f"{TITLES[suite]}: {counts(path)}" for suite, path in reports.items()))
    return 0 if all(path.exists() for path in reports.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
