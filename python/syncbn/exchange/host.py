# SPDX-License-Identifier: Apache-2.0
"""Messages that are summed on the host: a class for each way from rank to rank; and which way the
messages of a step take, by where they lie and to whom they go."""

import functools

import torch
import torch.nn.functional as F
from torch.autograd import profiler

from ..errors import DivergenceError, ExchangeTimeout, PeerLost
from ..operators import (
    DIVERGED,
    DONE,
    DTYPES,
    HEADER_WORDS,
    MESSAGE,
    NO_MEMORY,
    PENDING,
    TIMEOUT,
    UNCHECKED,
    message_words,
    ops,
)
from . import callers
from .agreement import OnHost, sum_over_gloo
from .call import Call, Peers, Refused
from .failing import Attempt
from .transport import ALONE_WAY, InStream, Transport

#: Milliseconds that an operator waits in shared memory.
_SLICE = 50


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
        total, status = ops.shm_sum(words, self._handle, _SLICE)
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
        status, *_ = ops.shm_wait(handle, _SLICE)
    return status


class SharedMemory(_InMemory):
    """Messages between processes of one node."""

    name = "shared memory"
    frame_words = 0

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

    def begin(self, run, passes, lead, way, call, gathers=False, checked=True):
        if way is None and profiler._is_profiler_enabled:
            way = MESSAGE  # whose parts are ranges
        if way is not None:
            return super().begin(run, passes, lead, way, call, gathers, checked)
        (arguments,) = passes
        handle = self._handle
        try:
            with Attempt(self.peers, call) as attempt:
                try:
                    given = [*run(*arguments, handle, _SLICE)]
                except Exception as error:
                    raise Refused(error) from error
                *_, message, total, status = given
                if status == DONE:
                    return [given], None
                status = _finish(handle, status)
                if status == NO_MEMORY:
                    raise MemoryError(_error(handle))
                if status not in (DIVERGED, UNCHECKED):
                    self._fail_unless_done(status, attempt)
        except Refused as refused:
            raise self._failed(refused.args[0], arguments[0], call, checked) from None
        if message is None:
            return [given], None
        if status == DIVERGED:
            total = self.sum_words(message[:HEADER_WORDS], call)
        return [given], (message, *self._rest_after(total, message, call.channels, call))


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

    on_host = True

    def __init__(self, peers: Peers) -> None:
        self.peers, self.engine = peers, engine_of(peers)
        self.name = f"{self.engine.name}, through the host"

    def exchange(self, message, channels, call, records=0):
        """Gives the merged message in one piece."""
        own = message.cpu()
        framed = F.pad(own, (0, max(0, self.engine.frame_words - own.numel())))
        first, rest = self.engine.exchange(framed, channels, call, records)
        merged = first if rest is None else torch.cat([first, rest])
        dtype = int(ops.header(first, self.engine.peers.ranks)[3])
        # A rank without samples may be of another dtype than the group, whose length then counts.
        words = own.numel() if dtype < 0 else message_words(channels, DTYPES[dtype], records)
        merged = F.pad(merged[:words], (0, max(0, words - merged.numel())))
        return merged.to(message.device), None

    def sum(self, x, tag, call):
        return self.engine.sum(x, tag, call)

    def backward_of(self, word, merged, own, call):
        return self.engine.backward_of(word, merged, own, call)

    def reject(self, call, error, x=None, parameter=None):
        self.engine.reject(call, error)


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


def reject(
    peers: Peers | None,
    call: Call,
    error: BaseException,
    x: object = None,
    parameter: torch.Tensor | None = None,
    counter: torch.Tensor | None = None,
) -> None:
    """Takes part in an exchange with the word that this rank cannot, so that the others get its
    error now and not when their time is up. x: this rank's input. parameter: one that has the
    layer's number of channels. counter: a tensor of any shape that lies where the layer does."""
    if peers is not None:
        parameter = parameter if isinstance(parameter, torch.Tensor) else None  # it may be refused
        device = _device_of_others(peers, x, parameter, counter)
        transport_of(peers, device).reject(call, error, x, parameter)


def _device_of_others(
    peers: Peers,
    x: object,
    parameter: torch.Tensor | None,
    counter: torch.Tensor | None,
) -> torch.device:
    """Tells where the messages of ranks lie that do not refuse, which decides the way that they
    take: where the layer lies, because the input may be what is refused."""
    if parameter is not None:
        return parameter.device
    if counter is not None and counter.is_cuda:  # else the layer may not have been called yet
        return counter.device
    if callers.is_nccl_alone(peers.cuda):
        return callers.device_of(peers.cuda)
    return x.device if isinstance(x, torch.Tensor) else torch.device("cpu")
