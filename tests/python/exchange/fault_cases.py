# SPDX-License-Identifier: Apache-2.0
"""What goes wrong on one rank, and what each rank must see; run by test_faults.py.

A scenario is a function scenario_*(run) that acts as this rank; it returns nothing if this rank is
meant to come through, and must raise otherwise. EXPECTED says, per scenario, what the odd rank (the
last one) and the others end with: an error's name, or "passed".
"""

import datetime
import os
import signal
import time

import torch
import torch.distributed as dist
from torch import nn

import syncbn
from support import raises, unchanged

TIMEOUT = 2.0


class Run:
    """One rank: a model of two layers, and which rank is the odd one."""

    def __init__(self, rank: int, world: int, **convert) -> None:
        self.rank, self.world = rank, world
        self.odd = rank == world - 1
        torch.manual_seed(rank)
        model = nn.ModuleDict({"stem": nn.BatchNorm1d(4), "head": nn.BatchNorm1d(4)})
        self.model = syncbn.convert_sync_batchnorm(model, timeout=TIMEOUT, **convert)
        self.step()  # call 0 of both layers

    def x(self) -> torch.Tensor:
        return torch.randn(3, 4, requires_grad=True)

    def step(self) -> None:
        y = self.model["head"](self.model["stem"](self.x()))
        y.square().sum().backward()

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def scenario_skips_a_layer(run):
    y = run.x() if run.odd else run.model["stem"](run.x())
    run.model["head"](y)


def scenario_other_order(run):
    names = ("head", "stem") if run.odd else ("stem", "head")
    run.model[names[0]](run.x())


def scenario_eval_mode(run):
    run.model.train(not run.odd)
    run.model["stem"](run.x())
    time.sleep(TIMEOUT + 2 if run.odd else 0)


def scenario_raises_before_the_layer(run):
    if run.odd:
        raise KeyError("the data loader's own error")
    run.model["stem"](run.x())


def scenario_killed_in_forward(run):
    if run.odd:
        run.die()
    run.model["stem"](run.x())


def scenario_killed_between_forward_and_backward(run):
    y = run.model["stem"](run.x())
    if run.odd:
        run.die()
    y.sum().backward()


def scenario_stopped_beyond_the_limit(run):
    if run.odd:
        # Somebody else wakes this rank up again; its peers have given up by then.
        if os.fork() == 0:
            time.sleep(TIMEOUT + 2)
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)
    run.model["stem"](run.x())


def scenario_slow_within_the_limit(run):
    time.sleep(TIMEOUT / 2 if run.odd else 0)
    run.step()


def scenario_runs_backward_alone(run):
    y = run.model["stem"](run.x())
    if run.odd:
        y.sum().backward()
    else:
        run.model["head"](run.x())


def scenario_an_extra_call_at_the_end(run):
    run.step()
    if run.odd:
        run.model["stem"](run.x())
    time.sleep(0 if run.odd else TIMEOUT + 2)


def scenario_goes_on_after_reset(run):
    if run.odd:
        time.sleep(TIMEOUT + 1)
    raises((syncbn.ExchangeTimeout, syncbn.PeerLost), "", run.model["stem"], run.x())
    before = {k: v.clone() for k, v in run.model.state_dict().items()}
    raises(syncbn.PeerLost, "reset_groups", run.model["stem"], run.x())
    unchanged(run.model, before)
    syncbn.reset_groups(run.model)
    run.step()
    values = [torch.empty_like(run.model["head"].running_mean) for _ in range(run.world)]
    dist.all_gather(values, run.model["head"].running_mean)
    assert all(torch.equal(v, values[0]) for v in values)


def scenario_killed_in_join(run):
    """While the others have no inputs left. torch's Join waits for the group's own limit, or for
    Gloo to notice that the connection is closed, and names nobody."""
    with syncbn.join(run.model["stem"], run.model["head"]):
        if run.odd:
            run.step()
            run.die()


def scenario_late_in_join(run):
    with syncbn.join(run.model["stem"], run.model["head"]):
        if run.odd:
            run.step()
            time.sleep(TIMEOUT + 2)


def _limited_by_its_group(run, limit) -> None:
    group = dist.new_group(timeout=limit)
    syncbn.convert_sync_batchnorm(run.model, group)
    syncbn.set_group(run.model, group)  # without a timeout: the group's
    run.step()
    dist.barrier()


def scenario_killed_between_under_a_limit_of_hours(run):
    """In the middle of the ranks, which know each other through a ring."""
    _limited_by_its_group(run, datetime.timedelta(hours=2))
    y = run.model["stem"](run.x())
    if run.odd:
        run.die()
    time.sleep(1 if run.rank == 0 else 0)
    y.sum().backward()


def scenario_late_for_a_group_of_a_short_limit(run):
    _limited_by_its_group(run, datetime.timedelta(seconds=TIMEOUT))
    if run.odd:
        time.sleep(TIMEOUT + 2)
    run.model["stem"](run.x())


DIVERGED, TIMED_OUT, LOST = "DivergenceError", "ExchangeTimeout", "PeerLost"
GONE = (TIMED_OUT, LOST)

#: scenario: (what the odd rank ends with, what the others end with)
EXPECTED = {
    "skips_a_layer": (DIVERGED, DIVERGED),
    "other_order": (DIVERGED, DIVERGED),
    "eval_mode": ("passed", TIMED_OUT),
    "raises_before_the_layer": ("KeyError", GONE),
    "killed_in_forward": ("killed", GONE),
    "killed_between_forward_and_backward": ("killed", GONE),
    "stopped_beyond_the_limit": (GONE, TIMED_OUT),
    "slow_within_the_limit": ("passed", "passed"),
    "runs_backward_alone": (DIVERGED, DIVERGED),
    "an_extra_call_at_the_end": (TIMED_OUT, "passed"),
    "goes_on_after_reset": ("passed", "passed"),
    "killed_in_join": ("killed", GONE),
    "late_in_join": (GONE, TIMED_OUT),
    "killed_between_under_a_limit_of_hours": ("killed", LOST),
    "late_for_a_group_of_a_short_limit": (GONE, TIMED_OUT),
}

#: scenario: what the text of an error names besides the layer's path, this rank and the ranks.
NAMES = {
    "skips_a_layer": "layer: stem on .*, head on rank",
    "other_order": "layer: stem on .*, head on rank",
    "eval_mode": "in no exchange; its last was stem, call 0, backward",
    "killed_in_forward": "does not answer",
    "killed_between_forward_and_backward": "does not answer",
    "runs_backward_alone": "stem, call 1, backward.*|head, call 1, forward",
    "killed_in_join": "no more inputs.*does not answer",
    "late_in_join": "syncbn.join, call 2, no more inputs",
    "an_extra_call_at_the_end": "in no exchange; its last was stem, call 1, backward",
}
