# SPDX-License-Identifier: Apache-2.0
"""What the C++ benchmarks write and refuse: check_programs.py BENCH_PASSES BENCH_EXCHANGE
BENCH_THREAD_RANKS [BENCH_EXCHANGE_MPI MPIEXEC].

No time's size is looked at. torch.nn.SyncBatchNorm has nothing to run here: it is for GPUs only.
"""

import itertools
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
        cases.setdefault(place, []).append(row)
        check_quartiles(row, "microseconds")
        check_quartiles(row, "times_copy")
        rate = row["bytes"] / row["microseconds"][1] / 1e3
        if abs(row["gigabytes_per_second"] - rate) > 1e-3 * rate + 1e-3:  # digits that are written
            raise SystemExit(f"gigabytes_per_second: got {row}, expected {rate}")
    dtypes, threads, memory = ("float32", "bfloat16"), (1, 2), ("reused", "fresh")
    layouts = ("contiguous", "channels-last")
    expected = [*itertools.product(["2x8x3x5"], dtypes, layouts, threads, memory)]
    expected += itertools.product(["5x9"], dtypes, layouts[:1], threads, memory)
    equal(set(cases), set(expected), "cases")
    for rows in cases.values():
        names = [row["pass"] for row in rows]
        equal(names[0] in ("copy (memcpy)", "copy (non-temporal)"), True, "the copy comes first")
        equal(rows[0]["times_copy"], [1, 1, 1], "the copy's own ratio")
        equal(sorted(names[1:]), sorted(PASSES), "passes")
    copied = {row["bytes"] for row in found["passes"] if row["pass"].startswith("copy")}
    equal(copied, {2 * 240 * 4, 2 * 240 * 2, 2 * 45 * 4, 2 * 45 * 2}, "bytes that are copied")


def check_exchange(engines: tuple, ranks: tuple, *command: str) -> None:
    rows = results(*command, "--rounds=20")
    places = {(row["engine"], row["ranks"], row["channels"], row["bytes"]) for row in rows}
    bytes_of = {64: 9792, 512: 77888, 2048: 311360}  # 8 (8 + 19 C)
    expected = itertools.product(engines, ranks, bytes_of.items())
    equal(places, {(engine, number, *item) for engine, number, item in expected}, "exchanges")
    for row in rows:
        check_quartiles(row, "microseconds")
        equal(row["p99"] >= row["microseconds"][2], True, "p99 is not below the upper quartile")


def check_thread_ranks(program: str) -> None:
    rows = results(program, "--seconds=0", "2x8x3x5", "5x9")
    cases = [(row["shape"], row["direction"]) for row in rows]
    expected = itertools.product(("2x8x3x5", "5x9"), ("forward", "backward"))
    equal(cases, list(expected), "cases")
    for row in rows:
        equal(row["rounds"] >= 5, True, "rounds are at least 5")
        for name in ("alone", "ranks", "ratio"):
            check_quartiles(row, name)


def check_refused(expected: str, *command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    equal((done.returncode, done.stderr.strip(), done.stdout), (2, expected, ""), str(command[1:]))


if __name__ == "__main__":
    passes, exchange, thread_ranks, *mpi = sys.argv[1:]
    check_passes(passes)
    check_exchange(("threads", "shared memory"), (2, 4), exchange)
    check_thread_ranks(thread_ranks)
    if mpi:
        program, mpiexec = mpi
        check_exchange(("MPI",), (2,), mpiexec, "-n", "2", program)
    check_refused(
        "shapes: got none, expected for example 8x64x56x56, or $(cat benchmarks/shapes.txt)",
        passes,
    )
    check_refused("shape: got 8x, expected sizes like 8x64x56x56", passes, "8x")
    check_refused("shape: got 8x0, expected sizes like 8x64x56x56", passes, "8x0")
    check_refused("shape: got 8, expected at least 2 axes (N, C, spatial...)", passes, "8")
    check_refused(
        "--threads: got 0, expected numbers from 1 on, like 1,2", passes, "--threads=0", "2x2"
    )
    check_refused("--rounds: got 0, expected at least 1", exchange, "--rounds=0")
    check_refused("shapes: got none, expected for example 8x64x56x56", thread_ranks)
