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
from concurrent.futures import ThreadPoolExecutor
from typing import Any

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


def _step(layer: SyncBatchNorm, x: torch.Tensor, dy: torch.Tensor) -> dict[str, Any]:
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(dy)
    found = {"y": y, "dx": x.grad, "dweight": layer.weight.grad}
    return found | {"running_mean": layer.running_mean, "running_var": layer.running_var}


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
    whole |= {name: whole[name][share] for name in ("y", "dx")}
    return [name for name in whole if not torch.equal(own[name], whole[name])]


def _rank_main(rank: str, folder: str, timeout: str) -> None:
    """Runs one process of the self-test; prints what it says of each engine, as JSON."""
    torch.set_num_threads(1)
    seconds, store = float(timeout), dist.FileStore(f"{folder}/store", 2)
    limit = datetime.timedelta(seconds=seconds)
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=2, timeout=limit)
    said = {}
    for engine, name in _ENGINES.items():
        peers = groups.peers(callers.sharing(None, seconds, engine))
        assert peers is not None  # there are two
        differing = ", ".join(_differences(int(rank), engine, seconds))
        said[name] = f"FAILED: differs from one process in {differing}"
        said[name] = said[name] if differing else "passed: the bits of one process"
        if (used := engine_of(peers).name) != name:
            said[name] += f" (over {used}; no {name}: {peers.note})"
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(said))


def _run_rank(rank: int, folder: str, timeout: float) -> dict[str, str]:
    code = "import sys; from syncbn.__main__ import _rank_main; _rank_main(*sys.argv[1:])"
    command = [sys.executable, "-c", code, str(rank), folder, str(timeout)]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return {f"rank {rank}": f"FAILED: no result within {timeout:g} s"}
    if ended.returncode != 0:
        last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
        return {f"rank {rank}": f"FAILED: exit code {ended.returncode}: {last}"}
    return json.loads(ended.stdout.splitlines()[-1])


def self_test(timeout: float = TIMEOUT) -> dict[str, str]:
    """Trains one layer in two processes, over Gloo and through shared memory, and compares bits
    with one process. Gives what each engine, or a rank without a result, has to say, which begins
    with "passed" or "FAILED". Shared memory that is not to be had is said, and no failure."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        zero, one = pool.map(_run_rank, (0, 1), (folder,) * 2, (timeout,) * 2)
    return one | {k: v for k, v in zero.items() if k not in one or v.startswith("FAILED")}


def doctor(timeout: float = TIMEOUT) -> int:
    """Prints facts and self-test; returns the exit code: 1 if the self-test failed."""
    for name, text in facts().items():
        print(f"{name:16}{text}")
    print(f"self-test of two processes, for up to {timeout:g} s:", flush=True)
    said = self_test(timeout)
    for name, text in said.items():
        print(f"  {name:14}{text}")
    return int(any(text.startswith("FAILED") for text in said.values()))


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"got {text!r}, expected a positive number of seconds")


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["prove"]:  # whose arguments are those of a program
        return importlib.import_module(f"{__package__}.prove").main(arguments[1:])
    parser = argparse.ArgumentParser(prog="python -m syncbn", description=__doc__)
    text = "print the folder of the CMake package, for cmake -D syncbn_DIR=..."
    parser.add_argument("--cmake-dir", action="store_true", help=text)
    commands = parser.add_subparsers(dest="command")
    command = commands.add_parser("doctor", help="what is active, why, and a self-test")
    text = f"limit of the self-test of two processes ({TIMEOUT:g})"
    command.add_argument("--timeout", type=_seconds, default=TIMEOUT, metavar="SECONDS", help=text)
    command = commands.add_parser("diff", help="where two trainings differ first (syncbn.record)")
    command.add_argument("a", help="a file of syncbn.record")
    command.add_argument("b", help="another one")
    commands.add_parser(
        "prove", help="whether a program has the same bits on any number of processes"
    )
    given = parser.parse_args(arguments)
    if given.cmake_dir:
        folder = pathlib.Path(__file__).parent
        if not (folder / "cmake").is_dir():
            text = "which has no CMake package, expected a syncbn that pip installed"
            print(f"--cmake-dir: got {folder}, {text}", file=sys.stderr)
            return 1
        print(folder / "cmake")
        return 0
    if given.command == "diff":
        try:
            difference = first_difference(given.a, given.b)
        except (OSError, ValueError) as error:
            parser.error(f"diff: expected two files of syncbn.record: {error}")
        print(difference or "no difference")
        return 0 if difference is None else 1
    if given.command is None:
        parser.error("command: got none, expected doctor, diff, prove or --cmake-dir")
    return doctor(given.timeout)


if __name__ == "__main__":
    sys.exit(main())
