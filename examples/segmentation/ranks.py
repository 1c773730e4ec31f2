# SPDX-License-Identifier: Apache-2.0
"""The ranks: real processes, one pool for everything that needs more than one of them."""

from __future__ import annotations

import os
import tempfile
import threading
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tqdm import tqdm

from bits import Case, run_layer
from data import Source
from train import Place, Plan, Run, Setting, ranks_text, train

# Longer than any wait of one rank for another here, short enough to notice a rank that hangs.
_TIMEOUT = timedelta(minutes=5)


class RankFailed(RuntimeError):
    """A rank raised or died; the others have been ended."""


@dataclass(frozen=True)
class Job:
    """What the pool does; every rank reads it from a file."""

    plan: Plan
    settings: list[Setting]
    source: Source
    case: Case | None  # for the comparison of bits
    devices: list[str]  # one a rank
    backend: str


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_of(ranks: int) -> int:
    """Threads for each rank. (c) has as many: the bits of convolutions depend on them."""
    return max(1, cores() // ranks)


def choose_devices(wish: str, ranks: int) -> tuple[list[str], str, str]:
    """(a device for each rank, backend, a sentence about the choice)."""
    gpus = torch.cuda.device_count() if wish != "cpu" and torch.cuda.is_available() else 0
    if wish == "cuda" and gpus == 0:
        raise ValueError("--device cuda: PyTorch finds no CUDA device here")
    if gpus >= ranks and dist.is_nccl_available():
        devices = [f"cuda:{rank}" for rank in range(ranks)]
        return devices, "nccl", f"one of {gpus} CUDA devices for each rank, DDP over NCCL"
    if wish == "cuda":  # NCCL wants a device for each rank
        devices = [f"cuda:{rank % gpus}" for rank in range(ranks)]
        return (
            devices,
            "gloo",
            f"{ranks_text(ranks)} share {gpus} CUDA device(s), DDP over Gloo",
        )
    sentence = (
        f"{ranks_text(ranks)} on {cores()} CPU cores, DDP over Gloo; "
        f"threads: {threads_of(ranks)} a rank"
    )
    if gpus:
        sentence += f"\n(for {gpus} CUDA device(s): --ranks {gpus}, or --device cuda to share)"
    return ["cpu"] * ranks, "gloo", sentence


def run_on_ranks(
    plan: Plan,
    settings: list[Setting],
    source: Source,
    case: Case | None,
    devices: list[str],
    backend: str,
) -> tuple[dict[str, Run], list[dict[str, torch.Tensor]]]:
    """Starts the ranks; (runs by key, the layer's results on every rank)."""
    with tempfile.TemporaryDirectory(prefix="syncbn-demo-") as name:
        folder = Path(name)
        # Through a file: as arguments, tensors would need room in shared memory.
        torch.save(Job(plan, settings, source, case, devices, backend), folder / "job.pt")
        context = mp.start_processes(
            _rank_main, (folder,), plan.ranks, join=False, daemon=True, start_method="spawn"
        )
        try:
            # join() returns after every process that ends; when one fails it ends the others.
            while not context.join():
                pass
        except mp.ProcessRaisedException as error:
            raise RankFailed(f"rank {error.error_index} failed\n{error.msg}") from None
        except mp.ProcessExitedException as error:
            raise RankFailed(f"rank {error.error_index} died: {error.msg}") from None
        runs = {
            setting.key: torch.load(folder / f"run_{setting.key}.pt", weights_only=False)
            for setting in settings
        }
        parts = []
        if case is not None:
            parts = [torch.load(folder / f"bits_{rank}.pt") for rank in range(plan.ranks)]
        return runs, parts


def _share_cores(rank: int, ranks: int) -> None:
    """Threads for this rank; where cores are fewer than ranks, one core for each in turn.

    Left to the scheduler, ranks that wait for each other on too few cores lose milliseconds in
    every exchange to threads that wake up on the wrong core.
    """
    available = cores()
    torch.set_num_threads(threads_of(ranks))
    if available < ranks and hasattr(os, "sched_setaffinity"):
        mine = sorted(os.sched_getaffinity(0))[rank % available]
        os.sched_setaffinity(0, {mine})


def _rank_main(rank: int, folder: Path) -> None:
    """One rank, in a process of its own; its results go to files in the folder."""
    job: Job = torch.load(folder / "job.pt", weights_only=False)
    tqdm.set_lock(threading.RLock())  # its own leaks a semaphore if this process is ended
    _share_cores(rank, job.plan.ranks)
    device = torch.device(job.devices[rank])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        job.backend,
        init_method=(folder / "store").as_uri(),
        rank=rank,
        world_size=job.plan.ranks,
        timeout=_TIMEOUT,
    )
    if job.case is not None:
        share = job.plan.batch_per_rank
        torch.save(run_layer(job.case, rank * share, share, device), folder / f"bits_{rank}.pt")
    for setting in job.settings:
        plan = setting.plan or job.plan
        run = train(setting, plan, job.source, Place(rank, plan.ranks, device))
        fingerprints = [""] * plan.ranks
        dist.all_gather_object(fingerprints, run.fingerprint)
        run.models = len(set(fingerprints))
        if rank == 0:
            torch.save(run, folder / f"run_{setting.key}.pt")
    dist.destroy_process_group()
