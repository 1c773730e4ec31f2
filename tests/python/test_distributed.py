"""Real processes, over shared memory and over Gloo alone: 2 and 3 ranks, started once each, run
every case of the modules rank_cases*.py and device_cases.py."""

import importlib
from pathlib import Path

import pytest

from rank_runs import Cases, check_case, run_cases

MODULES = ("device_cases", *sorted(p.stem for p in Path(__file__).parent.glob("rank_cases*.py")))
CASES = {
    name: case
    for module in map(importlib.import_module, MODULES)
    for name, case in vars(module).items()
    if name.startswith("case_")
}


def all_cases() -> Cases:
    return CASES


RUNS = [(world, engine) for engine in ("shared memory", "gloo") for world in (2, 3)]


@pytest.fixture(scope="module", params=RUNS, ids=lambda run: f"{run[0]} ranks, {run[1]}")
def results(request, tmp_path_factory):
    return run_cases(all_cases, *request.param, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", CASES)
def test_ranks(results, case):
    check_case(results, case)
