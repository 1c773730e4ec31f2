# SPDX-License-Identifier: Apache-2.0
"""How int64 words are summed over the ranks of a group on the host: a class for each engine."""

import ctypes
import time
from abc import abstractmethod
from collections.abc import Callable

import torch
import torch.distributed as dist

from ..errors import DivergenceError, ExchangeTimeout, PeerLost
from ..operators import (
    DIVERGED,
    DONE,
    HEADER_WORDS,
    MESSAGE,
    NO_MEMORY,
    PENDING,
    TIMEOUT,
    UNCHECKED,
    ops,
)
from . import callers, connections, whereabouts
from .attempt import Attempt, Refused, Waiting
from .call import Call, Peers, Times

#: Words of the first message of an exchange over Gloo, the same for every call of the group: Gloo
#: ends the process when ranks bring different lengths, so lengths may differ only after the first
#: message has shown that the calls agree. 512 channels of float32 fit.
FRAME_WORDS = HEADER_WORDS + 512 * 19

#: Milliseconds that an operator waits in shared memory.
_SLICE = 50
#: Rounds of looking before the wait for Gloo begins to sleep.
_SPINS = 100


def engine_of(peers: Peers) -> "Engine":
    """The one that the group was made with."""
    if peers.shared is None:
        return Gloo(peers)
    return SharedMemory(peers) if peers.nodes == 1 else SharedMemoryAndGloo(peers)


class Engine(Waiting):
    """Of a group. Errors name the call, and where the other ranks are."""

    #: Its name, as report() shows it.
    name: str
    #: Words that a first message has at least; 0: it may have any length, also a wrong one.
    frame_words = FRAME_WORDS
    #: How far an operator that begins a direction goes.
    way = MESSAGE

    @abstractmethod
    def sum(self, words: torch.Tensor, call: Call) -> torch.Tensor:
        """Over the ranks, a tensor of its own: backward needs the rank's own words too."""

    @abstractmethod
    def gather(self, words: torch.Tensor, call: Call) -> torch.Tensor:
        """The words of all ranks, one after the other; of equal length on all ranks."""

    def sum_first(self, message: torch.Tensor, call: Call) -> torch.Tensor:
        """The sum of what goes first: the frame."""
        return self.sum(message[: self.frame_words], call)

    def sum_of_numbers(self, x: torch.Tensor, call: Call) -> torch.Tensor:
        """The sum of tensors of any dtype, equal in shape on all ranks."""
        with Attempt(self, call) as attempt:
            return _sum_over_gloo(x.clone(), self.peers.group_name, attempt)


class Gloo(Engine):
    def __init__(self, peers: Peers) -> None:
        super().__init__(peers)
        self.name = "gloo" if peers.nodes == 1 else "gloo between nodes"

    def sum(self, words: torch.Tensor, call: Call) -> torch.Tensor:
        return self.sum_of_numbers(words, call)

    def gather(self, words: torch.Tensor, call: Call) -> torch.Tensor:
        out = words.new_empty(self.peers.ranks, words.numel())
        with Attempt(self, call) as attempt:
            options = dist.distributed_c10d.AllgatherOptions()
            options.timeout = attempt.timeout
            group = callers.resolve(self.peers.group_name)
            _wait(group.allgather([list(out)], [words], options), attempt)
        return out.flatten()

    def abandon(self, why: str) -> None:
        """They look at the store: works of Gloo cannot be stopped."""
        _tell(self.peers, f"rank {self.peers.rank} left the group: {why}")
        _keep(self.peers)

    def pass_on(self, why: str) -> None:
        if self.peers.nodes > 1:
            _tell(self.peers, why)


class _InMemory(Engine):
    """Over memory that the processes of a node share."""

    @property
    def _handle(self) -> int:
        assert self.peers.shared is not None
        return self.peers.shared

    def _all_reduce(self, words: torch.Tensor) -> tuple[torch.Tensor, int]:
        """The sum over the node, and a status."""
        total, status = ops.shm_sum(words, self._handle, _SLICE)
        return total, _finish(self._handle, status)

    def _sum_on_node(self, words: torch.Tensor, attempt: Attempt) -> torch.Tensor:
        """Raises DivergenceError if lengths differ, which breaks the group: the ranks are in
        different exchanges."""
        total, status = self._all_reduce(words)
        if status == DIVERGED:
            reason = ops.shm_error(self._handle).removeprefix(f"{self.peers}: ")
            raise DivergenceError(f"{attempt.call}, {self.peers}: {reason}")
        self._fail_unless_done(status, attempt)
        return total

    def _fail_unless_done(self, status: int, attempt: Attempt) -> None:
        if status != DONE:
            kind = ExchangeTimeout if status == TIMEOUT else PeerLost
            attempt.fail(kind, ops.shm_error(self._handle))

    def gather(self, words: torch.Tensor, call: Call) -> torch.Tensor:
        places = words.new_zeros(self.peers.ranks, words.numel())
        places[self.peers.rank] = words
        return self.sum(places.flatten(), call)

    def set_limit(self, limit: float) -> None:
        connections.set_limit(self._handle, limit)

    def abandon(self, why: str) -> None:
        ops.shm_abandon(self._handle, why[:400])


