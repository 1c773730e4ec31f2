"""Real processes, started once, run every case of the modules rank_cases*.py and device_cases.py:
here 2 ranks over shared memory, in test_distributed_gloo.py 3 ranks over Gloo alone. SYNCBN_WORLDS,
for example "2 3", takes other numbers of ranks for both, as the weekly run does."""

import importlib
import os

import pytest

from rank_runs import Cases, check_case, run_cases
from support import PROJECT

FILES = (PROJECT / "tests" / "python").glob("*/rank_cases*.py")
MODULES = ("device_cases", *sorted(path.stem for path in FILES))
CASES = {
    name: case
    for module in map(importlib.import_module, MODULES)
    for name, case in vars(module).items()
    if name.startswith("case_")
}


def all_cases() -> Cases:
    return CASES


def results_over(engine: str, world: int):
    """A fixture."""
    worlds = [int(word) for word in os.environ.get("SYNCBN_WORLDS", str(world)).split()]

    @pytest.fixture(scope="module", params=worlds, ids=lambda world: f"{world} ranks, {engine}")
    def results(request, tmp_path_factory):
        return run_cases(all_cases, request.param, engine, tmp_path_factory.mktemp("ranks"))

    return results


results = results_over("shared memory", 2)


@pytest.mark.parametrize("case", CASES)
def test_ranks(results, case):
    check_case(results, case)
