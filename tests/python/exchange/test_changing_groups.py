# SPDX-License-Identifier: Apache-2.0
"""Groups that change in place (`reconfigure` of PyTorch 2.14 and later): processes join, leave,
change places and are killed, and each step has the bits of one process over the samples of those
that take part.

By default 30 rounds of 3 replicas. SYNCBN_CHANGES=300 plays more, from SYNCBN_SEED.
"""

import datetime
import os
import pickle
import time

import pytest
import torch.distributed as dist

from changing_rank import draw, main
from rank_runs import new_store, quick_context

pytestmark = pytest.mark.skipif(
    not hasattr(dist.ProcessGroup, "reconfigure"), reason="PyTorch 2.14 brought reconfigure"
)
ROUNDS = int(os.environ.get("SYNCBN_CHANGES", "30"))
SEED = int(os.environ.get("SYNCBN_SEED", "1"))


@pytest.mark.parametrize("slots", (2, 3))
def test_processes_join_leave_and_are_killed(slots):
    store = new_store()
    rounds = draw(SEED, ROUNDS, slots)
    context = quick_context()
    processes = {}

    def start(process: int) -> None:
        if process not in processes:
            arguments = (process, store.port, rounds)
            processes[process] = context.Process(target=main, args=arguments, daemon=True)
            processes[process].start()

    for process in range(slots):
        start(process)
    slowest = 0.0
    try:
        for now in rounds:
            for process in now.members:
                start(process)
            began = time.monotonic()
            store.set(f"begin {now.number}", "")
            for process in now.members:
                if now.killed is not None and process == now.killed[0]:
                    processes[process].join(60)
                    assert processes[process].exitcode == -9, now
                    start(max(processes) + 1)  # which takes its place
                    continue
                key = f"came {now.number} {process}"
                store.wait([key], datetime.timedelta(seconds=90))
                errors = pickle.loads(store.get(key))
                assert len(errors) == (now.killed is not None), (now, process, errors)
                for error in errors:
                    lost = now.members.index(now.killed[0])
                    own = now.members.index(process)
                    assert f"rank {own} of {len(now.members)}" in error, (now, error)
                    assert f"rank {lost}" in error, (now, error)
            slowest = max(slowest, time.monotonic() - began)
    finally:
        for one in processes.values():
            one.kill()
    print(f"{ROUNDS} rounds of {slots} replicas; the slowest took {slowest:.1f} s")
