# SPDX-License-Identifier: Apache-2.0
"""Ranks on two nodes, simulated on one machine: four processes that are told which node they are
on exchange through shared memory inside a node and over Gloo between them. node_cases.py has what
they run."""

import functools
import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import node_cases
import syncbn
from rank_runs import (
    Cases,
    check_case,
    join_group,
    new_store,
    outcome_of,
    quick_context,
    run_cases,
    run_written,
)
from syncbn.exchange import failing

WORLD = 4
CASES = {n: case for n, case in vars(node_cases).items() if n.startswith("case_")}
RUNS = [(layout, case) for layout in node_cases.LAYOUTS for case in CASES]
#: What a layout changes. The rest runs where one node has several ranks and another has one; what
#: ranks of one node have alike, or PyTorch compiles, in the weekly run.
PLACES = ("case_report", "case_bits", "case_uneven", "case_one_rank_that")
ALIKE = ("case_bad_input", "case_compiled_wide")
WEEKLY = [
    run
    for run in RUNS
    if run[1].startswith(ALIKE) or (run[0] != "uneven" and not run[1].startswith(PLACES))
]
#: Seconds that an exchange waits in the runs that lose a rank.
TIMEOUT = 3.0


def load(runs: list) -> Cases:
    cases: Cases = {}
    for layout, case in runs:
        cases[f"{layout}.place"] = functools.partial(node_cases.place, node_cases.LAYOUTS[layout])
        cases[f"{layout}.{case}"] = CASES[case]
    return cases


def _lost_main(rank: int, port: int, layout: str, lost: int, folder: str) -> None:
    """A step, and one in which rank `lost` is killed between forward and backward."""
    failing.INTERVAL = 0.3
    node_cases.place(node_cases.LAYOUTS[layout], rank, WORLD)
    join_group(rank, WORLD, port, 30)
    layer = syncbn.SyncBatchNorm(4, timeout=TIMEOUT)
    layer(torch.randn(3, 4, requires_grad=True)).sum().backward()
    assert syncbn.report(layer)[0].engine == node_cases.BETWEEN_NODES
    y = layer(torch.randn(3, 4, requires_grad=True))
    dist.barrier()
    if rank == lost:
        os.kill(os.getpid(), signal.SIGKILL)
    result = outcome_of(lambda: y.sum().backward())
    Path(folder, f"{rank}.json").write_text(json.dumps(result))
    # The others may still ask where this rank is, and its end would be a fault of its own.
    time.sleep(TIMEOUT)
    os._exit(0)


@pytest.fixture(scope="module")
def context():
    return quick_context()


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    """All chosen cases in one start of the processes."""
    ours = [i.callspec.params for i in request.session.items if i.path == request.path]
    runs = [(found["layout"], found["case"]) for found in ours if "case" in found]
    chosen = functools.partial(load, runs)
    return run_cases(chosen, WORLD, "shared memory", tmp_path_factory.mktemp("nodes"), 100)


@pytest.mark.parametrize(
    ("layout", "case"),
    [pytest.param(*run, marks=pytest.mark.weekly if run in WEEKLY else ()) for run in RUNS],
)
def test_two_nodes(results, layout, case):
    check_case(results, f"{layout}.{case}")


@pytest.mark.parametrize(
    ("layout", "lost"),
    [("in blocks", 0), ("interleaved", 3), ("uneven", 1), ("uneven", 3)],
    ids=lambda value: str(value),
)
def test_a_killed_rank_ends_all_others_in_time(context, layout, lost):
    """Ranks 0 and, alone on its node in the uneven layout, 3 speak for their nodes."""
    store = new_store()
    results = run_written(context, _lost_main, WORLD, store.port, layout, lost)
    assert results.pop(lost) is None
    for rank, result in results.items():
        assert result is not None, f"rank {rank} hangs or died"
        assert result["outcome"] in ("PeerLost", "ExchangeTimeout"), f"rank {rank}: {result}"
        # Two waits, inside the node and between nodes; the question where the others are; and what
        # two busy cores need.
        assert result["seconds"] < TIMEOUT + 12, f"rank {rank}: {result}"
        assert f"rank {lost}: does not answer" in result["text"], f"rank {rank}: {result}"
