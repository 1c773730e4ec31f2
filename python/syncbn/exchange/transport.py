# SPDX-License-Identifier: Apache-2.0
"""The way of a step's messages, one from each rank, which become one: what the steps of a layer ask
of it, what the ways have in common, and those that need no word from the host."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch._C import _len_torch_dispatch_stack

from ..errors import DivergenceError, ExchangeTimeout, PeerLost
from ..operators import (
    ALONE,
    DONE,
    HEADER_WORDS,
    IN_PLACE,
    MESSAGE,
    MESSAGE_WORDS,
    message_words,
    without_modes,
)
from . import callers
from .call import (
    WANTS_SUMS,
    WANTS_X,
    Backward,
    Call,
    Peers,
    Refused,
    explained,
    lacks_memory,
    ranged,
)
from .failing import abandon

#: Errors after an exchange that all ranks have.
_OF_ALL_RANKS = (DivergenceError, ExchangeTimeout, PeerLost, ValueError)


class Transport(ABC):
    """Brings messages to the ranks of a group. Errors of an exchange are raised on every rank that
    takes part, and name the call."""

    #: Its name, as report() shows it.
    name: str
    #: None: one rank.
    peers: Peers | None = None
    #: Whether the others hear of it where this rank leaves the group.
    on_host = False
    #: How far an operator that begins a direction goes.
    way = MESSAGE
    #: Words that a message has at least.
    frame_words = 0

    @abstractmethod
    def exchange(
        self, message: torch.Tensor, channels: int, call: Call, records: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sums a message over the group; the sum may be written over it. records: as
        message_words() takes it.

        Returns (first part, the words beyond it or None). Raises DivergenceError if the calls
        differ; in stream order, where nobody waits for the device, they give NaN.
        """

    @abstractmethod
    def sum(self, x: torch.Tensor, tag: int, call: Call) -> torch.Tensor:
        """Sums x, float64, over the group; tag: 20 bits, equal on ranks whose x may be summed.
        Errors are those of exchange()."""

    @abstractmethod
    def backward_of(self, word: int, merged: torch.Tensor | None, own: int, call: Call) -> Backward:
        """Tells who takes part in the backward of a forward. word: what the merged header says, or
        merged the message that begins with it. own: this rank's word."""

    @abstractmethod
    def reject(
        self,
        call: Call,
        error: BaseException,
        x: object = None,
        parameter: torch.Tensor | None = None,
    ) -> None:
        """Does what host.reject() says."""

    def leave(self, error: BaseException, call: Call) -> None:
        """Tells the others of an error that ends a step of a layer on this rank alone, also before
        and after the exchange. The caller raises the error again; what lacks memory is
        raised here, with the layer's name."""
        no_memory = lacks_memory(error)
        own = no_memory or not isinstance(error, Exception)
        # A mode of the caller's may raise anything, anywhere.
        own = own or (_len_torch_dispatch_stack() > 0 and not isinstance(error, _OF_ALL_RANKS))
        if getattr(error, "told", False) or not own:
            return
        if self.on_host and self.peers is not None:
            abandon(self.peers, call, error)
        if no_memory:
            raise _told(explained(error, call, self.peers)) from error

    def begin(
        self,
        run,
        passes: Sequence[tuple],
        lead: int,
        way: int | None,
        call: Call | None,
        gathers: bool = False,
        checked: bool = True,
    ) -> tuple[list, tuple | None]:
        """Begins a direction, which ends here where it can.

        run: the operator. passes: its arguments but for the last two, of each input of this
        process. lead: the input that speaks for all. way: how far the operator goes; None: as far
        as this transport lets it. gathers: the messages are records. checked: an argument that it
        refuses is an error that the others hear of, and not Refused. call: None of one rank whose
        caller names the errors.

        Returns (what the operator gives of each input; None, or where the direction has not come to
        its end, this rank's message and what exchange() returns of it). In what it
        gives, the last but one is the sum over the group of a direction that came to its end in
        shared memory, or by NOTED.
        """
        given, messages = [], []
        way = self.way if way is None else way
        last = (way, 0 if gathers else self.frame_words)
        if way in (MESSAGE, IN_PLACE):
            run = ranged(run, call, "sums")
        for arguments in passes:
            try:
                outputs = run(*arguments, *last)
            except Exception as error:
                raise self._failed(error, passes[lead][0], call, checked) from None
            given.append(outputs)
            message, copy, status = outputs[-3:]
            if message is not None:
                messages.append((message, message if copy is None else copy))
        if status == DONE or message is None:
            return given, None
        own, message = messages[0]
        if len(messages) > 1:
            own = _total([own for own, _ in messages], lead)
            message = own if message is messages[0][0] else own.clone()
        x, records = passes[lead][0], 0
        if gathers and self.peers is not None:
            records = self.peers.ranks
            placing = (message, self.peers, self.frame_words)
            message = self.refusing(with_places, placing, x, call)
        exchange = ranged(self.exchange, call, "exchange")
        # One rank's messages go nowhere.
        return given, (own, *exchange(message, x.size(1), call, records))

    def refusing(
        self, run, arguments: tuple, x: torch.Tensor, call: Call | None, checked: bool = True
    ):
        """Calls run(*arguments), before an exchange. Its error is told to the others, or, where the
        arguments are not checked, an argument that it refuses is Refused. call: as in begin()."""
        try:
            return run(*arguments)
        except Exception as error:
            raise self._failed(error, x, call, checked) from None

    def _failed(
        self, error: BaseException, x: torch.Tensor, call: Call | None, checked: bool
    ) -> BaseException:
        """Gives what to raise for an error of an operator before an exchange, of which the others
        hear. Without a call it is the error as it is."""
        if call is None or not (checked or lacks_memory(error)):
            return error if checked else Refused()
        error = explained(error, call, self.peers)
        with without_modes():
            self.reject(call, error, x=x)
        return _told(error)


