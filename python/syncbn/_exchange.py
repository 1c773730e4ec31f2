"""The messages of an exchange: framing, headers, and what ranks get when their calls differ."""

import contextlib

import torch

from . import _collective
from ._groups import Peers
from ._ops import DTYPES, HEADER_WORDS, ops
from ._where import Call
from .errors import DivergenceError, ExchangeTimeout, PeerLost

#: Words of the first message of an exchange over Gloo, the same for every call of the group: Gloo
#: ends the process when ranks bring different lengths, so lengths may differ only after the first
#: message has shown that the calls agree. 512 channels of float32 fit.
FRAME_WORDS = HEADER_WORDS + 512 * 19


def frame_words(peers: Peers | None) -> int:
    """How many words a message to that group has at least."""
    return 0 if peers is None or peers.any_length else FRAME_WORDS


def _sum_first(message: torch.Tensor, peers: Peers, call: Call) -> torch.Tensor:
    """The sum of what goes first: over Gloo the frame; where lengths may differ the whole message,
    and if they do the header alone, which tells why."""
    if not peers.any_length:
        return _collective.all_reduce(message[:FRAME_WORDS], peers, call)
    if torch.compiler.is_compiling():
        return _collective.all_reduce(message, peers, call)
    try:
        return _collective.all_reduce(message, peers, call)
    except _collective.LengthsDiffer:
        return _collective.all_reduce(message[:HEADER_WORDS], peers, call)


def exchange(
    message: torch.Tensor, channels: int, peers: Peers | None, call: Call
) -> tuple[torch.Tensor, torch.Tensor | None, int | None]:
    """Sums a message over the group.

    Returns (first part, the words beyond it or None, count). The count (elements per channel over
    all ranks) is None while tracing. Raises DivergenceError on every rank if the calls differ.
    """
    if peers is None:
        count = None if torch.compiler.is_compiling() else int(message[0])
        return message, None, count
    first = _sum_first(message, peers, call)
    if torch.compiler.is_compiling():
        # Operators that take `first` check its header, remaining_words before a second message.
        beyond = message.numel() - first.numel()
        if beyond <= 0:
            return first, None, None
        rest = ops.remaining_words(message, first, peers.ranks, channels, beyond)
        return first, _collective.all_reduce(rest, peers, call), None
    count, _ = _check(first, peers, call)
    rest = ops.remaining_words(message, first, peers.ranks, channels, -1)
    if rest.numel() == 0:
        return first, None, count
    return first, _collective.all_reduce(rest, peers, call), count


def gather(
    message: torch.Tensor, channels: int, peers: Peers | None, call: Call
) -> tuple[torch.Tensor, torch.Tensor, int | None]:
    """Brings every rank's record of the welford mode to all ranks.

    Records travel in the first message of all exchanges, each rank's in a place of its own where
    the others add zeros; if they do not fit the frame, in an all-gather after it.

    Returns (merged message, whose header counts; records, one after the other; count as in
    exchange). Raises DivergenceError on every rank if the calls differ.
    """
    compiling = torch.compiler.is_compiling()
    record = message[HEADER_WORDS:]
    if peers is None:
        return message, record, None if compiling else int(message[0])
    size = record.numel()
    words = frame_words(peers) or HEADER_WORDS + peers.ranks * size
    frame = torch.zeros(words, dtype=torch.int64, device=message.device)
    frame[:HEADER_WORDS] = message[:HEADER_WORDS]
    # By the largest record: a rank without samples may be of another dtype than the group.
    fits = peers.any_length or HEADER_WORDS + peers.ranks * (1 + 2 * channels) <= words
    if fits:
        begin = HEADER_WORDS + peers.rank * size
        frame[begin : begin + size] = record
    first = _sum_first(frame, peers, call)
    count = None
    if not compiling:
        count, dtype = _check(first, peers, call)
        if dtype is not None:
            size = 1 + channels * (2 if dtype == torch.float64 else 1)
    if fits and first.numel() == words:
        return first, first[HEADER_WORDS : HEADER_WORDS + peers.ranks * size], count
    # Checks the header, also in a traced graph, before there is a second message.
    whole = torch.cat([frame[: first.numel()], record])
    record = ops.remaining_words(whole, first, peers.ranks, channels, size)
    return first, _collective.all_gather(record, peers, call), count


