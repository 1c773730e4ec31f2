# SPDX-License-Identifier: Apache-2.0
"""Training loops of other libraries, whole, on two ranks with this package's layer: they end with
what one process with plain batch norm has (training_loops.py). `make interop` runs them on one rank
with the layer, too, as some libraries train on several ranks with GPUs only."""

import functools
import os

import pytest
import torch

from rank_runs import check_case, run_cases
from training_loops import LOOPS, cases

ALL = bool(os.environ.get("SYNCBN_INTEROP"))
RUNS = {1: ("plain", "synchronized") if ALL else ("plain",), 2: ("synchronized",)}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Of each number of ranks, and the folder with the tensors that they end with."""
    folder = tmp_path_factory.mktemp("tensors")
    outcomes = {
        world: run_cases(
            functools.partial(cases, folder, kinds),
            world,
            "shared memory",
            tmp_path_factory.mktemp("ranks"),
        )
        for world, kinds in RUNS.items()
    }
    return outcomes, folder


@pytest.mark.parametrize("world", RUNS if ALL else (2,), ids=lambda world: f"{world} ranks")
@pytest.mark.parametrize("name", LOOPS)
def test_loop(results, name, world):
    """In float64, n terms in another order: 2^-53 each, through 3 steps of a deep network; 1e-9
    leaves room for 10^7 such roundings."""
    outcomes, folder = results
    for count, kinds in RUNS.items():
        for kind in kinds:
            if count in (1, world):
                check_case(outcomes[count], f"{name} {kind}")
    expected = torch.load(folder / f"{name}.plain.1.0.pt")
    for rank in range(world):
        state = torch.load(folder / f"{name}.synchronized.{world}.{rank}.pt")
        assert list(state) == list(expected)
        for key, value in expected.items():
            torch.testing.assert_close(state[key], value, rtol=1e-9, atol=1e-9, msg=key)
