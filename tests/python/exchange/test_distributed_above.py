# SPDX-License-Identifier: Apache-2.0
"""The cases of test_distributed.py of what stands above the exchange."""

import pytest

from rank_runs import check_case
from test_distributed import cases_over, is_above, results_over

results = results_over("shared memory", 2)


@pytest.mark.parametrize("case", cases_over("shared memory", is_above))
def test_ranks(results, case):
    check_case(results, case)
