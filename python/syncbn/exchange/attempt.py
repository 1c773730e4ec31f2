# SPDX-License-Identifier: Apache-2.0
"""One attempt to exchange in a group: what broke the group before, who exchanges now, for how long
it may take, and what the other ranks hear when it fails."""

import atexit
import contextlib
import ctypes
import datetime
import os
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from ..errors import ExchangeTimeout, PeerLost
from ..operators import without_modes
from . import apart, callers, whereabouts
from .call import Call, Engine, Peers, Refused, lacks_memory, reason_of

# Why groups cannot be used any more.
_broken: dict[str, str] = {}
# The threads that exchange now, by group.
_threads: dict[str, int] = {}

# Layers, by group and direction, that have exchanged before: for the first time a rank may have to
# compile, so that the others wait as long as for the caller's own group.
_exchanged: set[tuple[str, str, str]] = set()
_STEP = ("forward", "backward", "conversion")

#: Rounds of looking before the wait for Gloo begins to sleep.
_SPINS = 100

#: Ways out of an exchange that the other ranks take as well, or that are no part of it.
_KNOWN_TO_ALL = (ExchangeTimeout, PeerLost, Refused)


class Refusal:
    """Tells the other ranks, in exchanges of the engine's group, that this rank refused a call. It
    waits for them in a thread of its own, and the caller does not. What this rank exchanges in the
    group afterwards comes after it; at the end of the process it has some seconds left."""

    def __init__(self, engine: Engine, why: str, tell: Callable[[], None]) -> None:
        self.engine, self.why, self.tell = engine, why, tell
        name = engine.peers.group_name
        with contextlib.suppress(RuntimeError):
            # While it is there, nothing waits for works of Gloo that nobody will finish.
            self.group = callers.resolve(name)
        self.earlier = _refusals.get(name)
        _refusals[name] = self
        try:
            self.told = apart.begin(self._run)
        except RuntimeError:  # no thread can be started
            del _refusals[name]
            engine.abandon(why)

    def _run(self) -> None:
        if self.earlier is not None:
            self.earlier.wait(None)
            self.earlier = None
        name = self.engine.peers.group_name
        _telling.add(threading.get_ident())
        try:
            self.tell()
        except Exception as error:  # most mean that nobody is there who would hear of it
            if lacks_memory(error):
                self.engine.abandon(self.why)
        finally:
            _telling.discard(threading.get_ident())
            if _refusals.get(name) is self:
                del _refusals[name]

    def wait(self, seconds: float | None) -> bool:
        """Tells whether the others have heard of it, after so many seconds at most."""
        return apart.is_done(self.told, seconds)


# The last refusal of each group, and the threads that tell one.
_refusals: dict[str, Refusal] = {}
_telling: set[int] = set()
os.register_at_fork(after_in_child=_refusals.clear)


def end_refusals(group: str) -> None:
    """Waits until the others have heard what this rank refused: what it exchanges now is for the
    call after that."""
    refusal = _refusals.get(group)
    if refusal is not None and threading.get_ident() not in _telling:
        refusal.wait(None)


@atexit.register
def _leave_refusals() -> None:
    until = time.monotonic() + 5.0
    for refusal in list(_refusals.values()):
        if not refusal.wait(until - time.monotonic()):
            with contextlib.suppress(Exception):
                refusal.engine.abandon(refusal.why)
            refusal.wait(0.2)


