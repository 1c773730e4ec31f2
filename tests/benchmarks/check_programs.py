# SPDX-License-Identifier: Apache-2.0
"""What the C++ benchmarks write and refuse: check_programs.py BENCH_PASSES BENCH_EXCHANGE
BENCH_THREAD_RANKS [BENCH_EXCHANGE_MPI MPIEXEC].

No time's size is looked at. torch.nn.SyncBatchNorm has nothing to run here: it is for GPUs only.
"""

import json
import subprocess
import sys
import tempfile

PASSES = ["local_moments", "finalize_moments", "normalize", "forward"]
PASSES += ["local_gradients", "finalize_gradients", "input_gradient", "backward"]


def equal(got: object, expected: object, what: str) -> None:
    if got != expected:
        raise SystemExit(f"{what}: got {got}, expected {expected}")


def check_quartiles(row: dict, name: str) -> None:
    if not 0 < row[name][0] <= row[name][1] <= row[name][2]:
        raise SystemExit(f"{name}: got {row[name]}, expected three rising numbers above 0")


def results(*command: str) -> object:
    with tempfile.TemporaryDirectory() as folder:
        target = f"{folder}/results.json"
        subprocess.run([*command, f"--json={target}"], check=True, stdout=subprocess.DEVNULL)
        with open(target) as file:
            return json.load(file)


def check_passes(program: str) -> None:
    # 2 x 8 x 3 x 5: no plane, row or message is a multiple of a vector.
    found = results(program, "--seconds=0", "--threads=1,2", "2x8x3x5", "5x9")
    cases = {}
    for row in found["passes"]:
        place = row["shape"], row["dtype"], row["layout"], row["threads"], row["memory"]
        cases.setdefault(place, []).append(row["pass"])
        check_quartiles(row, "microseconds")
        check_quartiles(row, "times_copy")
    equal(len(cases), 2 * 2 * 2 * 2 + 2 * 2 * 2, "cases")
    for names in cases.values():
        equal(names[0] in ("copy (memcpy)", "copy (non-temporal)"), True, "the copy comes first")
        equal(sorted(names[1:]), sorted(PASSES), "passes")


def check_rows(number: int, *command: str) -> None:
    rows = results(*command)
    equal(len(rows), number, str(command))
    for row in rows:
        for name in ("microseconds",) if "microseconds" in row else ("alone", "ranks", "ratio"):
            check_quartiles(row, name)


def check_refused(expected: str, *command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    equal((done.returncode, done.stderr.strip(), done.stdout), (2, expected, ""), str(command[1:]))


if __name__ == "__main__":
    passes, exchange, thread_ranks, *mpi = sys.argv[1:]
    check_passes(passes)
    check_rows(2 * 2 * 3, exchange, "--rounds=20")  # engines, ranks, channels
    check_rows(2 * 2, thread_ranks, "--seconds=0", "2x8x3x5", "5x9")  # shapes, directions
    if mpi:
        program, mpiexec = mpi
        check_rows(3, mpiexec, "-n", "2", program, "--rounds=20")
    check_refused(
        "shapes: got none, expected for example 8x64x56x56, or $(cat benchmarks/shapes.txt)",
        passes,
    )
    check_refused("shape: got 8x, expected sizes like 8x64x56x56", passes, "8x")
    check_refused("--rounds: got 0, expected at least 1", exchange, "--rounds=0")
    check_refused("shapes: got none, expected for example 8x64x56x56", thread_ranks)