def _finish(handle: int, status: int) -> int:
    """The status at the end of an exchange that has begun. Comes back to Python 20 times a second,
    so that Ctrl-C works."""
    while status == PENDING:
        status = ops.shm_finish(handle, _SLICE)
    return status


class SharedMemory(_InMemory):
    """Between processes of one node."""

    name = "shared memory"
    frame_words = 0

    @property
    def way(self) -> int:  # type: ignore[override]
        return self._handle

    def note(self, times: Times, seconds: float) -> None:
        summed, waited = ops.shm_times(self._handle)
        times.add(summed, waited, seconds - summed - waited)

    def sum(self, words: torch.Tensor, call: Call) -> torch.Tensor:
        with Attempt(self, call) as attempt:
            return self._sum_on_node(words, attempt)

    def sum_first(self, message: torch.Tensor, call: Call) -> torch.Tensor:
        """The whole message; if lengths differ the header alone, which tells why."""
        with Attempt(self, call) as attempt:
            total, status = self._all_reduce(message)
            if status != DIVERGED:
                self._fail_unless_done(status, attempt)
                return total
        return self.sum(message[:HEADER_WORDS], call)

    def step(self, run: Callable[..., tuple], arguments: tuple, call: Call) -> tuple:
        """Runs an operator that begins a direction, and the exchange with it. Returns (what it
        gives, None, None), or where it could not go on (what it gives, this rank's message, the sum
        of what goes first). Raises Refused where it refuses its arguments."""
        handle = self._handle
        with Attempt(self, call) as attempt:
            try:
                *given, message, total, status = run(*arguments, handle, _SLICE)
            except Exception as error:
                raise Refused from error
            if status == DONE:
                return given, None, None
            status = _finish(handle, status)
            if status == NO_MEMORY:
                raise MemoryError(ops.shm_error(handle))
            if status not in (DIVERGED, UNCHECKED):
                self._fail_unless_done(status, attempt)
        if status == DIVERGED:
            total = self.sum(message[:HEADER_WORDS], call)
        return given, message, total


class SharedMemoryAndGloo(_InMemory):
    """Between the processes of each node; then between the nodes' first ranks, who bring the sum to
    the others."""

    name = "shared memory, gloo between nodes"

    def sum(self, words: torch.Tensor, call: Call) -> torch.Tensor:
        with Attempt(self, call) as attempt:
            total = self._sum_on_node(words, attempt)
            if self.peers.leaders is None:
                total.zero_()
            else:
                try:
                    total = _sum_over_gloo(total, self.peers.leaders, attempt)
                except BaseException as error:
                    ops.shm_abandon(self._handle, f"between nodes: {error}"[:200])
                    raise
            return self._sum_on_node(total, attempt)

    def abandon(self, why: str) -> None:
        super().abandon(why)
        self.pass_on(f"rank {self.peers.rank} left the group: {why}")
        _keep(self.peers)

    def pass_on(self, why: str) -> None:
        """The other nodes do not see it."""
        _tell(self.peers, why)


def _tell(peers: Peers, why: str) -> None:
    whereabouts.tell(peers.group_name, why[:400])


def _keep(peers: Peers) -> None:
    """For ever: the end of a Gloo group waits for works that nobody will finish."""
    for name in (peers.group_name, peers.leaders):
        if name is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(callers.resolve(name)))


def _sum_over_gloo(total: torch.Tensor, group: str, attempt: Attempt) -> torch.Tensor:
    """The sum over the group, which is written over what it is made of."""
    options = dist.AllreduceOptions()
    options.timeout = attempt.timeout
    _wait(callers.resolve(group).allreduce([total], options), attempt)
    return total


def _wait(work: dist.Work, attempt: Attempt) -> None:
    """Waits for a collective over Gloo, looking at it again and again, so that Ctrl-C works."""
    late = f"not all ranks came within {attempt.limit:g} s"
    try:
        until = time.monotonic() + attempt.limit
        rounds = 0
        while not work.is_completed() and time.monotonic() <= until:
            rounds += 1
            if (
                rounds % _SPINS == 0
                and (why := whereabouts.left(attempt.peers.group_name)) is not None
            ):
                _keep(attempt.peers)
                attempt.fail(PeerLost, why)
            time.sleep(0 if rounds < _SPINS else 5e-5 if rounds < 20_000 else 1e-3)
        if not work.is_completed():
            attempt.fail(ExchangeTimeout, late)
        work.wait()  # for its error
    except (ExchangeTimeout, PeerLost):
        raise
    except RuntimeError as error:
        if "timed out" in str(error).lower():
            attempt.fail(ExchangeTimeout, late, error)
        attempt.fail(PeerLost, "a rank has ended, or closed its connections", error)
