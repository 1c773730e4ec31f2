# SPDX-License-Identifier: Apache-2.0
"""What the other ranks hear where this one does not come to an exchange."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.autograd import profiler

from ..errors import DivergenceError, ExchangeTimeout, PeerLost
from ..operators import without_modes
from . import callers
from .call import Busy, Call, Peers, explained, lacks_memory
from .failing import abandon
from .host import engine_of, transport_of

#: Errors that all ranks have, or that are no part of a step.
_KNOWN_TO_ALL = (DivergenceError, ExchangeTimeout, PeerLost, NotImplementedError, Busy)


def ranged(function: Callable[..., Any], turn: "Turn", part: str) -> Callable[..., Any]:
    """Gives the function as a range of a profile, "syncbn::", the layer's name, the direction if it
    is not forward, and the part of it. Of one rank, and where no profile is taken, it is the
    function itself."""
    if not profiler._is_profiler_enabled or turn.peers is None:
        return function
    call = turn.call
    name = call.layer if call.direction == "forward" else f"{call.layer} {call.direction}"

    def run(*arguments: Any) -> Any:
        with profiler.record_function(f"syncbn::{name} {part}"):
            return function(*arguments)

    return run


class Turn:
    """A direction of a layer on this rank. An error that leaves it reaches the other ranks. Until
    this rank has sent its message they get it in the exchange, as a refusal, and the group goes on.
    After that this rank abandons the group, unless the error is one that all ranks have.

    peers: None where nobody waits for this rank. call: makes the Call, which is named where
    somebody asks. x, parameter: as refuse() has them. state: the layer's. words: raises what is
    said of an argument that an operator refuses, if it finds something.
    """

    __slots__ = ("_call", "_made", "_state", "parameter", "peers", "sent", "words", "x")

    def __init__(
        self,
        peers: Peers | None,
        call: Callable[[], Call],
        x: Any,
        state: Any,
        words: Callable[[], None] | None = None,
        parameter: Any = None,
    ) -> None:
        self.peers, self._call, self.x, self._state = peers, call, x, state
        self.words, self.parameter = words, parameter
        self._made: Call | None = None
        self.sent = False

    @property
    def call(self) -> Call:
        if self._made is None:
            with without_modes():
                self._made = self._call()
        return self._made

    def __enter__(self) -> "Turn":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is None or isinstance(error, _KNOWN_TO_ALL):
            return
        if isinstance(error, Exception) and not self.sent:
            peers = self._state.reached(self.peers)
            refuse(peers, self.call, error, self.x, self.parameter, self._state.counters)
        elif self.peers is not None and (lacks_memory(error) or not isinstance(error, ValueError)):
            abandon(self.peers, self.call, error)
        if lacks_memory(error) and not str(error).startswith(self.call.layer):
            raise explained(error, self.call, self.peers) from error

    def refused(self, error: Exception) -> NoReturn:
        """Raises what stands for the error of an operator that took its arguments before the
        exchange: with the name of the layer, and in the words of Python's checks."""
        if self.words is not None and not lacks_memory(error):
            self.words()
        raise explained(error, self.call, self.peers) from None


def refuse(
    peers: Peers | None,
    call: Call,
    error: BaseException,
    x: object = None,
    parameter: object = None,
    counter: torch.Tensor | None = None,
) -> None:
    """Takes part in an exchange with the word that this rank cannot, so that the others get its
    error now and not when their time is up. x: this rank's input. parameter: one that has the
    layer's number of channels. counter: a tensor of any shape that lies where the layer does."""
    if peers is None:
        return
    known = parameter if isinstance(parameter, torch.Tensor) else None  # it may be what is refused
    with without_modes():
        device = _device_of_others(peers, x, known, counter)
        transport_of(peers, device).refuse(call, error, x, known)


def refuse_on_host(peers: Peers | None, call: Call, error: BaseException) -> None:
    """Does what refuse() does, where the others are in host.agree()."""
    if peers is not None:
        engine_of(peers).refuse(call, error)


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
