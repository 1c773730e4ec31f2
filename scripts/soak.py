# SPDX-License-Identifier: Apache-2.0
"""Run the property tests and random faults with fresh seeds until the time is up or one fails.

python scripts/soak.py MINUTES [SEED]

SEED is that of the first round, to repeat a failure; all that a round draws follows from it.
"""

import os
import secrets
import subprocess
import sys
import time

BUILD = "build/cpu/tests"


def main() -> int:
    end = time.monotonic() + 60 * float(sys.argv[1])
    rounds = 0
    while rounds == 0 or time.monotonic() < end:
        seed = int(sys.argv[2]) if len(sys.argv) > 2 and rounds == 0 else secrets.randbelow(2**31)
        print(f"round {rounds}: seed {seed}", flush=True)
        runs = (
            (
                {"SYNCBN_SEED": str(seed), "SYNCBN_CASES": "5000"},
                [f"{BUILD}/cpp/syncbn_tests", "--gtest_filter=Properties.*", "--gtest_brief=1"],
            ),
            (
                {"SYNCBN_SEED": str(seed), "SYNCBN_CASES": "400"},
                [f"{BUILD}/emulation/syncbn_emulation_tests", "--gtest_brief=1"]
                + ["--gtest_filter=*TwoHundredSeeds*"],
            ),
            (
                {"SYNCBN_EXAMPLES": "500"},
                [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
                + [f"--hypothesis-seed={seed}", "tests/python/bits/test_properties.py"],
            ),
            (
                {"SYNCBN_SEED": str(seed), "SYNCBN_FAULT_ROUNDS": "100"},
                [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
                + ["-m", "weekly", "tests/python/exchange/test_fault_storm.py"],
            ),
        )
        for variables, command in runs:
            if subprocess.run(command, env=os.environ | variables).returncode:
                print(f"failed with seed {seed}: {' '.join(command)}", file=sys.stderr)
                return 1
        rounds += 1
    print(f"{rounds} rounds passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
