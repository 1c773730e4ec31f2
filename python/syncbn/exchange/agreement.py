# SPDX-License-Identifier: Apache-2.0
"""What ranks must have in common, and what they say when they do not."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ..errors import DivergenceError, ExchangeTimeout, PeerLost
from ..operators import (
    DTYPES,
    FRAME_WORDS,
    FRAMED,
    HEADER_BACKWARD,
    HEADER_FLAGS,
    HEADER_WORDS,
    REJECTED,
    message_words,
    ops,
    without_modes,
)
from . import callers
from .call import COMES, WANTS_SUMS, Backward, Call, Peers, tag_of
from .failing import Attempt, Refusal
from .transport import Transport

_OnHost = TypeVar("_OnHost", bound="OnHost")


def _beyond(first: torch.Tensor, message: torch.Tensor, words: int) -> torch.Tensor:
    """Gives so many words of a message beyond what went first. A rank without samples, of another
    dtype than the group, brings zeros."""
    rest = message[first.numel() :][:words]
    return F.pad(rest, (0, words - rest.numel()))


class OnHost(Transport):
    """The way of messages on the host, where the calls of all ranks are compared. A class for each
    way from rank to rank has sum_words()."""

    peers: Peers
    way = message_way = FRAMED
    #: Words that a first message has at least; 0: it may have any length, also a wrong one.
    frame_words = FRAME_WORDS

    def __init__(self, peers: Peers) -> None:
        self.peers, self.ranks = peers, peers.ranks

    def within(self: _OnHost, seconds: float) -> _OnHost:
        """Gives the way to the same ranks, which wait for each other so long at most."""
        limit = min(self.peers.timeout, seconds)
        return type(self)(self.peers._replace(timeout=limit))

    @abstractmethod
    def sum_words(self, words: torch.Tensor, call: Call) -> torch.Tensor:
        """Sums int64 words, into a tensor of its own: backward needs the rank's own, too."""

    def sum_first(self, message: torch.Tensor, call: Call) -> torch.Tensor:
        """Sums what goes first: the frame."""
        return self.sum_words(message[: self.frame_words], call)

    def exchange(self, turn, message, merged, channels, records=0):
        turn.sent, call = True, turn.call
        first = self.sum_first(message, call) if merged is None else merged
        # A mode of the caller's that raised here would leave the others alone with the sum.
        with without_modes():
            dtype = check_header(first, self, call)
            words = 0 if dtype is None else message_words(channels, dtype, records)
            if words <= first.numel():
                return first, None
            rest = _beyond(first, message, words - first.numel())
        return first, self.sum_words(rest, call)

    def sum(self, x, tag, call):
        """Sums x after the tags, which go first, in a message of the frame's length."""
        if tag is not None:
            agree(torch.empty(0, dtype=torch.int64, device="cpu"), tag, self, call)
        return self._sum_numbers(x.cpu(), call).to(x.device)

    def _sum_numbers(self, x: torch.Tensor, call: Call) -> torch.Tensor:
        """Sums tensors of one of SUMMED, equal in shape on all ranks."""
        total = x.clone(memory_format=torch.contiguous_format)
        numbers = torch.view_as_real(total) if total.is_complex() else total
        with Attempt(self.peers, call) as attempt:
            sum_over_gloo(numbers, self.peers.group_name, attempt)
        return total

    def backward_of(self, word, merged, own, turn):
        if merged is not None:
            with without_modes():
                word = int(merged[HEADER_BACKWARD].item())
        return backward_of(word, own, self, turn.call)

    def refuse(self, call, error, x=None, parameter=None):
        reason = str(error).removeprefix(f"{call}, {self.peers}: ")
        text = f"{call}: {type(error).__name__}: {reason}"
        error.told_to = self.peers.group_name  # for what tells it to further ranks

        def tell() -> None:
            with without_modes():
                words = max(self.frame_words, HEADER_WORDS)
                refusal = torch.zeros(words, dtype=torch.int64, device="cpu")
                refusal[HEADER_FLAGS] = REJECTED
                self.sum_first(refusal, call)
                exchange_texts(text, self, call)

        Refusal(self.peers, text, tell)


def sum_over_gloo(total: torch.Tensor, group: str, attempt: Attempt) -> torch.Tensor:
    """Sums over the group, and writes the sum over what it is made of."""
    options = dist.AllreduceOptions()
    options.timeout = attempt.timeout
    attempt.wait(callers.resolve(group).allreduce([total], options))
    return total


def check_header(merged: torch.Tensor, engine: OnHost, call: Call) -> torch.dtype | None:
    """Gives the dtype of the ranks with samples, if any; raises if the calls differ."""
    peers = engine.peers
    _, agree, rejected, dtype = ops.header(merged, peers.ranks).tolist()
    if rejected or not agree:
        reason = "a rank raised an error" if rejected else "the ranks did not make the same call"
        fields = [f"{name}={value}" for name, value in call.fields().items()]
        difference = _difference(exchange_texts(_SEPARATOR.join(fields), engine, call))
        raise DivergenceError(f"{call}, {peers}: {reason}: {difference}", peers.group_name)
    return None if dtype < 0 else DTYPES[dtype]


#: Between the fields of a call; a text without it is that of a rank that refused its input.
_SEPARATOR = "\x1f"


