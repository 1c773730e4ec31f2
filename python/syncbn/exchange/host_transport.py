# SPDX-License-Identifier: Apache-2.0
"""Messages that are summed on the host."""

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import _disable_current_modes

from ..operators import (
    DTYPES,
    HEADER_BACKWARD,
    HEADER_WORDS,
    MESSAGE,
    MESSAGE_WORDS,
    ops,
    record_words,
)
from . import agreement
from .attempt import Refusal, Refused, lacks_memory
from .call import Peers
from .engines import Engine, SharedMemory, engine_of
from .transport import Transport


class OnHost(Transport):
    """Messages on the host."""

    peers: Peers
    engine: Engine

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        self.engine = engine_of(peers)
        self.name = self.engine.name
        self.frame_words, self.way = self.engine.frame_words, self.engine.way

    def exchange(self, message, channels, call):
        first = self.engine.sum_first(message, call)
        return self._rest_after(first, message, channels, call)

    def _rest_after(self, first, message, channels, call):
        """What exchange() returns, when the first part of the sum is there."""
        # A mode of the caller's that raised here would leave the others alone with the sum.
        with _disable_current_modes():
            agreement.check_header(first, self.engine, call)
            rest = ops.remaining_words(message, first, self.peers.ranks, channels, -1)
        if rest.numel() == 0:
            return first, None
        return first, self.engine.sum(rest, call)

    def begin(self, run, passes, lead, way, call, gathers=False, checked=True):
        if self.way < 0 or way is not None:
            return super().begin(run, passes, lead, way, call, gathers, checked)
        (arguments,) = passes
        assert isinstance(self.engine, SharedMemory)
        try:
            given, message, first = self.engine.step(run, arguments, call)
        except Refused as refused:
            error = refused.__cause__
            assert isinstance(error, Exception)
            if not (checked or lacks_memory(error)):
                raise
            raise self._refused(error, arguments[0], call) from None
        if message is None:
            return [given], None
        return [given], (message, *self._rest_after(first, message, call.channels, call))

    def gather(self, message, channels, call):
        """Records travel in the first message of all exchanges, each rank's in a place of its own
        where the others add zeros; if they do not fit the frame, in an all-gather after it."""
        frame, fits = self.refusing(self._placed, (message, channels), message, call)
        words, size = frame.numel(), message.numel() - HEADER_WORDS
        first = self.engine.sum_first(frame, call)
        with _disable_current_modes():
            dtype = agreement.check_header(first, self.engine, call)
            if dtype is not None:
                size = record_words(channels, dtype)
            ranks = self.peers.ranks
            if fits and first.numel() == words:
                return first, first[HEADER_WORDS : HEADER_WORDS + ranks * size]
            whole = torch.cat([frame[: first.numel()], message[HEADER_WORDS:]])
            record = ops.remaining_words(whole, first, ranks, channels, size)
        return first, self.engine.gather(record, call)

    def _placed(self, message, channels):
        """The first message of gather(), and whether it has room for all records."""
        record, ranks = message[HEADER_WORDS:], self.peers.ranks
        size, room = record.numel(), self.engine.frame_words
        words = room or HEADER_WORDS + ranks * size
        frame = torch.zeros(words, dtype=torch.int64, device=message.device)
        frame[:HEADER_WORDS] = message[:HEADER_WORDS]
        # By the largest record: a rank without samples may be of another dtype than the group.
        fits = not room or HEADER_WORDS + ranks * (1 + 2 * channels) <= room
        if fits:
            begin = HEADER_WORDS + self.peers.rank * size
            frame[begin : begin + size] = record
        return frame, fits

    def sum(self, x, tag, call):
        """A message of the frame's length, for the tags, goes first."""
        agreement.agree(torch.empty(0, dtype=torch.int64, device="cpu"), tag, self.peers, call)
        return self.engine.sum_of_numbers(x.cpu().contiguous(), call).to(x.device)

    def backward_of(self, word, merged, own, call):
        with _disable_current_modes():
            if merged is not None:
                word = int(merged[HEADER_BACKWARD].item())
            return agreement.backward_of(word, own, self.peers, call)

    def reject(self, call, error, compare=True, x=None, parameter=None):
        reason = str(error).removeprefix(f"{call}, {self.peers}: ")
        text = f"{call}: {type(error).__name__}: {reason}"

        def tell() -> None:
            with _disable_current_modes():
                like = torch.empty(0, device="cpu")
                self.engine.sum_first(ops.rejection(like, self.engine.frame_words), call)
                if compare:
                    agreement.tell(self.engine, call, text)

        Refusal(self.engine, text, tell)


class ThroughHost(OnHost):
    """Messages on CUDA of groups without NCCL; the host waits for the device."""

    def __init__(self, peers: Peers) -> None:
        super().__init__(peers)
        self.name = f"{self.engine.name}, through the host"
        self.frame_words, self.way = 0, MESSAGE  # they are framed on the host

    def exchange(self, message, channels, call):
        """The merged message in one piece."""
        own = message.cpu()
        framed = F.pad(own, (0, max(0, self.engine.frame_words - own.numel())))
        first, rest = super().exchange(framed, channels, call)
        merged = first if rest is None else torch.cat([first, rest])
        dtype = int(ops.header(first, self.peers.ranks)[3])
        # A rank without samples may be of another dtype than the group, whose length then counts.
        words = own.numel() if dtype < 0 else HEADER_WORDS + channels * MESSAGE_WORDS[DTYPES[dtype]]
        merged = F.pad(merged[:words], (0, max(0, words - merged.numel())))
        return merged.to(message.device), None

    def gather(self, message, channels, call):
        own = message.cpu()
        merged, records = super().gather(own, channels, call)
        records = records.view(self.peers.ranks, -1)
        headers = own[:HEADER_WORDS].repeat(self.peers.ranks, 1)  # the calls agree
        headers[:, 0], headers[:, 3] = records[:, 0], 0
        headers[0, 3] = merged[3]
        messages = torch.cat([headers, records], 1).flatten()
        return merged[:HEADER_WORDS].to(message.device), messages.to(message.device)
