# SPDX-License-Identifier: Apache-2.0
"""Run the libFuzzer targets, each for its share of the time.

python scripts/fuzz.py SECONDS [SEED]

The corpora begin with generated inputs and stay in build/fuzz/corpus. What a target finds is left
in build/fuzz/found; the target with that file as its argument repeats it.
"""

import os
import random
import secrets
import subprocess
import sys
from pathlib import Path

TARGETS = {"arguments": 256, "digits": 2048, "finalize": 2048}  # and the longest useful input


def seed_corpus(folder: Path, longest: int, seed: int) -> None:
    """Inputs of all lengths: zeros, which stand for usual choices, small numbers, and noise."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    for i in range(48):
        most = (1, 4, 256)[i % 3]
        data = bytes(rng.randrange(most) for _ in range(rng.randrange(1, longest)))
        (folder / f"generated-{i}").write_bytes(data)


def main() -> int:
    seconds = int(sys.argv[1])
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 1 + secrets.randbelow(2**31)
    build = Path("build/fuzz")
    found = build / "found"
    found.mkdir(parents=True, exist_ok=True)
    # An allocation that is refused is an exception in the library, not a finding.
    options = {
        "ASAN_OPTIONS": "allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    failed = []
    for target, longest in TARGETS.items():
        corpus = build / "corpus" / target
        seed_corpus(corpus, longest, seed)
        program = build / "tests/fuzz" / f"{target}_fuzz"
        command = [
            str(program),
            f"-seed={seed}",
            f"-max_total_time={max(1, seconds // len(TARGETS))}",
            f"-max_len={longest}",
            "-timeout=30",
            "-verbosity=0",
            "-print_final_stats=1",
            f"-artifact_prefix={found}/{target}-",
            str(corpus),
        ]
        print(f"{target}_fuzz, seed {seed}", flush=True)
        result = subprocess.run(
            command, env=os.environ | options, stderr=subprocess.PIPE, text=True, errors="replace"
        )
        units = [line for line in result.stderr.splitlines() if "executed_units" in line]
        print("".join(units) if result.returncode == 0 else result.stderr, flush=True)
        if result.returncode:
            failed.append(target)
    if failed:
        print(f"failed: {', '.join(failed)}; the inputs are in {found}/", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
