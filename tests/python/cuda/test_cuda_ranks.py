# SPDX-License-Identifier: Apache-2.0
"""Two processes with CUDA tensors, over NCCL and over Gloo; on one GPU where there is no other.
torch.nn.SyncBatchNorm has the bits of no other number of ranks."""

import functools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import cuda_cases
from rank_pairs import END, START, WORLD, check, join_group, run_cases, run_here

CASES = {name: case for name, case in vars(cuda_cases).items() if name.startswith("case_")}


def _rank_main(rank: int, names: list[str], folder: Path, backend: str) -> None:
    cases = {name: functools.partial(case, rank, WORLD) for name, case in CASES.items()}
    cases[START] = functools.partial(join_group, rank, backend, folder)
    run_here(cases | {END: dist.destroy_process_group}, names, rank, folder)


@pytest.fixture(scope="module", params=("nccl", "gloo"))
def results(request, tmp_path_factory):
    """{case: [one outcome per rank]}."""
    return run_cases(_rank_main, list(CASES), tmp_path_factory.mktemp("ranks"), (request.param,))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", (*CASES, END))
def test_on_two_ranks(results, name):
    check(results.get(name, ["no pair came to its end"]))
