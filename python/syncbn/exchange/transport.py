# SPDX-License-Identifier: Apache-2.0
"""The way of a step's messages, one from each rank, which become one: what the steps of a layer ask
of it, what the ways have in common, and those that need no word from the host."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..errors import DivergenceError
from ..operators import (
    ALONE,
    HEADER_FLAGS,
    HEADER_WORDS,
    MESSAGE,
    MESSAGE_WORDS,
    REJECTED,
    WANTS_SUMS,
    WANTS_X,
    message_words,
)
from . import callers
from .call import Backward, Call, Peers

#: The first part of a sum, and the words beyond it or None.
Merged = tuple[torch.Tensor, torch.Tensor | None]
#: Dtypes that PyTorch's groups sum, on the CPU and on CUDA.
SUMMED = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32),
    *(torch.complex64, torch.complex128, torch.bool, torch.uint8, torch.int8, torch.int32),
    torch.int64,
)


class Transport(ABC):
    """Brings messages to the ranks of a group. Errors of an exchange are raised on every rank that
    takes part, and name the call. A turn is that of turn.py, in which it happens."""

    #: Its name, as report() shows it.
    name: str
    #: None: one rank.
    peers: Peers | None = None
    ranks = 1
    #: How far an operator goes that begins a direction: as far as it can, and to the message.
    way = message_way = MESSAGE
    #: Words that a first message has at least.
    frame_words = 0

    def begin(self, turn: Any, run: Callable, arguments: tuple, way: int) -> Any:
        """Runs an operator that begins a direction, as far as `way`, and gives what it gives."""
        try:
            return run(*arguments, way)
        except Exception as error:
            turn.refused(error)

    @abstractmethod
    def exchange(
        self,
        turn: Any,
        message: torch.Tensor,
        merged: torch.Tensor | None,
        channels: int,
        records: int = 0,
    ) -> Merged:
        """Sums a message over the group; the sum may be written over it. merged: the sum, where
        begin() has come to it; on CUDA a copy of the message, for the sum to be written over.
        records: as message_words() takes it.

        Raises DivergenceError if the calls differ; in stream order, where nobody waits for the
        device, they give NaN.
        """

    @abstractmethod
    def sum(self, x: torch.Tensor, tag: int | None, call: Call) -> torch.Tensor:
        """Gives the sum of x, contiguous and of one of SUMMED, over the group, and may write over
        x. tag: 20 bits, equal on ranks whose x may be summed; None: host.agree() has compared it.
        x is of one length on all ranks. Errors are those of exchange(), also in stream order where
        x has no NaN."""

    @abstractmethod
    def backward_of(self, word: int, merged: torch.Tensor | None, own: int, turn: Any) -> Backward:
        """Tells who takes part in the backward of a forward. word: what the merged header says, or
        merged the message that begins with it. own: this rank's word."""

    @abstractmethod
    def refuse(
        self,
        call: Call,
        error: BaseException,
        x: object = None,
        parameter: torch.Tensor | None = None,
    ) -> None:
        """Does what turn.refuse() says."""


def of_devices(messages: Sequence[torch.Tensor], lead: int) -> torch.Tensor:
    """Makes one message for the process, which speaks in the header as one rank: the elements of
    all inputs, the rest from the one that leads."""
    total = messages[0].clone()
    for message in messages[1:]:
        total += message.to(total.device)
    total[1:HEADER_WORDS] = messages[lead][1:HEADER_WORDS].to(total.device)
    return total


