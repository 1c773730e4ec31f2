# SPDX-License-Identifier: Apache-2.0
"""The cases of test_distributed.py over Gloo: a file of its own, which runs beside that one."""

import pytest

from rank_runs import check_case
from test_distributed import cases_over, results_over

results = results_over("gloo", 3)


@pytest.mark.parametrize("case", cases_over("gloo"))
def test_ranks(results, case):
    check_case(results, case)
