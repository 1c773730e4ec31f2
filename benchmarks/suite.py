# SPDX-License-Identifier: Apache-2.0
"""All CPU benchmarks in one run: one JSON, tables and a plot.

python benchmarks/suite.py [--quick] [--only PART...] [--shapes SHAPE...] [--write]

`make bench` builds what it needs; options are in ARGS, for example ARGS=--quick.

passes    bench_passes: a layer's forward and backward, and each pass, against the fastest copy
exchange  bench_exchange (threads, shared memory, MPI where it is built) and Gloo: one all-reduce
curve     the same without Gloo, for 2 to 64 ranks
threads   bench_thread_ranks: one layer of 2 threads that are ranks, or alone
layers    bench_layer: one layer against PyTorch's batch norm, one process
welford   bench_layer: a forward with Welford statistics against one with exact sums, and PyTorch's
ranks     bench_ranks: one layer of 2 and 4 processes against the usual recipe
steps     bench_step: training steps of 2 processes
shares    bench_shares: steps of syncbn.Shares against those of plain programs, 1 and 2 processes
jax       bench_jax: one layer in JAX against flax's, on 1, 2 and 4 devices

Times are [lower quartile, median, upper quartile]. Run it on a quiet machine: the load before and
after the run is in the JSON. --quick takes a minute: three shapes and 2 processes. --write stores
the JSON as docs/performance.json (with --only these parts of it, and when they were measured) and
makes the tables of docs/performance.md and benchmarks/README.md, and the plots, of it; otherwise
JSON and plots are build/bench/results*.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import bench_layer
import bench_ranks
import bench_shares
import bench_step
import common
import processes

import report


class Form(NamedTuple):
    shapes: list[common.Shape]
    seconds: float  # for each line of bench_passes and each case of bench_layer
    rank_seconds: float  # for each shape of several processes
    step_seconds: float  # for each network and batch
    rounds: int  # at least, of each line
    exchanges: int
    batches: dict[str, list[int]]
    ranks: tuple[int, ...] = (2, 4)
    threads: tuple[int, ...] = (1, 2)
    devices: tuple[int, ...] = (1, 2, 4)
    curve: tuple[int, ...] = (2, 4, 8, 16, 32, 64)


QUICK_SHAPES = [(8, 64, 56, 56), (16, 512, 14, 14), (64, 2048)]
FORMS = {
    "full": Form(common.SHAPES, 1.0, 0.8, 12, 7, 1000, bench_step.BATCHES),
    "quick": Form(QUICK_SHAPES, 0.1, 0.2, 1, 3, 200, {"ResNet-20": [8]}, (2,), (1,), curve=(2, 8)),
    # Says nothing about speed; for the test of the suite itself.
    "tiny": Form([(2, 8, 3, 5)], 0, 0, 0, 2, 10, {"ResNet-20": [1]}, (2,), (1,), (1, 2), (2,)),
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


def run_program(path: Path, *arguments: str, ranks: int = 0) -> list | dict:
    """What a C++ program wrote to its JSON; nothing if it is not built. ranks: of MPI."""
    launcher = ["mpiexec", "-n", str(ranks)] if ranks else []
    if not path.exists() or not shutil.which((launcher or ["true"])[0]):
        print(f"{path.name} is not built (make bench-cpp): not measured")
        return []
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "results.json"
        subprocess.run(
            [*launcher, path, *arguments, f"--json={target}"],
            env=os.environ | MPI_ENVIRONMENT,
            stdout=subprocess.DEVNULL,
            check=True,
        )
        return json.loads(target.read_text())


def shape_options(form: Form) -> list[str]:
    return [f"--seconds={form.seconds}", *map(common.text_of, form.shapes)]


def passes(form: Form, programs: Path) -> list | dict:
    return run_program(programs / "bench_passes", "--threads=1", *shape_options(form))


def exchange(form: Form, programs: Path) -> list[dict]:
    rounds = f"--rounds={form.exchanges}"
    rows = run_program(programs / "bench_exchange", rounds)
    for ranks in form.ranks:
        rows += run_program(programs / "bench_exchange_mpi", rounds, ranks=ranks)
        gloo = (bench_ranks.measure_gloo, {"rounds": form.exchanges // 3})
        rows += processes.run(ranks, [gloo])
    return rows


def curve(form: Form, programs: Path) -> list[dict]:
    """Fewer rounds for more ranks, which take turns."""
    rows = []
    for ranks in form.curve:
        rounds = f"--rounds={max(20, 2 * form.exchanges // ranks)}"
        rows += run_program(programs / "bench_exchange", f"--ranks={ranks}", rounds)
        rows += run_program(programs / "bench_exchange_mpi", rounds, ranks=ranks)
    return rows


def threads(form: Form, programs: Path) -> list[dict]:
    return run_program(programs / "bench_thread_ranks", *shape_options(form))


def layers(form: Form, programs: Path) -> list[dict]:
    shapes = [*form.shapes, bench_layer.SMALL]
    return bench_layer.measure_layers(shapes, form.threads, form.seconds, form.rounds)


def welford(form: Form, programs: Path) -> list[dict]:
    shapes = [shape for shape in form.shapes if shape in QUICK_SHAPES] or form.shapes
    return bench_layer.measure_welford(shapes, form.seconds, form.rounds)


def ranks(form: Form, programs: Path) -> list[dict]:
    limits = {"seconds": form.rank_seconds, "least": form.rounds}
    work = (bench_ranks.measure_layers, {"shapes": form.shapes} | limits)
    return [row for number in form.ranks for row in processes.run(number, [work])]


def steps(form: Form, programs: Path) -> list[dict]:
    limits = {"seconds": form.step_seconds, "least": form.rounds}
    return processes.run(2, [(bench_step.measure_steps, {"batches": form.batches} | limits)])


def shares(form: Form, programs: Path) -> list[dict]:
    networks = [
        name for name in bench_shares.NETWORKS if name in form.batches or len(form.batches) > 1
    ]
    limits = {"seconds": form.step_seconds / 3, "least": form.rounds}
    work = (bench_shares.measure_shares, {"networks": networks} | limits)
    return [row for number in (1, 2) for row in processes.run(number, [work])]


def jax(form: Form, programs: Path) -> list[dict]:
    """In processes of their own: JAX counts its devices once."""
    command = [sys.executable, str(common.FOLDER / "bench_jax.py")]
    limits = [str(form.rank_seconds), str(form.rounds)]
    shapes = [common.text_of(shape) for shape in form.shapes if shape[0] % max(form.devices) == 0]
    rows = []
    for devices in form.devices:
        whole = [*command, str(devices), *limits, *shapes]
        done = subprocess.run(whole, stdout=subprocess.PIPE, text=True, check=True)
        rows += json.loads(done.stdout)
    return rows


PARTS = (layers, welford, passes, exchange, curve, threads, ranks, steps, shares, jax)
PARTS = {part.__name__: part for part in PARTS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--quick", dest="form", action="store_const", const="quick", default="full")
    form.add_argument("--tiny", dest="form", action="store_const", const="tiny")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--shapes", nargs="+", type=common.parse_shape)
    parser.add_argument("--write", action="store_true", help="the stored results and their page")
    built = common.FOLDER.parent / "build" / "bench"
    parser.add_argument("--programs", type=Path, default=built / "benchmarks", help="a folder")
    parser.add_argument("--out", type=Path, default=built / "results.json")
    arguments = parser.parse_args()

    machine = common.machine()
    if machine["load"] > 0.5:
        print(f"The machine is not quiet: its load is {machine['load']:.1f}.")
    form = FORMS[arguments.form]
    if arguments.shapes:
        form = form._replace(shapes=arguments.shapes)
    start = time.monotonic()
    parts = {}
    for name, part in PARTS.items():
        began = time.monotonic()
        parts[name] = part(form, arguments.programs) if name in arguments.only else []
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    found = parts["passes"] or {"build": None, "passes": []}
    machine |= {"build": found["build"], "load_after": os.getloadavg()[0]}
    parts["passes"] = found["passes"]
    results = {"format": 2, "form": arguments.form, "seconds": round(time.monotonic() - start)}
    results |= {"machine": machine, **parts}
    path = report.STORED if arguments.write else arguments.out
    if arguments.write and arguments.only != list(PARTS):
        results = report.merged(json.loads(path.read_text()), results, arguments.only)
    path.parent.mkdir(parents=True, exist_ok=True)
    common.write_json(path, results)
    report.report(results, path)


if __name__ == "__main__":
    main()
