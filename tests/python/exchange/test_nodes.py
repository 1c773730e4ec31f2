# SPDX-License-Identifier: Apache-2.0
"""Ranks on two nodes, simulated on one machine: four processes that are told which node they are
on exchange through shared memory inside a node and over Gloo between them. node_cases.py has what
they run."""

import faulthandler
import gc
import json
import os
import signal
import tempfile
import time
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import node_cases
import syncbn
from rank_runs import join_group, new_store, outcome_of, quick_context, run_ranks, run_written
from syncbn.exchange import failing

WORLD = 4
CASES = {n: case for n, case in vars(node_cases).items() if n.startswith("case_")}
RUNS = [(layout, case) for layout in node_cases.LAYOUTS for case in CASES]
#: What a layout changes. The rest runs where one node has several ranks and another has one.
PLACES = ("case_report", "case_bits", "case_uneven", "case_layers_wider", "case_one_rank_that")
WEEKLY = [run for run in RUNS if run[0] != "uneven" and not run[1].startswith(PLACES)]
#: Seconds that an exchange waits in the runs that lose a rank.
TIMEOUT = 3.0


def _case_main(rank: int, port: int, folder: str, runs: list) -> None:
    join_group(rank, WORLD, port, 30)
    gc.collect()
    gc.freeze()  # as in rank_runs.py
    placed = None
    with open(f"{folder}/hangs.{rank}.txt", "w") as traces:
        for layout, case in runs:
            faulthandler.dump_traceback_later(100, exit=True, file=traces)
            if placed != layout:
                node_cases.place(node_cases.LAYOUTS[layout], rank)
                placed = layout
            try:
                CASES[case](rank, WORLD)
                outcome = "passed"
            except BaseException:
                outcome = traceback.format_exc()
            Path(folder, f"{layout}.{case}.{rank}.txt").write_text(outcome)
            dist.barrier()
        faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()


def _lost_main(rank: int, port: int, layout: str, lost: int, folder: str) -> None:
    """A step, and one in which rank `lost` is killed between forward and backward."""
    failing.INTERVAL = 0.3
    node_cases.place(node_cases.LAYOUTS[layout], rank)
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
def results(context, request):
    """{"layout.case.rank": "passed" or a traceback}; all chosen cases in one start of the
    processes."""
    ours = [i.callspec.params for i in request.session.items if i.path == request.path]
    runs = [(found["layout"], found["case"]) for found in ours if "case" in found]
    store = new_store()
    with tempfile.TemporaryDirectory() as folder:
        codes = run_ranks(context, _case_main, WORLD, (store.port, folder, runs), 480)
        found = {path.stem: path.read_text() for path in Path(folder).glob("*.txt")}
    return found | {"exit codes": codes}


@pytest.mark.parametrize(
    ("layout", "case"),
    [pytest.param(*run, marks=pytest.mark.weekly if run in WEEKLY else ()) for run in RUNS],
)
def test_two_nodes(results, layout, case):
    for rank in range(WORLD):
        outcome = results.get(f"{layout}.{case}.{rank}", "no result")
        assert outcome == "passed", (
            f"rank {rank}: {outcome}; exit codes {results['exit codes']}\n"
            f"{results.get(f'hangs.{rank}', '')}"
        )


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
