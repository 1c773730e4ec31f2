# SPDX-License-Identifier: Apache-2.0
"""How an exchange fails: what this process does in each of its groups and knows of the others
there, and what they hear when it cannot go on.

A thread per process looks every second whether some rank of a group asks where the others are (one
small request to the group's store), and answers with what this process last did. Exchanges
themselves only note what they do.
"""

import atexit
import contextlib
import ctypes
import datetime
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any

import torch.distributed as dist

from ..errors import ExchangeTimeout, PeerLost
from ..operators import ops, without_modes
from . import callers
from .apart import begin, is_done
from .call import Busy, Call, Peers, lacks_memory, reason_of

#: Seconds between two looks at the store.
INTERVAL = 1.0
#: Rounds of looking before the wait for Gloo begins to sleep.
_SPINS = 100
#: Directions of a layer. For the first time a rank may have to compile, so that the others wait as
#: long as for the caller's own group.
_STEP = ("forward", "backward", "conversion")


class Refused(Exception):
    """An operator of a whole direction took no such arguments; its exchange did not begin."""


#: Ways out of an exchange that the other ranks take as well, or that are no part of it.
_KNOWN_TO_ALL = (ExchangeTimeout, PeerLost, Refused)


class Member:
    """This process as a member of one group."""

    def __init__(self) -> None:
        #: its last exchange, whether it is still in there, and since when
        self.does: tuple[Call, bool, float] | None = None
        #: of the thread that exchanges
        self.lock = threading.RLock()
        #: seconds that exchanges in shared memory wait
        self.limit = 0.0
        #: layers and directions that have exchanged before
        self.exchanged: set[tuple[str, str]] = set()
        #: why the group cannot be used any more; what a rank that left it said; why this one leaves
        #: it, to be said
        self.broken = self.left = self.to_tell = ""
        #: the last call that this rank refused, until the others know; and the thread that tells
        self.refusal: Refusal | None = None
        self.teller = 0
        #: of the group alone, while it is watched
        self.store: dist.Store | None = None
        self.rank = 0
        #: the default store by its identity: holding it would keep its server, and with it a port
        self.origin = 0
        self.answered = 0
        self.forgotten = False

    def says(self) -> str:
        """Says what this rank did last in the group, and what it refused since."""
        now, inside, since = time.monotonic(), False, 0.0
        text = "in no exchange yet"
        if self.does is not None:
            call, inside, since = self.does
            text = f"in no exchange; its last was {call}, {now - since:.1f} s ago"
            if inside:
                text = f"waits in {call}, for {now - since:.1f} s"
        if _refused is None or inside or _refused[1] < since:
            return text
        return f"{text}; it refused {now - _refused[1]:.1f} s ago: {_refused[0]}"

    def answer(self, store: dist.Store) -> None:
        """Looks into the store: says what is to be said, and hears what others said or ask."""
        if self.to_tell:
            why, self.to_tell = self.to_tell, ""
            store.set("left", why)
        elif not self.left and store.check(["left"]):
            self.left = store.get("left").decode(errors="replace")
        asked = store.add("asked", 0)
        while self.answered < asked:
            self.answered += 1
            store.set(f"{self.answered}/{self.rank}", self.says())


#: Groups that stay open until this process ends, by their ids: one for each that broke over Gloo.
open_for_good: set[int] = set()
#: By the group's name.
members: defaultdict[str, Member] = defaultdict(Member)
#: What this process refused last by itself, and when.
_refused: tuple[str, float] | None = None
_inherited: list = []
_stop = threading.Event()
_thread: threading.Thread | None = None
_lock = threading.Lock()


def kept(what: str) -> list:
    """Keeps groups, or connections to the store, until destroy_process_group clears them: one left
    over would hold the store's server, and with it a port that the next init_process_group may
    want."""
    return dist.distributed_c10d._world.tags_to_pg.setdefault(f"syncbn {what}", [])


def connection() -> dist.Store:
    """Gives the caller a connection of its own to the store, which a request that waits would keep
    from others. Used ones are taken again, because PyTorch asks a name server for the address of a
    new one, which may take seconds."""
    with _lock:
        if len(stores := kept("stores")) > 1:  # the first is the thread's
            return stores.pop()
    used: Any = dist.distributed_c10d._get_default_store()  # PyTorch's stubs have no clone()
    return used.clone()


