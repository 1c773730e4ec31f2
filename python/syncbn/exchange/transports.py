# SPDX-License-Identifier: Apache-2.0
"""Which way the messages of a step take, by where they lie and to whom they go; and the ways that
need no word from the host."""

import math

import torch
import torch.distributed as dist

from ..operators import ALONE, HEADER_WORDS, MESSAGE_WORDS, record_words
from . import callers, groups
from .agreement import WANTS_SUMS, WANTS_X
from .call import Backward, Call, Peers
from .host import ThroughHost, engine_of
from .transport import Transport


def transport_of(peers: Peers | None, device: torch.device) -> Transport:
    """Gives the way of messages on that device to these peers."""
    if peers is None:
        return _ALONE
    if device.type != "cuda":
        return engine_of(peers)
    if not peers.cuda:
        return ThroughHost(peers)
    return InStream(peers, device)


class Alone(Transport):
    """Keeps the messages of one rank, which sends nothing."""

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

    def reject(self, call, error, x=None, parameter=None):
        """Tells nobody: nobody waits for this rank."""


_ALONE, _NO_BACKWARD = Alone(), Backward(False, False)


class InStream(Transport):
    """Sends messages on CUDA over the caller's own NCCL group. The host waits for nothing and knows
    of no error: they are NCCL's and its watchdog's. device: of the messages."""

    name = "nccl"
    peers: Peers

    def __init__(self, peers: Peers, device: torch.device) -> None:
        self.peers, self.device = peers, device

    def exchange(self, message, channels, call):
        dist.all_reduce(message, group=callers.resolve(self.peers.cuda))
        return message, None

    def gather(self, message, channels, call):
        messages = message.new_empty(self.peers.ranks, message.numel())
        group = callers.resolve(self.peers.cuda)
        dist.all_gather_into_tensor(messages.view(-1), message, group=group)
        return messages[:, :HEADER_WORDS].sum(0), messages.flatten()

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
        gathers = options is not None and options.statistics == "welford"
        size = record_words(channels, x.dtype) if gathers else channels * MESSAGE_WORDS[x.dtype]
        message = torch.zeros(HEADER_WORDS + size, dtype=torch.int64, device=self.device)
        message[3:4].fill_(1)  # ranks that refuse
        (self.gather if gathers else self.exchange)(message, channels, call)


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
    if groups.is_nccl_alone(peers):
        return groups.device_of(peers)
    return x.device if isinstance(x, torch.Tensor) else torch.device("cpu")
