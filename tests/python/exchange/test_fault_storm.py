# SPDX-License-Identifier: Apache-2.0
"""Random faults on one rank, at random moments: every other rank ends in one error, in time, that
names layer and ranks, with statistics that are whole, or comes through with the right bits.

By default one or two rounds of each fault, the same in each run. SYNCBN_FAULT_ROUNDS=1000 draws
others from SYNCBN_SEED, or from a fresh seed, and prints a table of what came of them;
SYNCBN_FAULT_LOG names a file to which rounds are added, and whose rounds are all in the table. A
failure names the variables that repeat the round. fault_rounds.py has what is drawn and what must
come of it, fault_rank.py what a rank does.
"""

import collections
import contextlib
import itertools
import json
import os
import secrets
import signal
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import connection
from pathlib import Path

import pytest

from fault_rank import main
from fault_rounds import FAULTS, IN_TIME, LIMIT, OURS, SIGNALS, Round, draw, faults_of
from rank_runs import new_store, quick_context

pytestmark = pytest.mark.weekly
ASKED = int(os.environ.get("SYNCBN_FAULT_ROUNDS", "0"))
SEED = int(os.environ.get("SYNCBN_SEED", secrets.randbelow(2**31) if ASKED else 1))
FIRST = int(os.environ.get("SYNCBN_FAULT_FIRST", "0"))
AT_ONCE = int(os.environ.get("SYNCBN_FAULT_AT_ONCE", "5"))
LOG = os.environ.get("SYNCBN_FAULT_LOG")
# PyTorch asks for the name of the store's address at each connection. A name server that does not
# answer must not take the time of the faults; what forks the processes reads this once.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
#: From the outcomes to the end of a step in new groups.
GO_ON = 20


#: Starting a process looks for others that have ended, whose exit code can be read once.
_processes = threading.Lock()


class Play:
    """A round: its processes, what they say, and who is dead."""

    def __init__(self, context, drawn: Round) -> None:
        self.drawn, self.stopped_at = drawn, None
        self.store = new_store()
        self.processes, self.pipes = [], {}
        for rank in range(drawn.world):
            pipe, theirs = context.Pipe()
            arguments = (drawn, rank, self.store.port, theirs)
            self.processes.append(context.Process(target=main, args=arguments))
            with _processes:
                self.processes[rank].start()
            theirs.close()
            self.pipes[rank] = pipe

    def run(self) -> dict:
        """The round, what each rank ended with, what became of it after reset_groups if all are
        alive, and exit codes."""
        try:
            told = {"round": self.drawn._asdict(), "after": {}}
            ready = self.gather("ready", 60)
            self.say("go")
            told["outcomes"] = self.gather("outcome", 2 * IN_TIME) if all(ready.values()) else {}
            if told["outcomes"] and all(told["outcomes"].values()):
                self.say("go on")
                told["after"] = self.gather("after", GO_ON)
            self.say("end")
            told["codes"] = self.end(10)
            return told
        finally:
            with _processes:
                for process in self.processes:
                    process.kill()
            self.end(60)

    def end(self, seconds: float) -> list[int | None]:
        """Waits until the processes have ended: their exit codes."""
        until = time.monotonic() + seconds
        for process in self.processes:
            connection.wait([process.sentinel], max(0, until - time.monotonic()))
        with _processes:
            return [process.exitcode for process in self.processes]

    def say(self, word: str) -> None:
        for pipe in self.pipes.values():
            with contextlib.suppress(BrokenPipeError):
                pipe.send(word)

    def gather(self, kind: str, seconds: float) -> dict:
        """What each rank says, None of one that is dead or late."""
        told: dict[int, dict | None] = {}
        until = time.monotonic() + seconds
        while len(told) < self.drawn.world and time.monotonic() < until:
            for rank in set(range(self.drawn.world)) - set(self.pipes) - set(told):
                told[rank] = None
            for pipe in connection.wait(self.pipes.values(), 0.05):
                (rank,) = (r for r, one in self.pipes.items() if one is pipe)
                try:
                    said, what = pipe.recv()
                except (EOFError, ConnectionResetError):
                    del self.pipes[rank]
                    continue
                if said == "signal":
                    self.signal(rank, **what)
                else:
                    assert said == kind, f"{said}, not {kind}"
                    told[rank] = what
            self.wake(told)
        return {rank: told.get(rank) for rank in range(self.drawn.world)}

    def signal(self, rank: int, name: str, delay: float) -> None:
        time.sleep(delay)
        os.kill(self.processes[rank].pid, SIGNALS[name])
        if name == "stopped":
            self.stopped_at = time.monotonic()
        if name != "killed":
            self.pipes[rank].send("sent")

    def wake(self, told: dict) -> None:
        """Lets a stopped rank go on when the others have an outcome, beyond the limit."""
        if self.stopped_at is None or set(range(self.drawn.world)) - set(told) - {self.drawn.odd}:
            return
        if time.monotonic() > self.stopped_at + LIMIT + 0.5:
            os.kill(self.processes[self.drawn.odd].pid, signal.SIGCONT)
            self.stopped_at = None