class Attempt:
    """Surrounds an exchange of the engine's group, and notes where this rank is and what breaks the
    group. One thread at a time: ranks pair exchanges by their order, which two threads have not in
    common.

    limit: seconds that the exchange may take.
    """

    def __init__(self, engine: Engine, call: Call) -> None:
        peers = engine.peers
        self.engine, self.peers, self.call = engine, peers, call
        self.limit = peers.timeout
        if call.direction in _STEP and (peers.group_name, call[0], call[2]) not in _exchanged:
            self.limit = max(peers.timeout, peers.patience)
        callers.check_fork()
        if _refusals:
            end_refusals(peers.group_name)
        why = _broken.get(peers.group_name) or whereabouts.left(peers.group_name)
        if why is not None:
            raise PeerLost(
                f"{call}, {peers}: the group is broken since an earlier error "
                f"({why}); call syncbn.reset_groups() on every rank to go on"
            )

    def __enter__(self) -> "Attempt":
        name, thread = self.peers.group_name, threading.get_ident()
        if _threads.setdefault(name, thread) != thread:
            raise RuntimeError(
                f"{self.call}, {self.peers}: got a call while another thread exchanges in the "
                "same group, expected one thread for each group (process_group=)"
            )
        self.engine.set_limit(self.limit)
        whereabouts.enter(name, self.call)
        return self

    def __exit__(self, kind, error, traceback) -> None:
        name = self.peers.group_name
        # First: what comes now must not find the others waiting.
        if kind is not None and not issubclass(kind, _KNOWN_TO_ALL):
            abandon(self.engine, self.call, error)
        seconds = whereabouts.leave(name)
        _threads.pop(name, None)
        if self.call.times is not None and kind is None:
            self.engine.note(self.call.times, seconds)
        if kind is None and self.call.direction in _STEP:
            _exchanged.add((name, self.call.layer, self.call.direction))

    @property
    def timeout(self) -> datetime.timedelta:
        return datetime.timedelta(seconds=self.limit)

    def wait(self, work: dist.Work) -> None:
        """Waits for a collective over Gloo, looking at it again and again, so that Ctrl-C works."""
        late = f"not all ranks came within {self.limit:g} s"
        try:
            until = time.monotonic() + self.limit
            rounds = 0
            while not work.is_completed() and time.monotonic() <= until:
                rounds += 1
                looks = rounds % _SPINS == 0
                if looks and (why := whereabouts.left(self.peers.group_name)) is not None:
                    keep(self.peers)
                    self.fail(PeerLost, why)
                time.sleep(0 if rounds < _SPINS else 5e-5 if rounds < 20_000 else 1e-3)
            if not work.is_completed():
                self.fail(ExchangeTimeout, late)
            work.wait()  # for its error
        except (ExchangeTimeout, PeerLost):
            raise
        except RuntimeError as error:
            if "timed out" in str(error).lower():
                self.fail(ExchangeTimeout, late, error)
            self.fail(PeerLost, "a rank has ended, or closed its connections", error)

    def fail(self, kind: type[Exception], reason: str, cause: Exception | None = None) -> None:
        """Raises what the exchange ends with, and says where the other ranks are."""
        peers = self.peers
        reason = reason.removeprefix(f"{peers}: ")  # C++ names the rank, too
        _broken[peers.group_name] = f"{self.call}: {reason}"
        if kind is PeerLost:
            self.engine.pass_on(f"rank {peers.rank} left the group: {reason}")
        others = whereabouts.others(peers.group_name, peers.rank, peers.ranks)
        raise kind(f"{self.call}, {peers}: {reason}; {others}") from cause


def keep(peers: Peers) -> None:
    """Keeps the groups for ever: their end would wait for works that nobody will finish."""
    for name in (peers.group_name, peers.leaders):
        if name is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(callers.resolve(name)))


def abandon(engine: Engine, call: Call, error: BaseException) -> None:
    """Leaves the group for an error that only this rank has. The others get PeerLost."""
    if isinstance(error, Exception):
        why = f"{call}: {type(error).__name__}: {reason_of(error)}"
    else:
        why = f"{call} was interrupted"
    _broken.setdefault(engine.peers.group_name, why)
    with without_modes():  # one that raises, and goes on to raise
        engine.abandon(why)


def is_broken(group: str) -> bool:
    return group in _broken


def forget_errors() -> None:
    _broken.clear()
    _exchanged.clear()
