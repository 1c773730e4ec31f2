# SPDX-License-Identifier: Apache-2.0
"""rank_pairs.py itself, with cases that need neither PyTorch nor a GPU."""

import functools
import os
import time
from pathlib import Path

import pytest

import rank_pairs
from rank_pairs import END, PASSED, START, Limits, run_cases, run_here


def good(rank: int) -> None:
    pass


def fails_on_one(rank: int) -> None:
    if rank == 1:
        raise ValueError("of rank 1 alone")
    time.sleep(60)  # as in an exchange that never comes to its end


def hangs(rank: int) -> None:
    time.sleep(60)


def dies_on_one(rank: int) -> None:
    if rank == 0:
        os._exit(3)


def fails_on_both(rank: int) -> None:
    raise ValueError(f"of rank {rank}")


FUNCTIONS = (good, fails_on_one, hangs, dies_on_one, fails_on_both)


def _rank_main(rank: int, names: list[str], folder: Path, start: str) -> None:
    """Of a name like "hangs 2" the first word is the function."""
    functions = {f.__name__: f for f in FUNCTIONS}
    named = {START: start, END: "good"}
    cases = {n: functools.partial(functions[named.get(n, n).split()[0]], rank) for n in names}
    run_here(cases, names, rank, folder)


def run(names: list[str], folder: Path, start: str = "good", **limits: float):
    return run_cases(_rank_main, names, folder, (start,), Limits(**limits))


@pytest.fixture(autouse=True)
def grace(monkeypatch):
    monkeypatch.setattr(rank_pairs, "GRACE", 1)


def test_case_that_fails_on_a_rank_leaves_the_others_to_a_fresh_pair(tmp_path):
    names = ["good 1", "fails_on_one", "good 2", "hangs", "dies_on_one", "fails_on_both", "good 3"]
    began = time.monotonic()
    found = run(names, tmp_path, case=1.5)
    assert time.monotonic() - began < 40
    assert list(found) == [*names, END]
    for name in ("good 1", "good 2", "good 3", END):
        assert found[name] == [PASSED] * 2, name
    first, second = found["fails_on_one"]
    assert first.startswith("ended: the other rank had failed\n") and "of rank 1 alone" in second
    for text in found["hangs"]:  # and where
        assert text.startswith("hung\n") and "in hangs" in text
    assert found["dies_on_one"] == ["exit code 3", PASSED]
    for rank, text in enumerate(found["fails_on_both"]):
        assert f"of rank {rank}" in text
    rank_pairs.check(found["good 1"])
    with pytest.raises(AssertionError, match="rank 1:\nTraceback(.|\n)*of rank 1 alone"):
        rank_pairs.check(found["fails_on_one"])


def test_group_that_cannot_be_made_is_tried_once(tmp_path):
    found = run(["good 1", "good 2"], tmp_path, start="fails_on_both")
    assert list(found) == ["good 1", "good 2"] and found["good 1"] == found["good 2"]
    assert "of rank 0" in found["good 1"][0] and len(list(tmp_path.iterdir())) == 1


def test_no_pair_is_started_when_the_time_is_over(tmp_path):
    found = run(["hangs", "good 1"], tmp_path, case=1, total=0.5)
    assert found["hangs"][0].startswith("hung")
    assert found["good 1"] == ["not run: 0.5 s are over"] * 2


def test_what_nccl_refuses_is_told_apart():
    with pytest.raises(pytest.skip.Exception, match="^not possible here: NCCL refuses two ranks"):
        rank_pairs.check(["ncclInvalidUsage: Duplicate GPU detected : rank 0 and rank 1", PASSED])
