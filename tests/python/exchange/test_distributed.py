# SPDX-License-Identifier: Apache-2.0
"""Real processes, started once, run the cases of the modules rank_cases*.py and device_cases.py:
here and in test_distributed_above.py 2 ranks over shared memory, in test_distributed_gloo.py 3
ranks over Gloo alone. Files run side by side. Cases that any engine serves alike run over one of
them, over the other in the weekly run. SYNCBN_WORLDS, for example "2 3", takes other numbers."""

import functools
import importlib
import os
from collections.abc import Callable

import pytest

from rank_runs import Cases, check_case, run_cases
from support import PROJECT

FILES = (PROJECT / "tests" / "python").glob("*/rank_cases*.py")
MODULES = ("device_cases", *sorted(path.stem for path in FILES))
CASES = {
    name: (module, case)
    for module in MODULES
    for name, case in vars(importlib.import_module(module)).items()
    if name.startswith("case_")
}
#: Cases of what stands above the exchange. Joins are with three ranks, of which two remain.
ALIKE = {
    "shared memory": (
        *("rank_cases_check", "rank_cases_checkpoint", "rank_cases_compile", "rank_cases_convert"),
        *("rank_cases_drop_in", "rank_cases_dtensor", "rank_cases_float_modes", "rank_cases_fsdp"),
        *("rank_cases_malformed", "rank_cases_mask", "rank_cases_parallel", "rank_cases_patched"),
        *("rank_cases_paths", "rank_cases_processes", "rank_cases_second", "rank_cases_state"),
        *("rank_cases_streaming", "rank_cases_tensors"),
    ),
    "gloo": ("device_cases", "rank_cases_join", "rank_cases_join_errors", "rank_cases_op"),
}
#: A first compilation by inductor costs half a minute.
SLOW = ("case_inductor_exact",)


def cases_over(engine: str, chosen: Callable[[str], bool] = lambda module: True) -> list:
    """Parameters, of the chosen modules: those that the other engine runs are weekly."""
    others = {module for name, modules in ALIKE.items() if name != engine for module in modules}
    return [
        pytest.param(name, marks=pytest.mark.weekly if module in others or name in SLOW else ())
        for name, (module, _) in CASES.items()
        if chosen(module)
    ]


def load(names: frozenset[str]) -> Cases:
    return {name: case for name, (_, case) in CASES.items() if name in names}


def results_over(engine: str, world: int):
    """A fixture. The processes run the cases that were chosen on the command line."""
    worlds = [int(word) for word in os.environ.get("SYNCBN_WORLDS", str(world)).split()]

    @pytest.fixture(scope="module", params=worlds, ids=lambda world: f"{world} ranks, {engine}")
    def results(request, tmp_path_factory):
        items = [item for item in request.session.items if item.path == request.path]
        names = frozenset(item.callspec.params["case"] for item in items)
        folder = tmp_path_factory.mktemp("ranks")
        return run_cases(functools.partial(load, names), request.param, engine, folder)

    return results


def is_above(module: str) -> bool:
    return module in ALIKE["shared memory"]


results = results_over("shared memory", 2)


@pytest.mark.parametrize("case", cases_over("shared memory", lambda module: not is_above(module)))
def test_ranks(results, case):
    check_case(results, case)
