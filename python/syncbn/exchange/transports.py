"""How the messages of a step, one from each rank, become one: a class for each place where messages
lie and each way that they take from there."""

import contextlib
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ..errors import ExchangeTimeout, PeerLost
from ..operators import (
    DTYPES,
    HEADER_BACKWARD,
    HEADER_WORDS,
    MESSAGE_WORDS,
    ops,
    record_words,
)
from . import agreement, attempt, groups, shared_memory
from .agreement import WANTS_SUMS, WANTS_X, Backward
from .call import Call
from .engines import engine_of
from .groups import Peers


def transport_of(peers: Peers | None, device: torch.device) -> "Transport":
    """The one of messages on that device to these peers."""
    if peers is None:
        return Alone()
    if device.type != "cuda":
        return OnHost(peers)
    return InStream(peers, device) if peers.cuda else ThroughHost(peers)


class Transport:
    """Errors of an exchange are raised on every rank that takes part, and name the call."""

    #: Words that a message has at least.
    frame_words = 0

    @property
    def name(self) -> str:
        """Its name, as report() shows it."""
        raise NotImplementedError

    def exchange(
        self, message: torch.Tensor, channels: int, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sums a message over the group.

        Returns (first part, the words beyond it or None). Raises DivergenceError if the calls
        differ; in stream order, where nobody waits for the device, they give NaN.
        """
        raise NotImplementedError

    def gather(
        self, message: torch.Tensor, channels: int, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Brings every rank's record of the welford mode to all ranks.

        Returns (merged message, whose header counts; records, one after the other, on CUDA each
        behind its header). Errors as in exchange().
        """
        raise NotImplementedError

    def sum(self, x: torch.Tensor, tag: int, call: Call) -> torch.Tensor:
        """The sum of x over the group, float64; tag: 20 bits, equal on ranks whose x may be summed.
        Errors as in exchange()."""
        raise NotImplementedError

    def backward_of(self, merged: torch.Tensor, own: int, call: Call) -> Backward:
        """As agreement.backward_of(), of a merged message."""
        return self.backward_of_word(int(merged[HEADER_BACKWARD].item()), own, call)

    def backward_of_word(self, word: int, own: int, call: Call) -> Backward:
        """As agreement.backward_of()."""
        raise NotImplementedError

    @property
    def takes_steps(self) -> bool:
        """Whether there is step()."""
        return False

    def step(self, run, arguments: tuple, call: Call) -> tuple:
        """Runs an operator of a whole direction. Returns (what it gives; None, or where it could
        not go on this rank's message and what exchange() returns of it). Raises Refused where
        it refuses its arguments."""
        raise NotImplementedError

    def reject(
        self,
        call: Call,
        error: BaseException,
        compare: bool = True,
        x: object = None,
        parameter: torch.Tensor | None = None,
    ) -> None:
        """As the function of that name."""
        raise NotImplementedError

    def leave(self, error: BaseException, call: Call) -> None:
        """As attempt.leave()."""
        attempt.leave(error, None, call, self._who)

    def sums_of(
        self, name: str, passes: Sequence[tuple], lead: int, channels: int, call: Call
    ) -> tuple:
        """(Message, what else the passes give, merged, rest): runs the operator local_`name` on
        each of the inputs of this process, and exchange() on the sum of their messages. passes: the
        arguments before and behind the frame's words. lead: the input that speaks for all."""
        run = getattr(ops, f"local_{name}")
        messages, others = list[torch.Tensor](), list[torch.Tensor]()
        for arguments, rest in passes:
            given = self.refusing(
                run, (*arguments, self.frame_words, *rest), passes[lead][0][0], call
            )
            message, *other = (given,) if isinstance(given, torch.Tensor) else given
            messages.append(message)
            others += other
        message = messages[0] if len(messages) == 1 else _total(messages, lead)
        return message, others, *self.exchange(message, channels, call)

    def refusing(self, run, arguments: tuple, x: torch.Tensor, call: Call):
        """run(*arguments), a pass over x before an exchange. Its error is told to the others."""
        try:
            return run(*arguments)
        except Exception as error:
            raise self._refused(error, x, call) from None

    def _refused(self, error: Exception, x: torch.Tensor, call: Call) -> Exception:
        """The error to raise, which names the layer where there was no memory."""
        if not attempt.lacks_memory(error):
            self.reject(call, error, x=x)
            return error
        self.reject(call, MemoryError(attempt.reason_of(error)), x=x)
        return attempt.out_of_memory(error, call, self._who)

    @property
    def _who(self) -> str:
        """This rank, as errors name it."""
        return ""


class Alone(Transport):
    """One rank."""

    name = "none"

    def exchange(self, message, channels, call):
        return message, None

    def gather(self, message, channels, call):
        return message, message if message.is_cuda else message[HEADER_WORDS:]

    def sum(self, x, tag, call):
        return x

    def backward_of(self, merged, own, call):
        return Backward(bool(own & WANTS_X), bool(own & WANTS_SUMS))

    def backward_of_word(self, word, own, call):
        return Backward(True, True)

    takes_steps = True

    def step(self, run, arguments, call):
        try:
            *given, _, _, status = run(*arguments, -1, 0)
        except Exception as error:
            raise attempt.Refused from error
        if status != shared_memory.DONE:  # one value per channel
            raise attempt.Refused
        return given, None

    def reject(self, call, error, compare=True, x=None, parameter=None):
        """Nobody waits."""


class Together(Transport):
    """Several ranks."""

    def __init__(self, peers: Peers) -> None:
        self.peers = peers

    @property
    def _who(self):
        return f", {self.peers}"


class OnHost(Together):
    """Messages on the host."""

    def __init__(self, peers: Peers) -> None:
        super().__init__(peers)
        self.engine = engine_of(peers)
        self.frame_words = self.engine.frame_words

    @property
    def name(self):
        return self.engine.name

    def exchange(self, message, channels, call):
        first = self.engine.sum_first(message, call)
        return self._rest_after(first, message, channels, call)

    def _rest_after(self, first, message, channels, call):
        """What exchange() returns, when the first part of the sum is there."""
        agreement.check_header(first, self.engine, call)
        rest = ops.remaining_words(message, first, self.peers.ranks, channels, -1)
        if rest.numel() == 0:
            return first, None
        return first, self.engine.sum(rest, call)

    @property
    def takes_steps(self):
        return self.engine.takes_steps

    def step(self, run, arguments, call):
        given, message, first = self.engine.step(run, arguments, call)
        if message is None:
            return given, None
        return given, (message, *self._rest_after(first, message, call.channels, call))

    def gather(self, message, channels, call):
        """Records travel in the first message of all exchanges, each rank's in a place of its own
        where the others add zeros; if they do not fit the frame, in an all-gather after it."""
        frame, fits = self.refusing(self._placed, (message, channels), message, call)
        words, size = frame.numel(), message.numel() - HEADER_WORDS
        first = self.engine.sum_first(frame, call)
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

    def backward_of_word(self, word, own, call):
        return agreement.backward_of(word, own, self.peers, call)

    def reject(self, call, error, compare=True, x=None, parameter=None):
        # This rank's own error is the one to raise, whatever becomes of the exchange.
        with contextlib.suppress(ExchangeTimeout, PeerLost):
            like = torch.empty(0, device="cpu")
            self.engine.sum_first(ops.rejection(like, self.engine.frame_words), call)
            if compare:
                agreement.tell_error(self.engine, call, error)

    def leave(self, error, call):
        attempt.leave(error, self.engine, call, self._who)


class ThroughHost(OnHost):
    """Messages on CUDA of groups without NCCL; the host waits for the device."""

    def __init__(self, peers: Peers) -> None:
        super().__init__(peers)
        self.frame_words = 0  # they are framed on the host

    @property
    def name(self):
        return f"{self.engine.name}, through the host"

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


class InStream(Together):
    """Messages on CUDA over the caller's own NCCL group. The host waits for nothing and knows of no
    error: they are NCCL's and its watchdog's. device: of the messages."""

    name = "nccl"

    def __init__(self, peers: Peers, device: torch.device) -> None:
        super().__init__(peers)
        self.device = device

    def exchange(self, message, channels, call):
        return self._sum(message), None

    def _sum(self, x):
        total = x.clone()
        dist.all_reduce(total, group=groups.resolve(self.peers.cuda))
        return total

    def gather(self, message, channels, call):
        messages = message.new_empty(self.peers.ranks, message.numel())
        group = groups.resolve(self.peers.cuda)
        dist.all_gather_into_tensor(messages.view(-1), message, group=group)
        return messages[:, :HEADER_WORDS].sum(0), messages.flatten()

    def sum(self, x, tag, call):
        """The tags travel in the same message."""
        tags = [x.new_full((1,), t) for t in (tag, tag * tag)]  # of up to 2,048 ranks exact
        total = self._sum(torch.cat([x.flatten(), *tags]))
        tag_sum, squares = total[-2:].to(torch.int64)
        alike = self.peers.ranks * squares == tag_sum * tag_sum
        return torch.where(alike, total[:-2].view(x.shape), math.nan)

    def backward_of(self, merged, own, call):
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
        gathers = call.direction == "forward" and call.options is not None
        gathers = gathers and call.options.statistics == "welford"
        size = record_words(channels, x.dtype) if gathers else channels * MESSAGE_WORDS[x.dtype]
        message = torch.zeros(HEADER_WORDS + size, dtype=torch.int64, device=self.device)
        message[3:4].fill_(1)  # ranks that refuse
        if gathers:
            self.gather(message, channels, call)
        else:
            self.exchange(message, channels, call)


def _total(messages: Sequence[torch.Tensor], lead: int) -> torch.Tensor:
    """One message for the process, which speaks in the header as one rank: the elements of all
    inputs, the rest from the one that leads."""
    total = messages[0].clone()
    for message in messages[1:]:
        total += message.to(total.device)
    total[1:HEADER_WORDS] = messages[lead][1:HEADER_WORDS].to(total.device)
    return total


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
        return torch.device("cuda", torch.cuda.current_device())
    return x.device if isinstance(x, torch.Tensor) else torch.device("cpu")
