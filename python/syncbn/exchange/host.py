# SPDX-License-Identifier: Apache-2.0
"""Messages that are summed on the host: a class for each way from rank to rank; and which way the
messages of a step take, by where they lie and to whom they go."""

import functools

import torch
import torch.nn.functional as F

from ..errors import DivergenceError, ExchangeTimeout, PeerLost
from ..operators import (
    DIVERGED,
    DONE,
    DTYPES,
    HEADER_WORDS,
    MESSAGE,
    NO_MEMORY,
    PENDING,
    SLICE,
    TIMEOUT,
    UNCHECKED,
    message_words,
    ops,
)
from . import agreement
from .agreement import OnHost, sum_over_gloo
from .call import Call, Peers
from .failing import Attempt, Refused
from .transport import ALONE_WAY, InStream, Transport


def engine_of(peers: Peers) -> "OnHost":
    """Gives the way that the group was made with."""
    if peers.shared is None:
        return Gloo(peers)
    return SharedMemory(peers) if peers.nodes == 1 else SharedMemoryAndGloo(peers)


class Gloo(OnHost):
    """Messages over Gloo alone."""

    def __init__(self, peers: Peers) -> None:
        super().__init__(peers)
        self.name = "gloo" if peers.nodes == 1 else "gloo between nodes"

    def sum_words(self, words: torch.Tensor, call: Call) -> torch.Tensor:
        return self._sum_numbers(words, call)


class _InMemory(OnHost):
    """Messages in memory that the processes of a node share."""

    def __init__(self, peers: Peers) -> None:
        super().__init__(peers)
        assert peers.shared is not None
        self._handle = peers.shared

    def _all_reduce(self, words: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Gives the sum over the node, and a status."""
        total, status = ops.shm_sum(words, self._handle, SLICE)
        return total, _finish(self._handle, status)

    def _sum_on_node(self, words: torch.Tensor, attempt: Attempt) -> torch.Tensor:
        """Sums over the node. Raises DivergenceError if lengths differ, which breaks the group: the
        ranks are in different exchanges."""
        total, status = self._all_reduce(words)
        if status == DIVERGED:
            reason = _error(self._handle).removeprefix(f"{self.peers}: ")
            raise DivergenceError(f"{attempt.call}, {self.peers}: {reason}")
        self._fail_unless_done(status, attempt)
        return total

    def _fail_unless_done(self, status: int, attempt: Attempt) -> None:
        if status != DONE:
            kind = ExchangeTimeout if status == TIMEOUT else PeerLost
            attempt.fail(kind, _error(self._handle))


def _error(handle: int) -> str:
    """Gives the text of the group's last one."""
    return ops.shm_wait(handle, 0)[1]


def _finish(handle: int, status: int) -> int:
    """Gives the status at the end of an exchange that has begun. Python is in between 20 times a
    second, so that Ctrl-C works."""
    while status == PENDING:
        status, _ = ops.shm_wait(handle, SLICE)
    return status


class SharedMemory(_InMemory):
    """Messages between processes of one node."""

    name = "shared memory"
    frame_words = 0
    message_way = MESSAGE

    def __init__(self, peers: Peers) -> None:
        super().__init__(peers)
        self.way = self._handle

    def sum_words(self, words: torch.Tensor, call: Call) -> torch.Tensor:
        with Attempt(self.peers, call) as attempt:
            return self._sum_on_node(words, attempt)

    def sum_first(self, message: torch.Tensor, call: Call) -> torch.Tensor:
        """Sums the whole message; if lengths differ the header alone, which tells why."""
        with Attempt(self.peers, call) as attempt:
            total, status = self._all_reduce(message)
            if status != DIVERGED:
                self._fail_unless_done(status, attempt)
                return total
        return self.sum_words(message[:HEADER_WORDS], call)

    def begin(self, turn, run, arguments, way):
        if way != self.way:
            return super().begin(turn, run, arguments, way)
        call, handle = turn.call, self._handle
        try:
            with Attempt(self.peers, call) as attempt:
                try:
                    begun = run(*arguments, handle)
                except Exception as error:
                    raise Refused(error) from error
                turn.sent = True
                *given, merged, status = begun
                if status == DONE:
                    return begun
                status = _finish(handle, status)
                if status == NO_MEMORY:
                    raise MemoryError(_error(handle))
                if status not in (DIVERGED, UNCHECKED):
                    self._fail_unless_done(status, attempt)
        except Refused as refused:
            turn.refused(refused.args[0])
        return *given, None if status == DIVERGED else merged, status


class SharedMemoryAndGloo(_InMemory):
    """Messages between the processes of each node; then between the nodes' first ranks, who bring
    the sum to the others."""

    name = "shared memory, gloo between nodes"

    def sum_words(self, words: torch.Tensor, call: Call) -> torch.Tensor:
        with Attempt(self.peers, call) as attempt:
            total = self._sum_on_node(words, attempt)
            if self.peers.leaders is None:
                total.zero_()
            else:
                try:
                    total = sum_over_gloo(total, self.peers.leaders, attempt)
                except BaseException as error:
                    ops.shm_leave(self._handle, f"between nodes: {error}"[:200])
                    raise
            return self._sum_on_node(total, attempt)


class ThroughHost(Transport):
    """Messages on CUDA of groups without NCCL; the host waits for the device, and frames them."""

    def __init__(self, peers: Peers) -> None:
        self.peers, self.ranks, self.engine = peers, peers.ranks, engine_of(peers)
        self.name = f"{self.engine.name}, through the host"

    def exchange(self, turn, message, merged, channels, records=0):
        """Gives the merged message in one piece."""
        own = message.cpu()
        framed = F.pad(own, (0, max(0, self.engine.frame_words - own.numel())))
        first, rest = self.engine.exchange(turn, framed, None, channels, records)
        merged = first if rest is None else torch.cat([first, rest])
        dtype = int(ops.header(first, self.engine.peers.ranks)[3])
        # A rank without samples may be of another dtype than the group, whose length then counts.
        words = own.numel() if dtype < 0 else message_words(channels, DTYPES[dtype], records)
        merged = F.pad(merged[:words], (0, max(0, words - merged.numel())))
        return merged.to(message.device), None

    def sum(self, x, tag, call):
        return self.engine.sum(x, tag, call)

    def backward_of(self, word, merged, own, turn):
        return self.engine.backward_of(word, merged, own, turn)

    def refuse(self, call, error, x=None, parameter=None):
        self.engine.refuse(call, error)


@functools.lru_cache(maxsize=1024)
def transport_of(peers: Peers | None, device: torch.device) -> Transport:
    """Gives the way of messages on that device to these peers."""
    if peers is None:
        return ALONE_WAY
    if device.type != "cuda":
        return engine_of(peers)
    if not peers.cuda:
        return ThroughHost(peers)
    return InStream(peers, device)


def agree(peers: Peers, tag: int, call: Call) -> None:
    """Compares tags (20 bits) of the ranks over the host, also where their tensors go another way.
    Raises DivergenceError on every rank if they differ."""
    agreement.agree(torch.empty(0, dtype=torch.int64, device="cpu"), tag, engine_of(peers), call)
