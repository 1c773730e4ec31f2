"""Two processes with CUDA tensors, over NCCL and over Gloo; on one GPU where there is no other.
torch.nn.SyncBatchNorm has the bits of no other number of ranks."""

import datetime
import os
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import cuda_cases
from rank_runs import free_port, run_ranks
from test_cuda_processes import NCCL_ON_ONE_MACHINE

CASES = {name: case for name, case in vars(cuda_cases).items() if name.startswith("case_")}
TIMEOUT = datetime.timedelta(seconds=60)
WORLD = 2


def _rank_main(rank: int, backend: str, port: int, folder: Path) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), **NCCL_ON_ONE_MACHINE)
    if torch.cuda.device_count() < WORLD:
        os.environ["NCCL_HOSTID"] = f"host{rank}"  # else NCCL refuses two ranks on one GPU
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(backend, rank=rank, world_size=WORLD, timeout=TIMEOUT)
    for name, case in CASES.items():
        try:
            case(rank, WORLD)
            outcome = "passed"
        except BaseException:
            outcome = traceback.format_exc()
        (folder / f"{name}.{rank}").write_text(outcome)
        dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=("nccl", "gloo"))
def results(request, tmp_path_factory):
    """{case: [one outcome per rank]}."""
    folder = tmp_path_factory.mktemp("ranks")
    arguments = (request.param, free_port(), folder)
    run_ranks(mp.get_context("spawn"), _rank_main, WORLD, arguments, 90)
    paths = {name: [folder / f"{name}.{rank}" for rank in range(WORLD)] for name in CASES}
    return {
        name: [p.read_text() if p.exists() else "did not end" for p in outcomes]
        for name, outcomes in paths.items()
    }


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", CASES)
def test_on_two_ranks(results, name):
    for rank, outcome in enumerate(results[name]):
        assert outcome == "passed", f"rank {rank}:\n{outcome}"
