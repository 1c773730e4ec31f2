"""Real processes over shared memory: 2 and 3 ranks, started once each, run every case of the
modules rank_cases*.py and device_cases.py. test_distributed_gloo.py: over Gloo alone."""

import importlib

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


def results_over(engine: str):
    """A fixture."""

    @pytest.fixture(scope="module", params=(2, 3), ids=lambda world: f"{world} ranks, {engine}")
    def results(request, tmp_path_factory):
        return run_cases(all_cases, request.param, engine, tmp_path_factory.mktemp("ranks"))

    return results


results = results_over("shared memory")


@pytest.mark.parametrize("case", CASES)
def test_ranks(results, case):
    check_case(results, case)
