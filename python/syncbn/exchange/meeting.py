# SPDX-License-Identifier: Apache-2.0
"""Ranks that make a group meet in the store first.

Gloo connects all ranks with all others, and names nobody who does not come. So each rank announces
itself in the store and waits until all have; then they make the group, and each says that it has.
Both waits end with one verdict for all ranks: that all came, or the first rank's reason why not.

The store may be older than these processes, and hold what others have left there. So each rank that
comes begins a round, under a random token, and ranks that wait follow to it: who has come to the
last round was alive when the last rank came. No clock and no counter of a launcher decides that.
"""

import contextlib
import hashlib
import json
import math
import os
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NoReturn

import torch.distributed as dist

from ..errors import DivergenceError, ExchangeTimeout, PeerLost
from . import apart
from .texts import Malformed, Offer, decoded, load, parts, verdict_of

#: Seconds that connecting has at least, once all ranks have come.
CONNECTING = 5.0
#: Seconds beyond the limit, for the store to answer.
_GRACE = 3.0
#: Seconds between two looks for ranks that have ended, and how many announcements one look reads:
#: all ranks of a large job ask the same store.
_LOOK = 0.3
_READ_AT_ONCE = 8

#: How often this process began anew with all others. A rank that comes to an attempt which failed
#: without it is late, and raises the others' error; but not one from before they began anew.
_beginning = 0

_ALL = "all"


_IMPORTED = time.time()
#: By topic: the rounds that this process's last attempt was in.
_rounds: dict[str, list[str]] = {}
#: By topic: the attempt that waits now.
_waiting: dict[str, "_Attempt"] = {}
os.register_at_fork(after_in_child=_waiting.clear)


class _Over(Exception):
    """Says that the attempt has failed on all ranks, with the kind of error and its text."""