def _check(merged: torch.Tensor, peers: Peers, call: Call) -> tuple[int, torch.dtype | None]:
    """The count, and the dtype of the ranks with samples, if any; raises if the calls differ."""
    count, agree, rejected, dtype = ops.header(merged, peers.ranks).tolist()
    if rejected or not agree:
        reason = "a rank refused its input" if rejected else "the ranks did not make the same call"
        texts = _compare(call.details(), peers, call)
        error = DivergenceError(f"{call}, {peers}: {reason}: {texts}")
        error.group_name = peers.group_name
        raise error
    return count, None if dtype < 0 else DTYPES[dtype]


def _compare(text: str, peers: Peers, call: Call) -> str:
    """Each rank's text, exchanged once more in the frame. All ranks see the same header and come
    here, but those in a compiled step, which raises at once: hence the short limit."""
    size = (FRAME_WORDS - HEADER_WORDS) // peers.ranks
    own = text.encode()[: 8 * size].ljust(8 * size, b"\0")
    frame = torch.zeros(FRAME_WORDS, dtype=torch.int64)
    begin = HEADER_WORDS + peers.rank * size
    frame[begin : begin + size] = torch.frombuffer(bytearray(own), dtype=torch.int64)
    try:
        limited = peers._replace(timeout=min(peers.timeout, 5.0))
        merged = _collective.all_reduce(frame, limited, call)
    except (ExchangeTimeout, PeerLost):
        return f"rank {peers.rank}: {text}; the others did not say"
    lines = []
    for rank in range(peers.ranks):
        words = merged[HEADER_WORDS + rank * size :][:size].contiguous()
        said = words.numpy().tobytes().rstrip(b"\0").decode(errors="replace")
        lines.append(f"rank {rank}: {said}")
    return "; ".join(lines)


def sum_of_ranks(x: torch.Tensor, tag: int, peers: Peers | None, call: Call) -> torch.Tensor:
    """The sum of x over the group; tag: 20 bits that are equal on ranks whose x may be summed.

    Raises DivergenceError on every rank if they differ: a message of the frame's length goes first.
    """
    if peers is None:
        return x
    _agree(torch.empty(0, dtype=torch.int64), tag, peers, call)
    return _collective.sum_over_gloo(x.contiguous(), peers, call)


def numbers_of_ranks(number: int, tag: int, peers: Peers | None, call: Call) -> list[int]:
    """Every rank's number. Raises DivergenceError on every rank if tags (20 bits) differ, or other
    ranks are in another exchange of the group."""
    if peers is None:
        return [number]
    numbers = torch.zeros(peers.ranks, dtype=torch.int64)
    numbers[peers.rank] = number
    return _agree(numbers, tag, peers, call).tolist()


def _agree(words: torch.Tensor, tag: int, peers: Peers, call: Call) -> torch.Tensor:
    """The sum of a few words over ranks with equal tags, in a first message."""
    size = HEADER_WORDS + words.numel()
    message = torch.zeros(max(frame_words(peers), size), dtype=torch.int64)
    message[1], message[2] = tag, tag * tag
    message[HEADER_WORDS:size] = words
    merged = _sum_first(message, peers, call)
    _check(merged, peers, call)
    return merged[HEADER_WORDS:size]


def reject(peers: Peers | None, call: Call, error: Exception, compare: bool = True) -> None:
    """Takes part in an exchange with the word that this rank cannot, so that the others get its
    error now and not when their time is up. compare: the others are in exchange() or gather()."""
    if peers is None:
        return
    # This rank's own error is the one to raise, whatever becomes of the exchange.
    with contextlib.suppress(ExchangeTimeout, PeerLost):
        _sum_first(ops.rejection(torch.empty(0), frame_words(peers)), peers, call)
        if compare and not torch.compiler.is_compiling():
            _compare(f"{call}: {type(error).__name__}: {error}", peers, call)
