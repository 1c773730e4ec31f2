# SPDX-License-Identifier: Apache-2.0
"""Where each rank of a group is, told to the others when one of them has waited too long.

A thread per process looks every second whether some rank asks (one small request to the group's
store), and answers with what this process last did. Exchanges themselves only note what they do.
"""

import atexit
import contextlib
import os
import threading
import time
from typing import Any, NamedTuple

import torch.distributed as dist

from . import apart

#: Seconds between two looks at the store.
INTERVAL = 1.0


class _State(NamedTuple):
    call: object
    inside: bool
    since: float

    def __str__(self) -> str:
        for_seconds = f"{time.monotonic() - self.since:.1f} s"
        if self.inside:
            return f"waits in {self.call}, for {for_seconds}"
        return f"in no exchange; its last was {self.call}, {for_seconds} ago"


_states: dict[str, _State] = {}
#: What this process refused last by itself, and when.
_refused: tuple[str, float] | None = None
#: By group: why this rank left it, to be said; and what one of its ranks said.
_to_tell: dict[str, str] = {}
_left: dict[str, str] = {}
_forgotten: set[str] = set()
_watched: dict[str, "_Watch"] = {}
_inherited: list = []
_stop = threading.Event()
_thread: threading.Thread | None = None
_lock = threading.Lock()


def enter(group: str, call: object) -> None:
    """Notes that this process waits in an exchange of the group."""
    _states[group] = _State(call, True, time.monotonic())


def leave(group: str) -> float:
    """Notes that the exchange has ended, and gives the seconds that it took."""
    state, now = _states[group], time.monotonic()
    _states[group] = _State(state.call, False, now)
    return now - state.since


def _connections(use: str) -> list[dist.Store]:
    """Keeps connections to the store until destroy_process_group clears them: one left over would
    hold the store's server, and with it a port that the next init_process_group may want."""
    kept: Any = dist.distributed_c10d._world.tags_to_pg  # to the stubs for groups alone
    return kept.setdefault(f"syncbn {use}", [])


def connection() -> dist.Store:
    """Gives the caller a connection of its own to the store, which a request that waits would keep
    from others. Used ones are taken again, because PyTorch asks a name server for the address of a
    new one, which may take seconds."""
    with contextlib.suppress(IndexError):
        return _connections("free").pop()
    used: Any = dist.distributed_c10d._get_default_store()  # PyTorch's stubs have no clone()
    return used.clone()


class _Watch:
    """Answers by one group's keys in the store, below `place`, which is this group's alone. own: a
    connection on which no request waits."""

    def __init__(self, group: str, rank: int, ranks: int, own: dist.Store, place: str) -> None:
        self.group, self.rank, self.ranks = group, rank, ranks
        # By its identity: holding the store would keep its server, and with it the port.
        self.origin = id(dist.distributed_c10d._get_default_store())
        self.store = dist.PrefixStore(f"{place}/where", own)
        self.answered = 0

    def answer(self) -> None:
        if self.group in _to_tell:
            self.store.set("left", _to_tell.pop(self.group))
        elif self.group not in _left and self.store.check(["left"]):
            _left[self.group] = self.store.get("left").decode()
        asked = self.store.add("asked", 0)
        while self.answered < asked:
            self.answered += 1
            self.store.set(f"{self.answered}/{self.rank}", last(self.group))

    def ask(self, seconds: float, found: dict[int, str]) -> None:
        number = self.store.add("asked", 1)
        missing = [rank for rank in range(self.ranks) if rank != self.rank]
        until = time.monotonic() + seconds
        while missing and time.monotonic() < until:
            for rank in list(missing):
                if self.store.check([f"{number}/{rank}"]):
                    found[rank] = self.store.get(f"{number}/{rank}").decode()
                    missing.remove(rank)
            time.sleep(0.02)


def watch(group: str, rank: int, ranks: int, used: dist.Store, place: str) -> None:
    """Answers for this group from now on. used: a connection() that the caller needs no more.
    place: of the store, for this group alone."""
    global _thread
    with _lock:
        own = _connections("watch")
        (_connections("free") if own else own).append(used)
        _watched[group] = _Watch(group, rank, ranks, own[0], place)
        if _thread is None:
            _thread = threading.Thread(target=_run, name="syncbn-where", daemon=True)
            _thread.start()
            apart.keep_ready()
            atexit.register(stop)


def forget(group: str) -> None:
    with _lock:
        _states.pop(group, None)
        _left.pop(group, None)
        if group in _to_tell:  # the thread forgets it when it has told
            _forgotten.add(group)
        else:
            _watched.pop(group, None)


def tell(group: str, why: str) -> None:
    """Has the other ranks know that this one left the group, within two looks at the store. Waits
    for nothing."""
    _to_tell.setdefault(group, why)


def refuse(error: Exception) -> None:
    """Notes a refusal of which the others hear nothing, unless they wait for this rank in vain."""
    global _refused
    _refused = f"{type(error).__name__}: {error}", time.monotonic()


def last(group: str) -> str:
    """Says what this rank did last in the group, and what it refused since."""
    state = _states.get(group)
    text = "in no exchange yet" if state is None else str(state)
    if _refused is None or (state is not None and (state.inside or _refused[1] < state.since)):
        return text
    return f"{text}; it refused {time.monotonic() - _refused[1]:.1f} s ago: {_refused[0]}"


def left(group: str) -> str | None:
    """Gives what a rank that left the group said, if one did."""
    return _left.get(group)


def stop() -> None:
    """Ends the thread; a daemon thread that is inside the store when the interpreter ends may take
    the process down."""
    _stop.set()
    if _thread is not None:
        _thread.join(2)


def _run() -> None:
    while not _stop.wait(INTERVAL):
        with _lock:
            watched = list(_watched.items())
        lost = None
        for group, one in watched:
            try:
                if one.origin != lost:
                    one.answer()
            except Exception:  # the store went with its process, or with destroy_process_group
                lost = one.origin
            if one.origin == lost or group in _forgotten:
                with _lock:
                    _forgotten.discard(group)
                    if _watched.get(group) is one:
                        del _watched[group]


def _forget_parent() -> None:
    """Begins anew in a forked child. The thread, and whoever may have held the lock, stayed behind;
    connections to the store are the parent's, and are not closed either, which it would see."""
    global _inherited, _watched, _stop, _thread, _lock
    _inherited = [_watched, *map(list, dist.distributed_c10d._world.tags_to_pg.values())]
    _watched = {}
    _stop, _thread, _lock = threading.Event(), None, threading.Lock()
    for known in (_states, _to_tell, _left, _forgotten):
        known.clear()


os.register_at_fork(after_in_child=_forget_parent)


def others(group: str, rank: int, ranks: int) -> str:
    """Says what the other ranks do, a line for each."""
    answers: dict[int, str] = {}
    with _lock:
        one = _watched.get(group)
    if one is not None:
        seconds = 2.5 * INTERVAL  # the store may be gone, or the network
        apart.try_for(seconds + 0.5, lambda: one.ask(seconds, answers))
        answers = dict(answers)
    silent = "does not answer (ended, stopped, or kept from running)"
    return "; ".join(f"rank {r}: {answers.get(r, silent)}" for r in range(ranks) if r != rank)
