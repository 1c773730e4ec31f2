# SPDX-License-Identifier: Apache-2.0
"""Two to four hosts with different numbers of ranks: the bits are those of one process. What a step
takes with each engine is written to build/hosts.json."""

import json
import tempfile
from pathlib import Path

import pytest

import host_cases
import host_link
import syncbn
from host_cases import LIMIT
from hosts import TWO_LEVELS, Hosts

WHY_NOT = host_link.why_not()
pytestmark = [
    pytest.mark.weekly,
    pytest.mark.skipif(bool(WHY_NOT), reason=f"hosts: {WHY_NOT}"),
]

TABLE = Path(__file__).parents[3] / "build" / "hosts.json"
CHANNELS, STEPS = 256, 100
#: Ranks of each host, and the engine. Where each rank is alone on its host, nobody shares memory.
CASES = {
    (4, 2): TWO_LEVELS,
    (2, 2, 2): TWO_LEVELS,
    (3, 2, 1): TWO_LEVELS,
    (2, 2, 1, 1): TWO_LEVELS,
    (1, 1, 1): "gloo between nodes",
}


@pytest.mark.parametrize("ranks", CASES, ids=str)
def test_bits_engine_and_time(ranks):
    with tempfile.TemporaryDirectory() as folder:
        hosts = Hosts(folder, range(len(ranks)), ranks)
        try:
            assert hosts.do("make", LIMIT, seconds=240) == [CASES[ranks]] * sum(ranks)
            hosts.check_steps(0, 5, syncbn.SyncBatchNorm(host_cases.CHANNELS))
            times = {}
            for asked, engine in (("auto", CASES[ranks]), ("process_group", "gloo")):
                hosts.begin("time", asked, CHANNELS, STEPS)
                answers = [result["outcome"] for result in hosts.end(120)]
                assert [answer[0] for answer in answers] == [engine] * sum(ranks)
                times[engine] = round(max(answer[1] for answer in answers), 2)
        finally:
            hosts.close()
    TABLE.parent.mkdir(exist_ok=True)
    rows = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    rows["+".join(map(str, ranks))] = times
    TABLE.write_text(json.dumps(rows, indent=1) + "\n")