def node_identity() -> str:
    """Gives what processes that can find each other have in common: the machine's running system
    and the PID namespace, which containers of one machine do not share. "" where that is not
    known."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _process() -> tuple[int, str, str]:
    """Describes this process, as others on its node can find it."""
    try:
        return os.getpid(), _started(os.getpid())[1], node_identity()
    except OSError:
        return os.getpid(), "", ""


def _started(process: int) -> tuple[str, str]:
    """Gives the state of a process, and when it started."""
    with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
    return fields[0], fields[19]


def _has_ended(process: tuple) -> bool:
    """Tells whether it is known to have ended: another node or PID namespace does not see it."""
    number, started, node = process
    if not node or node != _process()[2]:
        return False
    try:
        os.kill(number, 0)
        state, since = _started(number)
        return state in "ZX" or since != started
    except ProcessLookupError:
        return True
    except OSError:  # another user's, or hidden
        return False


def _since() -> float:
    """Finds when this process began. News in the store that is older is of an earlier attempt:
    clocks of two nodes differ by less than a job needs to start. Only how soon errors come depends
    on it."""
    try:
        began = int(_started(os.getpid())[1]) / os.sysconf("SC_CLK_TCK")
    except OSError:
        return _IMPORTED
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - began)


def _refusal(kind: type[Exception], text: str) -> str:
    return json.dumps([kind.__name__, text, time.time(), _beginning])


class _Attempt:
    """An attempt of these ranks to meet. The key "now" has the token of the last round, that of
    the round before to which all came, and when the last round is over its verdict."""

    def __init__(
        self,
        topic: str,
        ranks: tuple[int, ...],
        rank: int,
        limit: float,
        offer: Offer,
        form: Any = None,
    ) -> None:
        self.ranks, self.rank = ranks, rank
        self.limit, self.until = limit, time.monotonic() + limit
        self.offer = offer._replace(process=_process(), beginning=_beginning)
        self._form = ("", "", form, (0, "", ""), "", 0.0, 0)
        #: the first whose failures are errors of this rank, too
        self.beginning: float = _beginning
        self.topic = f"{topic}/{hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]}"
        self.offers: dict[int, Offer] = {}
        #: why this rank goes, if it does
        self.left = ""
        self.round, self.since = "", _since()
        self._open = ""  # what "now" is while this round goes on
        #: of this attempt, and of this process's last one before
        self.rounds: list[str] = []
        self.before: list[str] = []
        self._missing = self._all_others()
        self._looked = time.monotonic()

    def run(self, make: Callable | None) -> Any:
        self.store = dist.PrefixStore(self.topic, dist.distributed_c10d._get_default_store())
        try:
            self._wait_for_all()
            self._missing = []
            try:
                self._read_all()
            except Malformed as error:
                self._swap(self._made_key(), "", self._leaves(str(error)))
                raise
            return self._meet(make)
        except Malformed as error:
            raise _Over(PeerLost, str(error)) from None

    def _read_all(self) -> None:
        keys = [f"{self.round}/came/{rank}" for rank in range(len(self.ranks))]
        texts = zip(keys, self.store.multi_get(keys), strict=True)
        self.offers = {r: self._offer(key, text) for r, (key, text) in enumerate(texts)}

    def _offer(self, key: str, text: bytes) -> Offer:
        return Offer(*load(key, text, self._form))

    def _made_key(self) -> str:
        return f"{self.round}/made/verdict"

    def _meet(self, make: Callable | None) -> Any:
        """Does what follows when all have come."""
        global _beginning
        offers = list(self.offers.values())
        if len({offer.asks for offer in offers}) > 1:
            lines = (f"rank {r}: {offer.who}, {offer.asks}" for r, offer in enumerate(offers))
            text = "; ".join(lines)
            raise _Over(DivergenceError, f"the ranks ask for different exchanges: {text}")
        if self.beginning > _beginning:
            _beginning = 1 + max(offer.beginning for offer in offers)
        if make is None:
            return [offer.value for offer in offers]
        self.until = max(self.until, time.monotonic() + CONNECTING)
        making = apart.begin(lambda: make(offers, f"{self.topic}/{self.round}"))
        self._wait_until_made(making)
        return making.result()

    def _begin_round(self) -> None:
        """Raises the others' error if they have given up before this rank came."""
        fresh = secrets.token_hex(8)
        mine = f"{fresh} -"
        now = self._swap("now", "", mine)
        while now != mine:
            token, whole, verdict = parts(now)
            if verdict not in ("", _ALL) and token not in self.before:
                *_, at, beginning = verdict_of(verdict, ExchangeTimeout, PeerLost)
                if at >= self.since and beginning >= self.beginning:
                    self.round = token
                    self._raise(verdict, "came")
            if self.left:  # while the store did not answer
                raise _Over(PeerLost, self.left)
            mine = f"{fresh} {token if verdict == _ALL else whole}"
            now = self._swap("now", now, mine)

    def _wait_for_all(self) -> None:
        """Looks again and again: a request that waits in the store would keep the store from other
        threads, and Ctrl-C from this rank."""
        self._begin_round()
        pause = 0.001
        while True:
            now = decoded("now", self.store.get("now"))
            token, whole, verdict = parts(now)
            if whole == self.round:  # and meanwhile some met again
                return
            if self.left and _rounds[self.topic] is not self.rounds:  # it has come again
                raise _Over(PeerLost, self.left)
            if verdict:
                self.rounds.append(token)
            if verdict == _ALL:
                return
            if verdict:
                self._raise(verdict, "came")
            if reason := self._reason():
                self._swap("now", now, f"{now} {reason}")
            elif token != self.round:
                if self.round:
                    self.store.delete_key(f"{self.round}/came/{self.rank}")
                self.round, self._open = token, now
                self._come("came")
            else:
                time.sleep(pause)
                pause = min(2 * pause, 0.1)

    def _come(self, stage: str) -> None:
        if stage == "came":
            self.rounds.append(self.round)
            self._missing = self._all_others()
            offer = self.offer._replace(round=self.round, at=time.time())
            # For ranks that come later, and for those of this round.
            self.store.set(f"came/{self.rank}", json.dumps(offer))
            self.store.set(f"{self.round}/came/{self.rank}", json.dumps(offer))
        else:
            self.store.set(f"{self.round}/{stage}/{self.rank}", "yes")
        if self.store.add(f"{self.round}/{stage}", 1) == len(self.ranks):
            if stage == "came":
                self._swap("now", self._open, f"{self._open} {_ALL}")
            else:
                self._swap(self._made_key(), "", _ALL)

    def _wait_until_made(self, making: Future) -> None:
        key, pause = self._made_key(), 0.001
        waits = True
        while True:
            verdict = decoded(key, self.store.get(key)) if self.store.check([key]) else ""
            if not verdict:
                reason = self._reason()
                if waits and making.done():
                    error = making.exception()
                    waits = False
                    if error is not None:
                        reason = self._leaves(f"{type(error).__name__}: {error}")
                    elif not reason:
                        self._come("made")
                        continue
                if reason:
                    verdict = self._swap(key, "", reason)
            if verdict == _ALL:
                return
            if verdict:
                self._raise(verdict, "made")
            time.sleep(pause)
            pause = min(2 * pause, 0.1)

    def _swap(self, key: str, expected: str, value: str) -> str:
        return decoded(key, self.store.compare_set(key, expected, value))

    def _raise(self, verdict: str, stage: str) -> NoReturn:
        kind, text, *_ = verdict_of(verdict, ExchangeTimeout, PeerLost)
        raise _Over(kind, f"{text}; {self._others(stage)}")

    def _leaves(self, why: str) -> str:
        return _refusal(PeerLost, f"rank {self.rank} left the group: {why}")

    def _reason(self) -> str:
        """Gives a verdict, if this rank waits no longer."""
        if self.left:
            return self._leaves(self.left)
        now = time.monotonic()
        if now > self.until:
            return _refusal(ExchangeTimeout, f"not all ranks came within {self.limit:g} s")
        if now > self._looked + _LOOK:
            self._looked = now
            try:
                self._read(_READ_AT_ONCE)
            except Malformed as error:
                return self._leaves(str(error))
            ended = [r for r, offer in self.offers.items() if _has_ended(offer.process)]
            if ended:
                return _refusal(PeerLost, f"rank {ended[0]} ended while the group was made")
        return ""

    def _all_others(self) -> list[int]:
        return [rank for rank in range(len(self.ranks)) if rank != self.rank]

    def _read(self, number: int) -> None:
        """Looks for at most `number` ranks that have not come to this round."""
        looked, self._missing = self._missing[:number], self._missing[number:]
        for rank in looked:
            key = f"came/{rank}"
            if self.store.check([key]):
                offer = self._offer(key, self.store.get(key))
                if offer.at >= self.since:  # else of another process, which may have ended
                    self.offers[rank] = offer
                if offer.round == self.round:
                    continue
            self._missing.append(rank)

    def _others(self, stage: str) -> str:
        """Says where the other ranks are, a line for each."""
        if stage == "came":
            with contextlib.suppress(Malformed):
                self._read(len(self._missing))
        lines = []
        for rank in self._all_others():
            offer = self.offers.get(rank)
            if offer is not None and _has_ended(offer.process):
                line = "has ended"
            elif offer is None:
                line = "has not come (ended, stopped, or elsewhere)"
            elif offer.round != self.round:
                line = f"came, for {offer.who}, and does not answer (ended, stopped, or elsewhere)"
            elif stage != "came" and not self.store.check([f"{self.round}/{stage}/{rank}"]):
                line = f"came, for {offer.who}, and is not connected"
            else:
                line = f"came, for {offer.who}"
            lines.append(f"rank {rank}: {line}")
        return "; ".join(lines)


