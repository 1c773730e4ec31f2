# SPDX-License-Identifier: Apache-2.0
"""Checks ptx_protocols.py by ptx_axioms.py: python check_ptx.py. No execution of a protocol has a
wrong outcome or a flaw, and each change of it leads to one that has. Before that, ptx_axioms.py has
to come to the verdicts of ptx_litmus.txt."""

import sys
from pathlib import Path

from ptx_axioms import executions, find
from ptx_protocols import PROTOCOLS, Protocol

LITMUS = Path(__file__).with_name("ptx_litmus.txt")


def check_litmus() -> int:
    """The number of verdicts that differ."""
    _, *tests = LITMUS.read_text(encoding="utf-8").split("\n\n")
    differ = 0
    for test in tests:
        head, program = test.split("\n", 1)
        name, source, expected = head.split(" | ")
        verdict, outcome = expected.split(": ")
        execution = find(program, outcome)
        right = execution is None if verdict == "forbidden" else execution is not None
        if not right or verdict == "flawed" and not execution.flaw:
            differ += 1
            print(f"WRONG: {name}, expected {verdict} ({source}), found {execution}")
    print(f"{len(tests)} litmus tests: {differ or 'no'} verdicts differ")
    return differ


def wrong(program: str, outcome: str) -> str:
    """An execution with this outcome or a flaw; empty: there is none."""
    if execution := find(program, outcome):
        return f"{execution.registers}, at the end {execution.memory}\n{execution.text}"
    flawed = (f"{e.flaw}\n{e.text}" for e in executions(program) if e.flaw)
    return next(flawed, "")


def check(protocol: Protocol) -> bool:
    program, outcome = protocol.program, protocol.wrong
    count = sum(1 for _ in executions(program))
    found = wrong(program, outcome)
    unseen = [change for change in protocol.changes if not wrong(change.of(program), outcome)]
    changes = f"{len(protocol.changes) - len(unseen)} of {len(protocol.changes)} changes are wrong"
    print(f"{protocol.name}: {'WRONG' if found else 'right'}, executions: {count}; {changes}")
    if found:
        print(f"  {found}")
    for change in unseen:
        print(f"  WRONG: nothing is wrong {change}")
    return count > 0 and not found and not unseen


def main() -> int:
    differ = check_litmus()
    rights = [check(protocol) for protocol in PROTOCOLS]
    return 0 if not differ and all(rights) else 1


if __name__ == "__main__":
    sys.exit(main())