def _told(error: BaseException) -> BaseException:
    """Marks an error for leave(): the others know it."""
    error.told = True  # type: ignore[attr-defined]
    return error


def _total(messages: Sequence[torch.Tensor], lead: int) -> torch.Tensor:
    """Makes one message for the process, which speaks in the header as one rank: the elements of
    all inputs, the rest from the one that leads."""
    total = messages[0].clone()
    for message in messages[1:]:
        total += message.to(total.device)
    total[1:HEADER_WORDS] = messages[lead][1:HEADER_WORDS].to(total.device)
    return total


def with_places(message: torch.Tensor, peers: Peers, frame_words: int) -> torch.Tensor:
    """Makes a message with a place for the record of each rank, in which the others have zeros."""
    record = message[HEADER_WORDS:]
    size = record.numel()
    words = max(frame_words, HEADER_WORDS + peers.ranks * size)
    placed = message.new_zeros(words)
    placed[:HEADER_WORDS] = message[:HEADER_WORDS]
    placed[HEADER_WORDS + peers.rank * size :][:size] = record
    return placed


class Alone(Transport):
    """Keeps the messages of one rank, which sends nothing."""

    name = "none"
    way = ALONE

    def exchange(self, message, channels, call, records=0):
        return message, None

    def sum(self, x, tag, call):
        return x

    def backward_of(self, word, merged, own, call):
        return Backward(bool(own & WANTS_X), bool(own & WANTS_SUMS)) if own else _NO_BACKWARD

    def reject(self, call, error, x=None, parameter=None):
        """Tells nobody: nobody waits for this rank."""


ALONE_WAY, _NO_BACKWARD = Alone(), Backward(False, False)


class InStream(Transport):
    """Sends messages on CUDA over the caller's own NCCL group. The host waits for nothing and knows
    of no error: they are NCCL's and its watchdog's. device: of the messages."""

    name = "nccl"
    peers: Peers

    def __init__(self, peers: Peers, device: torch.device) -> None:
        self.peers, self.device = peers, device

    def exchange(self, message, channels, call, records=0):
        dist.all_reduce(message, group=callers.resolve(self.peers.cuda))
        return message, None

    def sum(self, x, tag, call):
        """Sums x and the tags in one message."""
        tags = [x.new_full((1,), t) for t in (tag, tag * tag)]  # of up to 2,048 ranks exact
        total = torch.cat([x.flatten(), *tags])
        self.exchange(total, 0, call)
        tag_sum, squares = total[-2:].to(torch.int64)
        alike = self.peers.ranks * squares == tag_sum * tag_sum
        return torch.where(alike, total[:-2].view(x.shape), math.nan)

    def backward_of(self, word, merged, own, call):
        """Expects every rank that has a node: nobody looks at the header."""
        return Backward(True, True)

    def reject(self, call, error, x=None, parameter=None):
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
        words = message_words(channels, x.dtype, self.peers.ranks if welford else 0)
        message = torch.zeros(words, dtype=torch.int64, device=self.device)
        message[3:4].fill_(1)  # ranks that refuse
        self.exchange(message, channels, call)
