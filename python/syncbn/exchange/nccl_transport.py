# SPDX-License-Identifier: Apache-2.0
"""Messages that NCCL sums on the device."""

import math

import torch
import torch.distributed as dist

from ..operators import HEADER_WORDS, MESSAGE_WORDS, record_words
from . import callers
from .agreement import Backward
from .call import Peers
from .transport import Transport


class InStream(Transport):
    """Messages on CUDA over the caller's own NCCL group. The host waits for nothing and knows of no
    error: they are NCCL's and its watchdog's. device: of the messages."""

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
        """The tags travel in the same message."""
        tags = [x.new_full((1,), t) for t in (tag, tag * tag)]  # of up to 2,048 ranks exact
        total = torch.cat([x.flatten(), *tags])
        self.exchange(total, 0, call)
        tag_sum, squares = total[-2:].to(torch.int64)
        alike = self.peers.ranks * squares == tag_sum * tag_sum
        return torch.where(alike, total[:-2].view(x.shape), math.nan)

    def backward_of(self, word, merged, own, call):
        """Nobody looks at the header; every rank with a node comes."""
        return Backward(True, True)

    def reject(self, call, error, compare=True, x=None, parameter=None):
        """NaN for the others, if the length of their messages can be known: their channels, and by
        x their dtype. Else, and where they are in sum(), they wait for NCCL's time limit."""
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