def meet(
    topic: str,
    ranks: tuple[int, ...],
    rank: int,
    limit: float,
    offer: Offer,
    make: Callable[[list[Offer], str], Any] | None = None,
    begins_anew: bool = False,
    form: Any = None,
) -> Any:
    """Waits for all of `ranks` (global numbers, of which this process is the one at place `rank`),
    then runs make(the ranks' offers, a key of the store that is this attempt's), in another
    thread. Returns what it gives, or without it the values that ranks offer. begins_anew: what
    failed before concerns none of these ranks any more. form: a value that is like those which
    ranks offer, as _fits() compares them.

    Raises ExchangeTimeout, PeerLost or DivergenceError on every rank, after `limit` seconds and a
    few at most.
    """
    place = f"{offer.who}, while the group is made, rank {rank} of {len(ranks)}"
    attempt = _Attempt(topic, ranks, rank, limit, offer, form)
    if begins_anew:
        attempt.beginning = math.inf
    try:
        if _waiting.setdefault(attempt.topic, attempt) is not attempt:
            raise RuntimeError(
                f"{place}: got a call while another thread exchanges in the same group, expected "
                "one thread for each group (process_group=)"
            )
        attempt.before, _rounds[attempt.topic] = _rounds.get(attempt.topic, []), attempt.rounds
        result = apart.begin(lambda: attempt.run(make))
        while not apart.is_done(result, attempt.until + _GRACE - time.monotonic()):
            if time.monotonic() > attempt.until + _GRACE:
                raise ExchangeTimeout(
                    f"{place}: not all ranks came within {limit:g} s, and the store of "
                    "torch.distributed does not answer"
                )
    except BaseException as error:
        attempt.left = "it was interrupted" if not isinstance(error, Exception) else "it gave up"
        raise
    finally:
        if _waiting.get(attempt.topic) is attempt:
            del _waiting[attempt.topic]
    try:
        return result.result()
    except _Over as over:
        kind, text = over.args
        raise kind(f"{place}: {text}") from None
    except dist.DistError as error:
        raise PeerLost(
            f"{place}: the store of torch.distributed is gone; did the process end that holds it "
            f"(rank 0, or the launcher)? {error}"
        ) from error
