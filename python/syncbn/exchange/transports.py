# SPDX-License-Identifier: Apache-2.0
"""Which way the messages of a step take, by where they lie and to whom they go."""

import torch

from ..operators import ALONE, HEADER_WORDS
from . import groups
from .agreement import WANTS_SUMS, WANTS_X, Backward
from .call import Call, Peers
from .host_transport import OnHost, ThroughHost
from .nccl_transport import InStream
from .transport import Transport


def transport_of(peers: Peers | None, device: torch.device) -> Transport:
    """The one of messages on that device to these peers."""
    if peers is None:
        return _ALONE
    if device.type != "cuda":
        return OnHost(peers)
    if not peers.cuda:
        return ThroughHost(peers)
    return InStream(peers, device)


class Alone(Transport):
    """The way of one rank, which sends nothing."""

    name = "none"
    way = ALONE

    def exchange(self, message, channels, call):
        return message, None

    def gather(self, message, channels, call):
        return message, message if message.is_cuda else message[HEADER_WORDS:]

    def sum(self, x, tag, call):
        return x

    def backward_of(self, word, merged, own, call):
        return Backward(bool(own & WANTS_X), bool(own & WANTS_SUMS)) if own else _NO_BACKWARD

    def reject(self, call, error, compare=True, x=None, parameter=None):
        """Nobody waits for this rank."""


_ALONE, _NO_BACKWARD = Alone(), Backward(False, False)


def reject(
    peers: Peers | None,
    call: Call,
    error: BaseException,
    compare: bool = True,
    x: object = None,
    parameter: torch.Tensor | None = None,
    counter: torch.Tensor | None = None,
) -> None:
    """Takes part in an exchange with the word that this rank cannot, so that the others get its
    error now and not when their time is up. compare: the others are in exchange() or gather().
    x: this rank's input. parameter: one that has the layer's number of channels. counter: a tensor
    of any shape that lies where the layer does."""
    if peers is not None:
        device = _device_of_others(peers, x, parameter, counter)
        transport_of(peers, device).reject(call, error, compare, x, parameter)


def _device_of_others(
    peers: Peers,
    x: object,
    parameter: torch.Tensor | None,
    counter: torch.Tensor | None,
) -> torch.device:
    """Where the messages of ranks lie that do not refuse, which decides the way that they take:
    where the layer lies, because the input may be what is refused."""
    if parameter is not None:
        return parameter.device
    if counter is not None and counter.is_cuda:  # else the layer may not have been called yet
        return counter.device
    if groups.is_nccl_alone(peers):
        return groups.device_of(peers)
    return x.device if isinstance(x, torch.Tensor) else torch.device("cpu")
