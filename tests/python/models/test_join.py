# SPDX-License-Identifier: Apache-2.0
"""syncbn.join without a process group, and an error of one rank, wherever its loop is
(join_fault_cases.py). The rest: rank_cases_join*.py, fault_cases.py."""

import json
import os
import time
from pathlib import Path

import pytest
import torch

import join_fault_cases
import syncbn
from rank_runs import ENGINES, join_group, outcome_of, run_all, run_written
from support import assert_same_layers, new_layer

#: Seconds from the error to the last rank's, with what two busy cores need. The group's limit is
#: ten minutes.
IN_TIME = 12
#: A run has one place, counts by turns, both engines by turns.
COUNTS = tuple(join_fault_cases.COUNTS)
RUNS = [
    (place, COUNTS[(i + 1) % len(COUNTS)], ENGINES[i // 2 % 2], "ddp")
    for i, place in enumerate(join_fault_cases.PLACES)
    if place not in ("between models", "local step")
]
RUNS += [
    ("loss", "others have ended", "gloo", "ddp"),
    ("end of backward", "middle one", "gloo", "ddp"),
    ("layer", "all go on", "shared memory", "ddp"),
    ("layer", "first of two", "shared memory", "ddp"),
    ("one value", "others have ended", "shared memory", "ddp"),
    ("one value", "others have ended", "gloo", "plain"),
    ("between models", "others have ended", "shared memory", "two"),
    ("between models", "middle one", "gloo", "two"),
    ("local step", "first of two", "shared memory", "zero"),
    ("local step", "others have ended", "gloo", "zero"),
    ("optimizer", "all go on", "gloo", "zero"),
    ("loss", "others have ended", "shared memory", "wrapped"),
    ("forward", "all go on", "shared memory", "wrapped"),
    ("loader", "all go on", "gloo", "slow"),
    ("loader", "middle one", "shared memory", "slow"),
    ("forward", "all go on", "gloo", "plain"),
    ("forward", "first of two", "gloo", "plain"),
    ("forward", "all go on", "shared memory", "own limit"),
    ("forward", "middle one", "gloo", "own limit"),
]
OPTIONS = {
    "ddp": {},
    "plain": {"ddp": False},
    "two": {"models": 2},
    "zero": {"zero": True},
    "wrapped": {"wraps": True},
    "slow": {"pause": 7},
    "own limit": {"timeout": 500},
}


def test_nothing_to_join_without_a_process_group():
    joined, plain = new_layer(4), new_layer(4)
    x = torch.randn(5, 4)
    with syncbn.join(joined):
        joined(x).square().sum().backward()
    plain(x).square().sum().backward()
    assert_same_layers(joined, plain)
    assert not joined._forward_pre_hooks


def _rank_main(rank: int, engine: str, place: str, counts: str, kind: str, folder: str) -> None:
    join_group(rank, 3, f"{folder}/store", 600, engine=engine)
    loop = join_fault_cases.Loop(rank, counts, place, **OPTIONS[kind])
    result = outcome_of(loop.run)
    Path(folder, f"{rank}.json").write_text(json.dumps(result))
    until = time.monotonic() + 40
    while len(list(Path(folder).glob("*.json"))) < 3 and time.monotonic() < until:
        time.sleep(0.1)  # the end of a process would tell the others
    os._exit(0)


def _run(context, place: str, counts: str, engine: str, kind: str) -> dict:
    return run_written(context, _rank_main, 3, engine, place, counts, kind)


@pytest.fixture(scope="module")
def outcomes(request):
    items = [item for item in request.session.items if item.path == request.path]
    return run_all(_run, [i.callspec.params["run"] for i in items if hasattr(i, "callspec")])


@pytest.mark.parametrize("run", RUNS, ids="-".join)
def test_error_in_join(outcomes, run):
    place, counts, _, kind = run
    odd = join_fault_cases.COUNTS[counts][0]
    own = "ValueError" if place in ("layer", "one value") else "KeyError"
    for rank, result in outcomes[run].items():
        assert result is not None, f"rank {rank} hangs or died; {outcomes[run]}"
        assert result["seconds"] < IN_TIME + OPTIONS[kind].get("pause", 0), outcomes[run]
        if rank == odd:
            assert result["outcome"] == own, result
            continue
        assert result["outcome"] in ("DivergenceError", "PeerLost"), result
        assert f"rank {odd}" in result["text"] and own in result["text"], result