LETTERS = {"DivergenceError": "D", "ExchangeTimeout": "T", "PeerLost": "L", "passed": "P"}


def kind(told: dict) -> str:
    """What the ranks without the fault ended with."""
    odd = str(told["round"]["odd"])
    kinds = {one["outcome"] for rank, one in told["outcomes"].items() if one and rank != odd}
    return "+".join(sorted(LETTERS.get(name, name) for name in kinds))


def table(log: list[dict]) -> str:
    """In Markdown, as tests/python/exchange/README.md has it."""
    cells, seconds = collections.defaultdict(collections.Counter), collections.defaultdict(list)
    for told in log:
        drawn = told["round"]
        cells[drawn["fault"], drawn["forming"], drawn["engine"]][kind(told)] += 1
        for rank, one in told["outcomes"].items():
            if one is not None and int(rank) != drawn["odd"] and one["outcome"] in OURS:
                seconds[drawn["fault"]].append(one["seconds"])
    lines = []
    for name in ("world", "engine", "direct", "forming"):
        counts = collections.Counter(told["round"][name] for told in log).items()
        lines.append(f"{name}: {', '.join(f'{value} {n}' for value, n in sorted(counts))}")
    lines += [
        "",
        "| Fault on one rank | Forming, shared memory | Forming, Gloo | Later, shared memory "
        "| Later, Gloo | Error after: median, last |",
        "|---|---|---|---|---|---|",
    ]
    for fault in FAULTS:
        row = [fault]
        for place in itertools.product((True, False), ("shared memory", "gloo")):
            counts = cells[(fault, *place)].most_common()
            row.append(", ".join(f"{letter} {n}" for letter, n in counts))
        took = seconds[fault]
        row.append(f"{statistics.median(took):.1f} s, {max(took):.1f} s" if took else "")
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


@pytest.fixture(scope="module")
def rounds():
    """All rounds, several at a time: they mostly wait."""
    context = quick_context()
    drawn = [draw(SEED, FIRST + i) for i in range(ASKED or 30)]

    def play(one: Round) -> dict:
        told = json.loads(json.dumps(Play(context, one).run()))
        if LOG:
            with open(LOG, "a", encoding="utf-8") as file:
                file.write(json.dumps(told) + "\n")
        return told

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(play, drawn))


@pytest.mark.parametrize("fault", FAULTS)
def test_storm(rounds, fault):
    broken = []
    for told in rounds:
        drawn = Round(**told["round"])
        found = faults_of(told) if drawn.fault == fault else []
        if found:
            again = f"SYNCBN_SEED={drawn.seed} SYNCBN_FAULT_FIRST={drawn.index}"
            broken.append(f"{again} SYNCBN_FAULT_ROUNDS=1: {'; '.join(found)}\n{drawn}\n{told}")
    assert not broken, "\n\n".join(broken)


def test_nothing_is_left_in_shared_memory(rounds):
    assert not [name for name in os.listdir("/dev/shm") if "syncbn" in name]


def test_table(rounds, capsys):
    if ASKED:
        log = rounds
        if LOG:
            log = [json.loads(line) for line in Path(LOG).read_text().splitlines()]
        with capsys.disabled():
            print(f"\nseed {SEED}, {len(log)} rounds\n\n{table(log)}")