def watch(peers: Peers, used: dist.Store, place: str) -> None:
    """Answers for this group from now on. used: a connection() that the caller needs no more.
    place: of the store, for this group alone."""
    global _thread
    with _lock:
        stores = kept("stores")
        stores.append(used)
        member = members[peers.group_name]
        member.origin = id(dist.distributed_c10d._get_default_store())
        member.rank, member.store = peers.rank, dist.PrefixStore(f"{place}/where", stores[0])
        if _thread is None:
            _thread = threading.Thread(target=_look, name="syncbn-where", daemon=True)
            _thread.start()


def _look() -> None:
    while not _stop.wait(INTERVAL):
        lost = None
        for group, member in list(members.items()):
            if member.store is None:
                continue
            try:
                if member.origin != lost:
                    member.answer(member.store)
            except Exception:  # the store went with its process, or with destroy_process_group
                lost = member.origin
            if member.origin == lost:
                member.store = None
            if member.forgotten:
                members.pop(group, None)


def forget(group: str) -> None:
    """Knows the group no more, once what is to be said of it is."""
    member = members[group]
    member.forgotten = True
    if member.store is None or not member.to_tell:
        members.pop(group, None)


def refuse(error: Exception) -> None:
    """Notes a refusal of which the others hear nothing, unless they wait for this rank in vain."""
    global _refused
    _refused = f"{type(error).__name__}: {error}", time.monotonic()


def _others(peers: Peers) -> str:
    """Says what the other ranks do, a line for each."""
    answers: dict[int, str] = {}
    store, others = members[peers.group_name].store, set(range(peers.ranks)) - {peers.rank}
    seconds = 2.5 * INTERVAL  # the store may be gone, or the network

    def ask() -> None:
        assert store is not None
        number, missing, until = store.add("asked", 1), others.copy(), time.monotonic() + seconds
        while missing and time.monotonic() < until:
            for rank in sorted(missing):
                if store.check([f"{number}/{rank}"]):
                    answers[rank] = store.get(f"{number}/{rank}").decode(errors="replace")
                    missing.remove(rank)
            time.sleep(0.02)

    if store is not None:
        is_done(begin(ask), seconds + 0.5)
    silent = "does not answer (ended, stopped, or kept from running)"
    known = answers.copy()
    return "; ".join(f"rank {rank}: {known.get(rank, silent)}" for rank in sorted(others))


class Refusal:
    """Tells the other ranks, in exchanges of the group, that this rank refused a call. It waits for
    them in a thread of its own, and the caller does not. What this rank exchanges in the group
    afterwards comes after it; at the end of the process it has some seconds left."""

    def __init__(self, peers: Peers, why: str, tell: Callable[[], None]) -> None:
        self.peers, self.why, self.tell = peers, why, tell
        self.member = members[peers.group_name]
        with contextlib.suppress(RuntimeError):
            # While it is there, nothing waits for works of Gloo that nobody will finish.
            self.group = callers.resolve(peers.group_name)
        self.earlier, self.member.refusal = self.member.refusal, self
        try:
            self.told = begin(self._run)
        except RuntimeError:  # no thread can be started
            self.member.refusal = None
            _leave(peers, why)

    def _run(self) -> None:
        if self.earlier is not None:
            wait([self.earlier.told])
            self.earlier = None
        self.member.teller = threading.get_ident()
        try:
            self.tell()
        except Exception as error:  # most mean that nobody is there who would hear of it
            if lacks_memory(error):
                _leave(self.peers, self.why)
        finally:
            self.member.teller = 0
            if self.member.refusal is self:
                self.member.refusal = None


@atexit.register
def _end() -> None:
    """Ends what refusals still wait for, and the thread: a daemon thread that is inside the store
    when the interpreter ends may take the process down."""
    until = time.monotonic() + 5.0
    for refusal in [m.refusal for m in list(members.values()) if m.refusal is not None]:
        if not is_done(refusal.told, until - time.monotonic()):
            with contextlib.suppress(Exception):
                _leave(refusal.peers, refusal.why)
            is_done(refusal.told, 0.2)
    _stop.set()
    if _thread is not None:
        _thread.join(2)