def exchange_texts(text: str, engine: OnHost, call: Call) -> dict[int, str]:
    """Brings each rank's text to all in one more frame; this rank's alone if others do not come.
    All ranks see the same header and come here, unless one was interrupted: hence the short limit.
    A text that is too long loses the fields at its end."""
    peers = engine.peers
    size = (FRAME_WORDS - HEADER_WORDS) // peers.ranks
    own = text.encode()
    if len(own) > 8 * size:
        own = own[: 8 * size].rpartition(_SEPARATOR.encode())[0] or own[: 8 * size]
    own = own.ljust(8 * size, b"\0")
    frame = torch.zeros(FRAME_WORDS, dtype=torch.int64, device="cpu")
    begin = HEADER_WORDS + peers.rank * size
    frame[begin : begin + size] = torch.frombuffer(bytearray(own), dtype=torch.int64)
    try:
        merged = engine.within(5.0).sum_words(frame, call)
    except (ExchangeTimeout, PeerLost):
        return {peers.rank: text}
    words = merged[HEADER_WORDS:][: peers.ranks * size].view(peers.ranks, size)
    return {rank: text_of(own) for rank, own in enumerate(words)}


def text_of(words: torch.Tensor) -> str:
    """Reads the text that lies in the words, without NumPy, which PyTorch works without."""
    letters = bytes(words.contiguous().view(torch.uint8).tolist())
    return letters.rstrip(b"\0").decode(errors="replace")


def _difference(texts: dict[int, str]) -> str:
    """Says what ranks say that refused their input; else which fields of their calls differ."""
    refused = [f"rank {rank}: {text}" for rank, text in texts.items() if _SEPARATOR not in text]
    if refused:
        return "; ".join(refused)
    if len(texts) == 1:
        ((rank, text),) = texts.items()
        return f"rank {rank}: {text.replace(_SEPARATOR, ', ')}; the others did not say"
    calls = {r: dict(f.partition("=")[::2] for f in t.split(_SEPARATOR)) for r, t in texts.items()}
    differing = []
    # What only a forward has differs from nothing that a backward has.
    turned = len({call.get("direction") for call in calls.values()}) > 1
    for name in dict.fromkeys(name for call in calls.values() for name in call):
        if turned and not all(name in call for call in calls.values()):
            continue
        by_value: dict[str, list[int]] = {}
        for rank, call in calls.items():
            by_value.setdefault(call.get(name, "none"), []).append(rank)
        if len(by_value) > 1:
            values = (f"{value} on {ranks_text(ranks)}" for value, ranks in by_value.items())
            differing.append(f"{name}: {', '.join(values)}")
    return "; ".join(differing) or "in something that their errors do not show"


def ranks_text(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" * (len(ranks) > 8))
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def numbers_of_ranks(number: int, tag: int, engine: OnHost | None, call: Call) -> list[int]:
    """Gives every rank's number. Raises DivergenceError on every rank if tags (20 bits) differ, or
    other ranks are in another exchange of the group."""
    if engine is None:
        return [number]
    numbers = torch.zeros(engine.peers.ranks, dtype=torch.int64, device="cpu")
    numbers[engine.peers.rank] = number
    return agree(numbers, tag, engine, call).tolist()


def raise_together(error: Exception | None, engine: OnHost | None, call: Call) -> None:
    """Raises this rank's error, and on ranks without one a ValueError that quotes the others'. A
    collective call, also where there is no error."""
    failed = numbers_of_ranks(int(error is not None), 0, engine, call)
    if engine is not None and any(failed):
        own = "" if error is None else f"{call}: {error}"
        texts = exchange_texts(own, engine, call)
    if error is not None:
        try:
            raise error
        finally:
            error = None
    if any(failed):
        raise ValueError("; ".join(f"rank {r}: {text}" for r, text in texts.items() if text))


def agree(words: torch.Tensor, tag: int, engine: OnHost, call: Call) -> torch.Tensor:
    """Sums a few words over ranks with equal tags, in a first message."""
    size = HEADER_WORDS + words.numel()
    words_in_all = max(engine.frame_words, size)
    message = torch.zeros(words_in_all, dtype=torch.int64, device="cpu")
    message[1], message[2] = tag, tag * tag
    message[HEADER_WORDS:size] = words
    merged = engine.sum_first(message, call)
    check_header(merged, engine, call)
    return merged[HEADER_WORDS:size]


def check_count(merged: torch.Tensor | None, own: int, sizes: str) -> None:
    """Refuses one value per channel over all ranks: it has no variance. All ranks see the same
    count, so all refuse it. merged: None where it is known to be that.

    own: this rank's count, known without a look at the device; 0 where it is not. Only a rank with
    at most one value looks at the sum: on a GPU it waits for that, and not in a captured graph.
    """
    if merged is not None:
        if own > 1 or (merged.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        with without_modes():
            count = int(merged[0])
    if merged is None or count == 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got 1 over all {sizes}"
        )


#: How many ranks a counter of that word has room for.
_COUNTER = WANTS_SUMS - 1


def backward_of(word: int, own: int, engine: OnHost, call: Call) -> Backward:
    """Reads what a forward's merged header says of its backward, in a word. own: this rank's. If
    not all ranks can come to an exchange that some want, they say now who cannot."""
    wants = (bool(word & _COUNTER), bool(word // WANTS_SUMS & _COUNTER))
    if not any(wants) or word // COMES == engine.peers.ranks:
        return Backward(*wants)
    with without_modes():
        comes = numbers_of_ranks(own // COMES, _BACKWARD_TAG, engine, call)
    return Backward(*wants, tuple(rank for rank, number in enumerate(comes) if not number))


#: Tells this exchange from others of the same kind.
_BACKWARD_TAG = tag_of("who comes to backward")


def check_present(backward: Backward, peers: Peers | None, call: Call) -> None:
    """Refuses a backward to which some ranks cannot come, before it waits for them."""
    if not backward.absent:
        return
    raise DivergenceError(
        f"{call}, {peers}: {ranks_text(backward.absent)} made the forward without gradients "
        "(torch.no_grad, or neither an input nor a parameter that requires one) and cannot come to "
        "this backward; expected gradients on all ranks or on none"
    )
