# SPDX-License-Identifier: Apache-2.0
"""The rounds of test_fault_storm.py: what is drawn, and what must come of it."""

import os
import random
import re
import signal
from typing import NamedTuple

#: Seconds that an exchange, and the making of a group, may wait.
LIMIT = float(os.environ.get("SYNCBN_FAULT_LIMIT", "5"))
#: From a rank's last step forward to its error: the limit, connecting, the question where the
#: others are, and what two busy cores need.
IN_TIME = LIMIT + 5 + 3 + 5


class Round(NamedTuple):
    """What test_fault_storm.py draws. forming: the fault comes at the conversion or in the first
    step, else in step `step` of `steps`. moment: of the step. layer: which one the fault is about.
    delay: seconds, of a signal whose moment is "any", and of a rank that is late. large: the
    tensors, so that ranks exchange in the middle of sums."""

    seed: int
    index: int
    fault: str
    world: int
    odd: int
    engine: str
    direct: bool
    forming: bool
    layers: int
    step: int
    steps: int
    moment: str
    layer: int
    delay: float
    large: bool = False


DIVERGED, TIMED_OUT, LOST, PASSED = "DivergenceError", "ExchangeTimeout", "PeerLost", "passed"
OURS = (DIVERGED, TIMED_OUT, LOST)
GONE = (TIMED_OUT, LOST)

#: fault: (what the odd rank may end with, what the others may)
FAULTS = {
    "no fault": ((PASSED,), (PASSED,)),
    "late within the limit": ((PASSED,), (PASSED,)),
    "gradient on some ranks": ((PASSED,), (PASSED,)),
    "killed": ((None,), (*GONE, PASSED)),
    "stopped": ((*GONE, PASSED), (*GONE, PASSED)),
    "interrupted": (("KeyboardInterrupt",), (*GONE, PASSED)),
    "late beyond the limit": (GONE, GONE),
    "raises": (("OwnError",), GONE),
    "skips a layer": ((DIVERGED,), (DIVERGED,)),
    "other order": ((DIVERGED,), (DIVERGED,)),
    "extra call": ((*OURS, PASSED), (DIVERGED, PASSED)),
    "other channels": ((DIVERGED,), (DIVERGED,)),
    "other dtype": ((DIVERGED,), (DIVERGED,)),
    "other eps": ((DIVERGED,), (DIVERGED,)),
    "evaluation mode": ((PASSED,), GONE),
    "evaluation mode of a layer": ((DIVERGED,), (DIVERGED,)),
    "no gradients": ((*GONE, PASSED), (DIVERGED,)),
}
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "interrupted": signal.SIGINT}
#: By index: what comes at any time is drawn twice as often.
ORDER = (*FAULTS, *SIGNALS)
#: What an error begins with.
CALL = (
    r"(stem|middle|head), (call \d+, (forward|backward), |while the group is made, )"
    r"|convert_sync_batchnorm, (conversion|while the group is made), "
)


def draw(seed: int, index: int) -> Round:
    chosen = random.Random(f"{seed}/{index}")
    fault = ORDER[index % len(ORDER)]
    world, layers, forming = chosen.choice((2, 3)), chosen.choice((2, 3)), chosen.random() < 0.4
    step = 0 if forming else chosen.randint(1, 6)
    moments, delay = ("start", "forward", "between", "backward"), 0.0
    if fault in SIGNALS:
        moments = (*moments, *("any",) * (12 if forming else 4))
        delay = chosen.uniform(0, 0.15 if forming else 0.05)
    elif fault.startswith("late"):
        within = chosen.uniform(0.1, 0.4) * LIMIT
        delay = within if fault == "late within the limit" else LIMIT + 1.5
    elif fault == "extra call":
        moments = ("forward", "after")
    moment = chosen.choice(moments)
    drawn = Round(
        seed=seed,
        index=index,
        fault=fault,
        world=world,
        odd=chosen.randrange(world),
        engine=chosen.choice(("shared memory", "gloo")),
        direct=chosen.random() < 0.5,
        forming=forming,
        layers=layers,
        step=step,
        # A signal of any time may come after the last step, other faults may not.
        steps=step + (20 if moment == "any" else chosen.randint(2, 4)),
        moment=moment,
        # A second call of the first layer after a step is the first call of the next step.
        layer=chosen.randrange(int(moment == "after"), layers),
        delay=delay,
    )
    if chosen.random() < 0.3 and fault != "other channels":
        # A step of these takes longer than the delay of a signal.
        drawn = drawn._replace(large=True, steps=min(drawn.steps, step + 4))
    return drawn


def faults_of(told: dict) -> list[str]:
    """Where the round broke the promise."""
    drawn, found = Round(**told["round"]), []
    outcomes = {int(rank): one for rank, one in told["outcomes"].items()}
    if not outcomes:
        return ["the ranks did not start"]
    for rank, one in outcomes.items():
        allowed = FAULTS[drawn.fault][rank != drawn.odd]
        if one is None:
            if None not in allowed:
                found.append(f"rank {rank} hangs or died: {told['codes']}")
            continue
        if one["outcome"] not in allowed:
            found.append(f"rank {rank}: {one['outcome']}")
        if one["wrong"]:
            found.append(f"rank {rank}: {one['wrong']}")
        if one["outcome"] in OURS:
            found += [f"rank {rank}: {line}" for line in wrong_in_text(drawn, rank, one["text"])]
            if one["seconds"] > IN_TIME and rank != drawn.odd:
                found.append(f"rank {rank}: after {one['seconds']:.1f} s")
    others = [one for rank, one in outcomes.items() if one is not None and rank != drawn.odd]
    if (
        drawn.engine == "shared memory"
        and len({(o["forwards"], o["backwards"]) for o in others}) > 1
    ):
        found.append("the ranks do not agree on which exchanges succeeded")
    after = {rank: one for rank, one in told["after"].items() if one is None or one["wrong"]}
    found += [f"after reset_groups, rank {rank}: {one}" for rank, one in after.items()]
    expected = [-9 if one is None else 0 for one in outcomes.values()]
    if told["codes"] != expected and not found:
        found.append(f"exit codes: {told['codes']}")
    return found


def wrong_in_text(drawn: Round, rank: int, text: str) -> list[str]:
    found = []
    if not re.match(CALL, text):
        found.append("names no call")
    if f"rank {rank} of {drawn.world}: " not in text:
        found.append("does not name itself")
    if rank != drawn.odd and not re.search(rf"\branks? ([\d, ]+, )?{drawn.odd}\b", text):
        found.append("does not name the odd rank")
    return found