def _forget_parent() -> None:
    """Begins anew in a forked child. Threads, and who may have held locks, stayed behind;
    connections to the store are the parent's, and are not closed either, which it would see."""
    global _inherited, _stop, _thread, _lock
    _inherited = [dict(members), *map(list, dist.distributed_c10d._world.tags_to_pg.values())]
    _stop, _thread, _lock = threading.Event(), None, threading.Lock()
    members.clear()


os.register_at_fork(after_in_child=_forget_parent)


class Attempt:
    """Surrounds an exchange of the group, and notes where this rank is and what breaks the group.
    One thread at a time: ranks pair exchanges by their order, which two threads have not in common.

    limit: seconds that the exchange may take.
    """

    def __init__(self, peers: Peers, call: Call) -> None:
        self.peers, self.call = peers, call
        self.member = member = members[peers.group_name]
        self.limit = peers.timeout
        if call.direction in _STEP and (call.layer, call.direction) not in member.exchanged:
            self.limit = max(peers.timeout, peers.patience)
        callers.check_fork()
        refusal = member.refusal
        if refusal is not None and threading.get_ident() != member.teller:
            wait([refusal.told])  # what is exchanged now is for the call after that
        if why := member.broken or member.left:
            raise PeerLost(
                f"{call}, {peers}: the group is broken since an earlier error "
                f"({why}); call syncbn.reset_groups() on every rank to go on"
            )

    def __enter__(self) -> "Attempt":
        member, shared = self.member, self.peers.shared
        if not member.lock.acquire(blocking=False):
            raise Busy(
                f"{self.call}, {self.peers}: got a call while another thread exchanges in the "
                "same group, expected one thread for each group (process_group=)"
            )
        if shared is not None and member.limit != self.limit:
            ops.shm_set(shared, self.limit)
            member.limit = self.limit
        member.does = self.call, True, time.monotonic()
        return self

    def __exit__(self, kind, error, traceback) -> None:
        peers, call, member = self.peers, self.call, self.member
        # First: what comes now must not find the others waiting.
        if kind is not None and not issubclass(kind, _KNOWN_TO_ALL):
            abandon(peers, call, error)
        member.does = call, False, time.monotonic()
        member.lock.release()
        if kind is not None:
            return
        if call.direction in _STEP:
            member.exchanged.add((call.layer, call.direction))

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
                if rounds % _SPINS == 0 and self.member.left:
                    _keep(self.peers)
                    self.fail(PeerLost, self.member.left)
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
        self.member.broken = f"{self.call}: {reason}"
        if kind is PeerLost and peers.nodes > 1:  # other nodes do not see it
            _tell(peers, reason)
        raise kind(f"{self.call}, {peers}: {reason}; {_others(peers)}") from cause


def abandon(peers: Peers, call: Call, error: BaseException) -> None:
    """Leaves the group for an error that only this rank has. The others get PeerLost."""
    why = f"{call} was interrupted"
    if isinstance(error, Exception):
        why = f"{call}: {type(error).__name__}: {reason_of(error)}"
    member = members[peers.group_name]
    member.broken = member.broken or why
    with without_modes():  # one that raises, and goes on to raise
        _leave(peers, why)


def _leave(peers: Peers, why: str) -> None:
    """Tells the other ranks, who may wait for this one, that it does not come. Over Gloo they look
    at the store: its works cannot be stopped."""
    if peers.shared is not None:
        ops.shm_leave(peers.shared, why[:400])
    if peers.shared is None or peers.nodes > 1:
        _tell(peers, why)
        _keep(peers)


def _tell(peers: Peers, why: str) -> None:
    """Has the others know it within two looks at the store. Waits for nothing."""
    member = members[peers.group_name]
    member.to_tell = member.to_tell or f"rank {peers.rank} left the group: {why}"[:400]


def _keep(peers: Peers) -> None:
    """Keeps the groups for ever: their end would wait for works that nobody will finish."""
    for name in (peers.group_name, peers.leaders):
        group = None if name is None else callers.resolve(name)
        if group is not None and id(group) not in open_for_good:
            open_for_good.add(id(group))
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
