# SPDX-License-Identifier: Apache-2.0
"""What is active on this machine, and why: python -m syncbn doctor."""

import argparse
import contextlib
import datetime
import importlib.util
import json
import math
import pathlib
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from . import _build
from .exchange import callers, groups
from .exchange.host import engine_of
from .models.recording import first_difference
from .nn import SyncBatchNorm
from .operators import ops, why_not_cuda

#: Seconds that the two processes of the self-test have, with the time to start Python twice.
TIMEOUT = 60.0
_ENGINES: dict[callers.EngineName, str] = {"process_group": "gloo", "auto": "shared memory"}


def facts() -> dict[str, str]:
    """Lists versions, instruction sets, and whether the CUDA library is active, as lines to
    print."""
    active = ops.cpu_instruction_set()
    levels = [n for n in ("reference", *_build.simd_levels) if ops.cpu_instruction_set(n) == n]
    ops.cpu_instruction_set(active)
    cuda = f"not active: {why_not_cuda()}"
    if why_not_cuda() is None:
        cuda = f"active: {torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    nccl = torch.cuda.nccl.version() if dist.is_nccl_available() else ()
    found = {
        "syncbn": f"{_build.__version__}, in {pathlib.Path(__file__).parent}",
        "PyTorch": f"{torch.__version__}; syncbn was built for {_build.torch_version}",
        "Python": f"{platform.python_version()}, {platform.system()} {platform.release()}",
        "compiler": _build.compiler,
        "CPU": f"{active} in use; this processor and build have {', '.join(levels)}",
        "CUDA library": cuda,
        "PyTorch's CUDA": torch.version.cuda or "none",
        "NCCL": ".".join(map(str, nccl)) or "none",
    }
    if importlib.util.find_spec("apex") is not None:
        found["apex"] = "installed; apex.parallel.SyncBatchNorm does not work beside this package"
    return found


class Result(NamedTuple):
    """One line of the self-test."""

    name: str
    passed: bool
    text: str


def _step(layer: SyncBatchNorm, x: torch.Tensor, dy: torch.Tensor) -> dict[str, torch.Tensor]:
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(dy)
    return {
        "y": y.detach(),
        "dx": x.grad,
        "running_mean": layer.running_mean,
        "running_var": layer.running_var,
        "dweight": layer.weight.grad,
    }


def _differences(rank: int, engine: callers.EngineName, timeout: float) -> list[str]:
    """Names what has not the bits of one process with the whole batch: 2 samples on rank 0, 3 on
    rank 1, with exponents over 60 binades, where ordinary sums depend on their order."""
    random = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(5, 8, 6, 6, generator=random) for _ in range(2))
    x = x * torch.exp2(torch.randint(-30, 31, x.shape, generator=random))
    options: dict[str, Any] = {"affine_grad": "global", "timeout": timeout, "engine": engine}
    whole = _step(SyncBatchNorm(8, sync=False, **options), x, dy)
    share = slice(0, 2) if rank == 0 else slice(2, 5)
    own = _step(SyncBatchNorm(8, **options), x[share], dy[share])
    for name in ("y", "dx"):
        whole[name] = whole[name][share]
    return [name for name in whole if not torch.equal(own[name], whole[name])]


def _rank_main(rank: str, folder: str, timeout: str) -> None:
    """Runs one process of the self-test; prints a list of Results as JSON."""
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=float(timeout))
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=2, timeout=limit)
    results = []
    for engine, name in _ENGINES.items():
        peers = groups.peers(callers.sharing(None, float(timeout), engine))
        assert peers is not None  # there are two
        differing = _differences(int(rank), engine, float(timeout))
        text = f"differs from one process in {', '.join(differing)}"
        text = text if differing else "the bits of one process"
        if (used := engine_of(peers).name) != name:
            text += f" (over {used}; no {name}: {peers.note})"
        results.append(Result(name, not differing, text))
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(results))


def self_test(timeout: float = TIMEOUT) -> list[Result]:
    """Trains one layer in two processes, over Gloo and through shared memory, and compares bits
    with one process. Shared memory that is not to be had is said, and no failure."""
    code = "import sys; from syncbn.__main__ import _rank_main; _rank_main(*sys.argv[1:])"
    until = time.monotonic() + timeout
    results: dict[str, list[tuple[bool, str]]] = {name: [] for name in _ENGINES.values()}
    failures = []
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", code, str(rank), folder, str(timeout)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            for rank, process in enumerate(processes):
                try:
                    out, err = process.communicate(timeout=max(0.0, until - time.monotonic()))
                except subprocess.TimeoutExpired:
                    failures.append(f"rank {rank}: no result within {timeout:g} s")
                    continue
                if process.returncode != 0:
                    last = (err.strip().splitlines() or ["no message"])[-1]
                    failures.append(f"rank {rank}: exit code {process.returncode}: {last}")
                    continue
                for name, passed, text in json.loads(out.splitlines()[-1]):
                    results[name].append((passed, f"rank {rank}: {text}"))
        finally:
            for process in processes:
                process.kill()
                process.wait()
    if failures:
        return [Result("two processes", False, "; ".join(failures))]
    lines = []
    for name, ranks in results.items():
        texts = [text.split(": ", 1)[1] for _, text in ranks]
        same = len(set(texts)) == 1
        text = texts[0] if same else "; ".join(text for _, text in ranks)
        lines.append(Result(name, all(passed for passed, _ in ranks), text))
    return lines


def doctor(timeout: float = TIMEOUT) -> int:
    """Prints facts and self-test; returns the exit code: 1 if the self-test failed."""
    for name, text in facts().items():
        print(f"{name:16}{text}")
    print(f"self-test of two processes, for up to {timeout:g} s:", flush=True)
    results = self_test(timeout)
    for result in results:
        print(f"  {result.name:14}{'passed' if result.passed else 'FAILED'}: {result.text}")
    return 0 if all(result.passed for result in results) else 1


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"got {text!r}, expected a positive number of seconds")


def _cmake_dir() -> int:
    folder = pathlib.Path(__file__).parent / "cmake"
    if not folder.is_dir():
        print(
            f"--cmake-dir: got {folder.parent}, which has no CMake package, expected a syncbn that "
            "pip installed",
            file=sys.stderr,
        )
        return 1
    print(folder)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m syncbn", description=__doc__)
    parser.add_argument(
        "--cmake-dir",
        action="store_true",
        help="print the folder of the CMake package, for cmake -D syncbn_DIR=...",
    )
    commands = parser.add_subparsers(dest="command")
    command = commands.add_parser("doctor", help="what is active, why, and a self-test")
    command.add_argument(
        "--timeout",
        type=_seconds,
        default=TIMEOUT,
        metavar="SECONDS",
        help="limit of the self-test of two processes (%(default)g)",
    )
    command = commands.add_parser("diff", help="where two trainings differ first (syncbn.record)")
    command.add_argument("a", help="a file of syncbn.record")
    command.add_argument("b", help="another one")
    given = parser.parse_args(arguments)
    if given.cmake_dir:
        return _cmake_dir()
    if given.command == "diff":
        try:
            difference = first_difference(given.a, given.b)
        except (OSError, ValueError) as error:
            parser.error(f"diff: expected two files of syncbn.record: {error}")
        print(difference or "no difference")
        return 0 if difference is None else 1
    if given.command is None:
        parser.error("command: got none, expected doctor, diff or --cmake-dir")
    return doctor(given.timeout)


if __name__ == "__main__":
    sys.exit(main())
