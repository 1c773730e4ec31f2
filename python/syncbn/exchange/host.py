# SPDX-License-Identifier: Apache-2.0
"""Messages that are summed on the host: a class for each way from rank to rank; and which way the
messages of a step take, by where they lie and to whom they go."""

import functools
from abc import abstractmethod

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ..errors import DivergenceError, ExchangeTimeout, PeerLost
from ..operators import (
    DIVERGED,
    DONE,
    DTYPES,
    FRAME_WORDS,
    FRAMED,
    HEADER_BACKWARD,
    HEADER_FLAGS,
    HEADER_WORDS,
    MESSAGE,
    NO_MEMORY,
    PENDING,
    REJECTED,
    SLICE,
    TIMEOUT,
    UNCHECKED,
    message_words,
    ops,
    without_modes,
)
from . import agreement, callers
from .call import Call, Peers
from .failing import Attempt, Refusal, Refused
from .transport import ALONE_WAY, InStream, Transport


def engine_of(peers: Peers) -> "OnHost":
    """Gives the way that the group was made with."""
    if peers.shared is None:
        return Gloo(peers)
    return SharedMemory(peers) if peers.nodes == 1 else SharedMemoryAndGloo(peers)


def _beyond(first: torch.Tensor, message: torch.Tensor, words: int) -> torch.Tensor:
    """Gives so many words of a message beyond what went first. A rank without samples, of another
    dtype than the group, brings zeros."""
    rest = message[first.numel() :][:words]
    return F.pad(rest, (0, words - rest.numel()))


class OnHost(Transport):
    """The way of messages on the host, where the calls of all ranks are compared. A class for each
    way from rank to rank has sum_words()."""

    peers: Peers
    way = message_way = FRAMED
    #: Words that a first message has at least; 0: it may have any length, also a wrong one.
    frame_words = FRAME_WORDS

    def __init__(self, peers: Peers) -> None:
        self.peers, self.ranks = peers, peers.ranks

    def within(self, seconds):
        """Gives the way to the same ranks, which wait for each other so long at most."""
        limit = min(self.peers.timeout, seconds)
        return type(self)(self.peers._replace(timeout=limit))

    @abstractmethod
    def sum_words(self, words: torch.Tensor, call: Call) -> torch.Tensor:
        """Sums int64 words, into a tensor of its own: backward needs the rank's own, too."""

    def sum_first(self, message: torch.Tensor, call: Call) -> torch.Tensor:
        """Sums what goes first: the frame."""
        return self.sum_words(message[: self.frame_words], call)

    def exchange(self, turn, message, merged, channels, records=0):
        turn.sent, call = True, turn.call
        first = self.sum_first(message, call) if merged is None else merged
        # A mode of the caller's that raised here would leave the others alone with the sum.
        with without_modes():
            dtype = agreement.check_header(first, self, call)
            words = 0 if dtype is None else message_words(channels, dtype, records)
            if words <= first.numel():
                return first, None
            rest = _beyond(first, message, words - first.numel())
        return first, self.sum_words(rest, call)

    def sum(self, x, tag, call):
        """Sums x after the tags, which go first, in a message of the frame's length."""
        if tag is not None:
            agreement.agree(torch.empty(0, dtype=torch.int64, device="cpu"), tag, self, call)
        return self._sum_numbers(x.cpu(), call).to(x.device)

    def _sum_numbers(self, x: torch.Tensor, call: Call) -> torch.Tensor:
        """Sums tensors of one of SUMMED, equal in shape on all ranks, over x."""
        numbers = torch.view_as_real(x) if x.is_complex() else x
        with Attempt(self.peers, call) as attempt:
            _sum_over_gloo(numbers, self.peers.group_name, attempt)
        return x

    def backward_of(self, word, merged, own, turn):
        if merged is not None:
            with without_modes():
                word = int(merged[HEADER_BACKWARD].item())
        return agreement.backward_of(word, own, self, turn.call)

    def refuse(self, call, error, x=None, parameter=None):
        reason = str(error).removeprefix(f"{call}, {self.peers}: ")
        text = f"{call}: {type(error).__name__}: {reason}"
        error.told_to = self.peers.group_name  # for what tells it to further ranks

        def tell() -> None:
            with without_modes():
                words = max(self.frame_words, HEADER_WORDS)
                refusal = torch.zeros(words, dtype=torch.int64, device="cpu")
                refusal[HEADER_FLAGS] = REJECTED
                self.sum_first(refusal, call)
                agreement.exchange_texts(text, self, call)

        Refusal(self.peers, text, tell)


def _sum_over_gloo(total: torch.Tensor, group: str, attempt: Attempt) -> torch.Tensor:
    """Sums over the group, and writes the sum over what it is made of."""
    options = dist.AllreduceOptions()
    options.timeout = attempt.timeout
    attempt.wait(callers.resolve(group).allreduce([total], options))
    return total


class Gloo(OnHost):
    """Messages over Gloo alone."""

    def __init__(self, peers: Peers) -> None:
        super().__init__(peers)
        self.name = "gloo" if peers.nodes == 1 else "gloo between nodes"

    def sum_words(self, words: torch.Tensor, call: Call) -> torch.Tensor:
        return self._sum_numbers(words.clone(), call)


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
        if status == DIVERGED:  # in their lengths; the headers say why
            merged = self.sum_words(given[-1][:HEADER_WORDS], call)
        return *given, merged, UNCHECKED  # the sum is there, and the output is not


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
                    total = _sum_over_gloo(total, self.peers.leaders, attempt)
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