def with_record(
    total: torch.Tensor, messages: Sequence[torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    """Gives the message of the process its record: those of its devices, joined in their order by
    the formula that joins those of ranks (src/statistics/welford.hpp). messages: of the devices
    with samples, which are of that dtype."""
    kind = torch.float64 if dtype.itemsize == 8 else torch.float32
    records = [message[HEADER_WORDS:].to(total.device) for message in messages]
    read = [(r[0].double(), *r[1:].view(kind).view(-1, 2).double().unbind(1)) for r in records]
    count, mean, m2 = read[0]
    for more, of_more, m2_of_more in read[1:]:
        delta, share = of_more - mean, more / (count + more)
        mean = mean + delta * share
        m2 = m2 + (m2_of_more + delta * delta * (count * share))
        count = count + more
    moments = torch.stack((mean, m2), 1).to(kind).view(torch.int64).flatten()
    return torch.cat((total[:HEADER_WORDS], count.long().view(1), moments))


def with_places(message: torch.Tensor, transport: Transport) -> torch.Tensor:
    """Makes a message with a place for the record of each rank, in which the others have zeros."""
    record, peers = message[HEADER_WORDS:], transport.peers
    if peers is None:  # the message has the one place
        return message
    size = record.numel()
    words = max(transport.frame_words, HEADER_WORDS + peers.ranks * size)
    placed = message.new_zeros(words)
    placed[:HEADER_WORDS] = message[:HEADER_WORDS]
    placed[HEADER_WORDS + peers.rank * size :][:size] = record
    return placed


class Alone(Transport):
    """Keeps the messages of one rank, which sends nothing."""

    name = "none"
    way = ALONE

    def exchange(self, turn, message, merged, channels, records=0):
        return message if merged is None else merged, None

    def sum(self, x, tag, call):
        return x

    def backward_of(self, word, merged, own, turn):
        return Backward(bool(own & WANTS_X), bool(own & WANTS_SUMS)) if own else _NO_BACKWARD

    def refuse(self, call, error, x=None, parameter=None):
        """Tells nobody: nobody waits for this rank."""


ALONE_WAY, _NO_BACKWARD = Alone(), Backward(False, False)


class InStream(Transport):
    """Sends messages on CUDA over the caller's own NCCL group. The host waits for nothing and knows
    of no error: they are NCCL's and its watchdog's. device: of the messages."""

    name = "nccl"
    peers: Peers

    def __init__(self, peers: Peers, device: torch.device) -> None:
        self.peers, self.ranks, self.device = peers, peers.ranks, device

    def _add(self, message: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(message, group=callers.resolve(self.peers.cuda))
        return message

    def exchange(self, turn, message, merged, channels, records=0):
        turn.sent = True
        return self._add(message if merged is None else merged), None

    def sum(self, x, tag, call):
        """Sums x in its own dtype, and the tags in a message of their own, whose sums are exact."""
        total = self._add(x)
        if tag is None:
            return total
        tags = x.new_full((2,), tag, dtype=torch.int64)
        tags[1].mul_(tag)  # the sum of 2,048 squares has 51 bits
        tag_sum, squares = self._add(tags)
        alike = self.peers.ranks * squares == tag_sum * tag_sum
        if x.is_floating_point() or x.is_complex():
            return torch.where(alike, total, math.nan)
        if not alike:  # the host waits for the device
            raise DivergenceError(f"{call}, {self.peers}: the ranks did not make the same call")
        return total

    def backward_of(self, word, merged, own, turn):
        """Expects every rank that has a node: nobody looks at the header."""
        return Backward(True, True)

    def refuse(self, call, error, x=None, parameter=None):
        """Gives the others NaN, if the length of their messages can be known: their channels, and
        by x their dtype. Else, and where they are in sum(), they wait for NCCL's time limit."""
        if not isinstance(x, torch.Tensor) or x.dtype not in MESSAGE_WORDS:
            return
        if call.direction not in ("forward", "backward"):
            return
        if parameter is not None:
            channels = parameter.numel()
        else:
            channels = 0 if x.is_nested or x.dim() < 2 else x.shape[1]
        if channels == 0:
            return
        options = call.options if call.direction == "forward" else None
        welford = options is not None and options.statistics == "welford"
        words = message_words(channels, x.dtype, self.ranks if welford else 0)
        message = torch.zeros(words, dtype=torch.int64, device=self.device)
        message[HEADER_FLAGS : HEADER_FLAGS + 1].fill_(REJECTED)
        self._add(message)
