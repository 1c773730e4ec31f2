# SPDX-License-Identifier: Apache-2.0
"""What goes wrong while a group is made, and what each rank must see; run by test_forming.py.

A scenario is a function scenario_*(run) that acts as this rank. EXPECTED says what the odd rank
(the last one) and the others end with, NAMES what an error's text has.
"""

import contextlib
import os
import resource
import signal
import time

import torch
import torch.distributed as dist
from torch import nn

import syncbn
from support import raises
from syncbn.exchange import meeting

#: Seconds of the process group, and so of making a group.
LIMIT = 3.0


class Run:
    """One rank. direct: of layers that are made, not converted."""

    def __init__(self, rank: int, world: int, group: dist.ProcessGroup, direct: bool) -> None:
        self.rank, self.world, self.group, self.direct = rank, world, group, direct
        self.odd = rank == world - 1
        self.layer: nn.Module | None = None

    def form(self, **options) -> None:
        """Converts, or makes the layer's first step."""
        if self.direct:
            self.layer = syncbn.SyncBatchNorm(4, process_group=self.group, **options)
            self.model = nn.ModuleDict({"stem": self.layer})
            self.step()
        else:
            self.model = nn.ModuleDict({"stem": nn.BatchNorm1d(4)})
            syncbn.convert_sync_batchnorm(self.model, self.group, **options)
            self.layer = self.model["stem"]

    def step(self) -> None:
        self.layer(torch.randn(3, 4, requires_grad=True)).sum().backward()

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def go_on(self, **options) -> None:
        """After an error on all ranks."""
        dist.barrier()
        syncbn.reset_groups()
        self.form(**options)
        self.step()
        (row,) = syncbn.report(self.layer)
        names = [None] * self.world
        dist.all_gather_object(names, self.layer.state.peers(self.layer.options()).group_name)
        assert len(set(names)) == 1 and row.ranks == self.world, names


def when_it_has_come(function) -> None:
    """Runs it in the thread that has announced this rank."""
    come = meeting._Attempt._come

    def then(attempt, stage):
        come(attempt, stage)
        function()

    meeting._Attempt._come = then


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.5)  # what it interrupts must not have ended


def scenario_late(run):
    time.sleep(LIMIT + 3 if run.odd else 0)
    run.form()


def scenario_slow_within_the_limit(run):
    time.sleep(LIMIT / 2 if run.odd else 0)
    run.form(timeout=0.5)
    run.step()
    run.step()


def scenario_killed_before(run):
    if run.odd:
        run.die()
    run.form()


def scenario_killed_when_it_has_come(run):
    if run.odd:
        when_it_has_come(run.die)
    time.sleep(1 if run.rank == 0 else 0)
    run.form()


def scenario_stopped_when_it_has_come(run):
    if run.odd:
        # Somebody else wakes this rank up again; its peers have given up by then.
        if os.fork() == 0:
            time.sleep(LIMIT + 10)
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        when_it_has_come(lambda: os.kill(os.getpid(), signal.SIGSTOP))
    run.form()


def scenario_interrupted(run):
    come = meeting._Attempt._come
    if run.odd:
        when_it_has_come(interrupt)
    try:
        run.form()
    finally:
        meeting._Attempt._come = come


def scenario_another_timeout(run):
    run.form(timeout=7 if run.odd else 5)


def scenario_another_engine(run):
    run.form(engine="process_group" if run.odd else "auto")


@contextlib.contextmanager
def no_descriptors():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def scenario_no_descriptors(run):
    syncbn.SyncBatchNorm(4, sync=False)(torch.randn(3, 4))  # PyTorch imports what it needs
    with no_descriptors() if run.odd else contextlib.nullcontext():
        run.form()


def scenario_late_by_node(run):
    time.sleep(LIMIT + 3 if run.odd else 0)
    syncbn.convert_sync_batchnorm(nn.BatchNorm1d(4), group="node")


def scenario_others_try_again(run):
    """Ranks that have failed and one that has not meet, under one name."""
    store = dist.distributed_c10d._get_default_store()
    if run.odd:
        store.wait([f"again {rank}" for rank in range(run.rank)])
        time.sleep(0.5)
    else:
        raises(syncbn.ExchangeTimeout, "", run.form)
        store.set(f"again {run.rank}", "")
    run.form()
    run.go_on()


def scenario_comes_first_after_reset(run):
    """A rank that had not come when the others gave up, as one that was interrupted before."""
    if not run.odd:
        raises(syncbn.ExchangeTimeout, "", run.form)
    dist.barrier()
    time.sleep(0 if run.odd else 1)
    syncbn.reset_groups()
    run.form()
    run.step()


def scenario_store_dies(run):
    if run.rank == 0:
        time.sleep(1)
        run.die()
    time.sleep(3 if run.odd else 0)
    run.form()


def scenario_late_after_reset(run):
    """What fails after all began anew is an error of the late rank again."""
    syncbn.reset_groups()
    scenario_late(run)


DIVERGED, TIMED_OUT, LOST = "DivergenceError", "ExchangeTimeout", "PeerLost"

#: scenario: (what the odd rank ends with, what the others end with)
EXPECTED = {
    "late": (TIMED_OUT, TIMED_OUT),
    "slow_within_the_limit": ("passed", "passed"),
    "killed_before": ("killed", TIMED_OUT),
    "killed_when_it_has_come": ("killed", LOST),
    "stopped_when_it_has_come": (TIMED_OUT, TIMED_OUT),
    "interrupted": ("KeyboardInterrupt", LOST),
    "another_timeout": (DIVERGED, DIVERGED),
    "another_engine": (DIVERGED, DIVERGED),
    "no_descriptors": (LOST, LOST),
    "late_by_node": (TIMED_OUT, TIMED_OUT),
    "others_try_again": ("passed", "passed"),
    "comes_first_after_reset": ("passed", "passed"),
    "store_dies": (LOST, LOST),
    "late_after_reset": (TIMED_OUT, TIMED_OUT),
}
#: After these all ranks go on.
GO_ON = ("late", "interrupted", "another_timeout", "another_engine", "no_descriptors")

#: scenario: what the others' text names, with {odd} for that rank
NAMES = {
    "late": "not all ranks came within 3 s; .*rank {odd}: has not come",
    "killed_before": "not all ranks came within 3 s; .*rank {odd}: has not come",
    "killed_when_it_has_come": "rank {odd} ended while the group was made; .*rank {odd}: has ended",
    "stopped_when_it_has_come": "not all ranks came within 3 s; .*rank {odd}: came, for ",
    # The group may just have been made.
    "interrupted": "rank {odd} left the group: it was interrupted|rank {odd}: does not answer",
    "another_timeout": "rank 0: .*timeout=5, .*rank {odd}: .*timeout=7, ",
    "another_engine": "rank 0: .*engine='auto'.*rank {odd}: .*engine='process_group'",
    "no_descriptors": "rank {odd} left the group: OSError: .*Too many open files",
    "late_by_node": "not all ranks came within .* s; .*rank {odd}: has not come",
    "store_dies": "the store of torch.distributed is gone",
    # The late rank does not ask the others again: they came, or have ended since.
    "late_after_reset": r"came within 3 s; .*rank \d: (has not come|has ended|came, for \w+(;|$))",
}
