"""All CPU benchmarks in one run: one JSON, tables and a plot.

python benchmarks/suite.py [--quick]     (`make bench` builds what it needs; ARGS=--quick)

passes    bench_passes: each pass against the fastest copy
exchange  bench_exchange (threads, shared memory, MPI where it is built) and Gloo: one all-reduce
threads   bench_thread_ranks: one layer of 2 threads that are ranks, or alone
layers    bench_layer: one layer against PyTorch's and oneDNN's batch norm, one process
ranks     bench_ranks: one layer of 2 and 4 processes against the usual recipe
steps     bench_step: training steps of 2 processes

Results are benchmarks/results/cpu-<processor>-<date>.json and .png; git keeps chosen ones only
(git add --force). Times are [lower quartile, median, upper quartile]. Run it on a quiet machine:
the load before and after the run is in the JSON. --quick takes a minute: three shapes and
2 processes.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import bench_ranks
import bench_step
import common
import processes

import report


class Form(NamedTuple):
    shapes: list[common.Shape]
    seconds: float  # for each line of bench_passes and bench_layer
    rank_seconds: float  # for each shape or network of several processes
    rounds: int  # at least, of each line
    exchanges: int
    batches: dict[str, list[int]]
    ranks: tuple[int, ...] = (2, 4)
    threads: tuple[int, ...] = (1, 2)


QUICK_SHAPES = [(8, 64, 56, 56), (16, 512, 14, 14), (64, 2048)]
FORMS = {
    "full": Form(common.SHAPES, 0.5, 0.8, 5, 1000, bench_step.BATCHES),
    "quick": Form(QUICK_SHAPES, 0.15, 0.3, 3, 200, {"demo": [4], "ResNet-20": [8]}, (2,)),
    # Says nothing about speed; for the test of the suite itself.
    "tiny": Form([(2, 8, 3, 5)], 0, 0, 2, 10, {"ResNet-20": [1]}, (2,), (1,)),
}


#: For Open MPI: as root, more ranks than cores, and no copies between processes, which containers
#: may forbid. Others do not look at these.
MPI_ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
}


def run_program(name: str, path: Path, *arguments: str, quiet: bool = False, ranks: int = 0):
    """What a program of the suite wrote to its JSON. ranks: of MPI."""
    with tempfile.TemporaryDirectory() as folder:
        target = f"{folder}/results.json"
        out = subprocess.DEVNULL if quiet else None
        command = [sys.executable, path] if path.suffix == ".py" else [path]
        if ranks:
            command = ["mpiexec", "-n", str(ranks), *command]
        print(f"\n== {name}", flush=True)
        subprocess.run(
            [*command, *arguments, f"--json={target}"],
            env=os.environ | MPI_ENVIRONMENT,
            stdout=out,
            check=True,
        )
        return json.loads(Path(target).read_text())


def run_all(form: Form, programs: Path) -> dict:
    shapes = [common.text_of(shape) for shape in form.shapes]
    threads = [str(t) for t in form.threads]
    results = {"format": 1, "machine": common.machine(), "passes": None}
    results |= {"exchange": [], "threads": []}
    if (programs / "bench_passes").exists():
        options = [f"--seconds={form.seconds}", f"--threads={','.join(threads)}", *shapes]
        results["passes"] = run_program("passes", programs / "bench_passes", *options, quiet=True)
        rounds = f"--rounds={form.exchanges}"
        results["exchange"] = run_program("exchange", programs / "bench_exchange", rounds)
        mpi = programs / "bench_exchange_mpi"
        for ranks in form.ranks if mpi.exists() and shutil.which("mpiexec") else ():
            results["exchange"] += run_program("exchange, MPI", mpi, rounds, ranks=ranks)
        options = [f"--seconds={form.seconds}", *shapes]
        results["threads"] = run_program("threads", programs / "bench_thread_ranks", *options)
    else:
        print(f"no passes, no exchange of threads: {programs} has no bench_passes (make bench-cpp)")
    options = ["--seconds", str(form.seconds), "--rounds", str(form.rounds)]
    options += ["--threads", *threads, "--shapes", *shapes]
    results["layers"] = run_program("layers", common.FOLDER / "bench_layer.py", *options)

    results |= {"ranks": [], "steps": []}
    limits = {"seconds": form.rank_seconds, "least": form.rounds}
    works = [
        (bench_ranks.measure_gloo, {"rounds": form.exchanges // 3}),
        (bench_ranks.measure_layers, {"shapes": form.shapes} | limits),
        (bench_step.measure_steps, {"batches": form.batches} | limits),
    ]
    for number in form.ranks:
        print(f"\n== {number} processes", flush=True)
        rows = processes.run(number, works if number == 2 else works[:2])
        steps = [row for row in rows if "network" in row]
        others = [row for row in rows if "network" not in row]
        results["exchange"] += [row for row in others if "engine" in row]
        results["ranks"] += [row for row in others if "engine" not in row]
        results["steps"] += steps
        print(bench_ranks.table(others))
        if steps:
            print(bench_step.table(steps))
    return results


def name_of(machine: dict) -> str:
    words = re.sub(r"\(.*?\)|\bCPU\b|\bProcessor\b|@.*", " ", machine["processor"]) or "unknown"
    words = re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")
    return f"cpu-{words}-{machine['date'][:10]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--quick", dest="form", action="store_const", const="quick", default="full")
    form.add_argument("--tiny", dest="form", action="store_const", const="tiny")
    built = common.FOLDER.parent / "build" / "bench" / "benchmarks"
    parser.add_argument("--programs", type=Path, default=built, help="where bench_passes is")
    parser.add_argument("--out", type=Path, default=common.FOLDER / "results", help="a folder")
    arguments = parser.parse_args()

    if os.getloadavg()[0] > 0.5:
        print(f"The machine is not quiet: its load is {os.getloadavg()[0]:.1f}.")
    start = time.monotonic()
    results = run_all(FORMS[arguments.form], arguments.programs)
    results |= {"form": arguments.form, "seconds": round(time.monotonic() - start)}
    results["machine"]["load_after"] = os.getloadavg()[0]
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"{name_of(results['machine'])}.json"
    path.write_text(json.dumps(results) + "\n")
    report.report(results, path.with_suffix(".png"))
    print(f"results: {path} ({results['seconds']} s)")


if __name__ == "__main__":
    main()
