# SPDX-License-Identifier: Apache-2.0
"""The way of a step's messages, one from each rank, which become one: what the steps of a layer ask
of it, and what the ways have in common."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..operators import HEADER_WORDS, ops
from . import attempt
from .agreement import Backward
from .call import Call
from .groups import Peers
from .times import timed


class Transport(ABC):
    """Errors of an exchange are raised on every rank that takes part, and name the call."""

    #: Its name, as report() shows it.
    name: str
    #: None: one rank.
    peers: Peers | None = None
    #: Where this rank tells the others that it does not come, if they look there.
    engine: attempt.Waiting | None = None
    #: Words that a message has at least.
    frame_words = 0
    #: Whether step() takes operators.
    takes_steps = False
    #: Whether exchange_over() writes the sum over the message.
    sums_in_place = False

    @abstractmethod
    def exchange(
        self, message: torch.Tensor, channels: int, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sums a message over the group.

        Returns (first part, the words beyond it or None). Raises DivergenceError if the calls
        differ; in stream order, where nobody waits for the device, they give NaN.
        """

    def exchange_over(
        self, message: torch.Tensor, channels: int, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As exchange(), of a message whose memory it may take for the sum."""
        return self.exchange(message, channels, call)

    @abstractmethod
    def gather(
        self, message: torch.Tensor, channels: int, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Brings every rank's record of the welford mode to all ranks.

        Returns (merged message, whose header counts; records, one after the other, on CUDA each
        behind its header). Errors as in exchange().
        """

    @abstractmethod
    def sum(self, x: torch.Tensor, tag: int, call: Call) -> torch.Tensor:
        """The sum of x over the group, float64; tag: 20 bits, equal on ranks whose x may be summed.
        Errors as in exchange()."""

    @abstractmethod
    def backward_of(self, merged: torch.Tensor, own: int, call: Call) -> Backward:
        """As agreement.backward_of(), of a merged message."""

    @abstractmethod
    def reject(
        self,
        call: Call,
        error: BaseException,
        compare: bool = True,
        x: object = None,
        parameter: torch.Tensor | None = None,
    ) -> None:
        """As transports.reject()."""

    def step(self, run, arguments: tuple, call: Call) -> tuple:
        """Runs an operator of a whole direction. Returns (what it gives; None, or where it could
        not go on this rank's message and what exchange() returns of it). Raises Refused where
        it refuses its arguments."""
        raise attempt.Refused

    def leave(self, error: BaseException, call: Call) -> None:
        """As attempt.leave()."""
        attempt.leave(error, self.engine, call, self.peers)

    def sums_of(
        self,
        name: str,
        passes: Sequence[tuple],
        lead: int,
        channels: int,
        call: Call,
        keeps: bool = False,
    ) -> tuple:
        """(Message, what else the passes give, merged, rest): runs the operator local_`name` on
        each of the inputs of this process, and exchange_over() on the sum of their messages.
        passes: the arguments before and behind the frame's words. lead: the input that speaks for
        all. keeps: the message is wanted afterwards; the operator then gives it twice, if need be.
        """
        run = getattr(ops, f"local_{name}")
        copies = keeps and self.sums_in_place
        twice = (True,) if copies and len(passes) == 1 else ()
        messages, others = list[torch.Tensor](), list[torch.Tensor]()
        for arguments, rest in passes:
            given = self.refusing(
                run, (*arguments, self.frame_words, *rest, *twice), passes[lead][0][0], call
            )
            message, *other = (given,) if isinstance(given, torch.Tensor) else given
            messages.append(message)
            others += other
        if twice:
            message, own = messages[0].chunk(2)
        else:
            message = messages[0] if len(messages) == 1 else _total(messages, lead)
            own = message.clone() if copies else message
        return own, others, *self.exchange_over(message, channels, call)

    def refusing(self, run, arguments: tuple, x: torch.Tensor, call: Call):
        """run(*arguments), a pass over x before an exchange. Its error is told to the others."""
        try:
            return timed(run, call.times, "summed")(*arguments)
        except Exception as error:
            raise self._refused(error, x, call) from None

    def _refused(self, error: Exception, x: torch.Tensor | None, call: Call) -> Exception:
        """The error to raise, which names the layer where there was no memory, and where an
        operator refused an argument."""
        if not attempt.lacks_memory(error):
            error = attempt.invalid(error, call, self.peers)
            with _disable_current_modes():
                self.reject(call, error, x=x)
            error.told = True  # type: ignore[attr-defined]  # for attempt.leave()
            return error
        self.reject(call, MemoryError(attempt.reason_of(error)), x=x)
        return attempt.out_of_memory(error, call, self.peers)


def _total(messages: Sequence[torch.Tensor], lead: int) -> torch.Tensor:
    """One message for the process, which speaks in the header as one rank: the elements of all
    inputs, the rest from the one that leads."""
    total = messages[0].clone()
    for message in messages[1:]:
        total += message.to(total.device)
    total[1:HEADER_WORDS] = messages[lead][1:HEADER_WORDS].to(total.device)
    return total
