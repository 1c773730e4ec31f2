"""The messages of a step, one from each rank, become one: their sum, or all records."""

import math
from typing import Any

import torch
import torch.nn.functional as F

from ..operators import DTYPES, HEADER_WORDS, MESSAGE_WORDS, ops, record_words
from . import transports
from .agreement import agree, check_header, reject
from .call import Call
from .frames import frame_words, sum_first
from .groups import Peers


def exchange(
    message: torch.Tensor, channels: int, peers: Peers | None, call: Call
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Sums a message over the group.

    Returns (first part, the words beyond it or None). Raises DivergenceError on every rank if the
    calls differ.
    """
    if peers is None:
        return message, None
    if message.is_cuda:
        return _exchange_from_device(message, channels, peers, call), None
    return _rest_after(sum_first(message, peers, call), message, channels, peers, call)


def _rest_after(first, message, channels, peers, call) -> tuple:
    """What exchange() returns, when the first part of the sum is there."""
    check_header(first, peers, call)
    rest = ops.remaining_words(message, first, peers.ranks, channels, -1)
    if rest.numel() == 0:
        return first, None
    return first, transports.all_reduce(rest, peers, call)


def _exchanged_pass(name, x: torch.Tensor, arguments: tuple, rest: tuple, peers, call) -> tuple:
    """What the operator local_`name` gives, a message first, and exchange() of the message. Through
    the shared memory of one node both are one operator."""
    channels = x.shape[1]
    shared = peers is not None and peers.any_length and not x.is_cuda
    if not shared:
        frame = frame_words(peers, x.device)
        run = getattr(ops, f"local_{name}")
        given = refusing(run, (*arguments, frame, *rest), x, peers, call)
        given = (given,) if isinstance(given, torch.Tensor) else given
        return *given, *exchange(given[0], channels, peers, call)
    run = getattr(ops, f"shm_{name}")
    try:
        given, merged, alike = transports.sum_of_pass(run, (*arguments, *rest), peers, call)
    except transports.PassFailed as error:
        cause: Any = error.__cause__
        raise _refused(cause, x, peers, call) from None
    if alike:
        return *given, merged, None
    if merged is None:
        merged = transports.all_reduce(given[0][:HEADER_WORDS], peers, call)
    return *given, *_rest_after(merged, given[0], channels, peers, call)


def refusing(run, arguments: tuple, x: torch.Tensor, peers: Peers | None, call: Call):
    """run(*arguments), a pass over x before an exchange. Its error is told to the others."""
    try:
        return run(*arguments)
    except Exception as error:
        raise _refused(error, x, peers, call) from None


def _refused(error: Exception, x: torch.Tensor, peers: Peers | None, call: Call) -> Exception:
    """The error to raise, which names the layer where there was no memory."""
    if not transports.lacks_memory(error):
        reject(peers, call, error, x=x)
        return error
    reject(peers, call, MemoryError(transports.reason_of(error)), x=x)
    return transports.out_of_memory(error, peers, call)


def moments(
    arguments: tuple, mask: torch.Tensor | None, takes_part: int, peers: Peers | None, call: Call
) -> tuple:
    """local_moments and its exchange(): (message, merged, rest). arguments: of the operator,
    without frame, mask and backward."""
    return _exchanged_pass("moments", arguments[0], arguments, (mask, takes_part), peers, call)


def gradients(
    arguments: tuple, mask: torch.Tensor | None, peers: Peers | None, call: Call
) -> tuple:
    """local_gradients and its exchange(): (message, u, merged, rest). arguments: as in moments."""
    return _exchanged_pass("gradients", arguments[1], arguments, (mask,), peers, call)


def _exchange_from_device(
    message: torch.Tensor, channels: int, peers: Peers, call: Call
) -> torch.Tensor:
    """As exchange(), for a message without a frame; the merged one in one piece."""
    if peers.cuda:
        return transports.sum_in_stream_order(message, peers)
    own = message.cpu()  # waits for the device
    framed = F.pad(own, (0, max(0, frame_words(peers) - own.numel())))
    first, rest = exchange(framed, channels, peers, call)
    merged = first if rest is None else torch.cat([first, rest])
    dtype = int(ops.header(first, peers.ranks)[3])
    # A rank without samples may be of another dtype than the group, whose length then counts.
    words = own.numel() if dtype < 0 else HEADER_WORDS + channels * MESSAGE_WORDS[DTYPES[dtype]]
    merged = F.pad(merged[:words], (0, max(0, words - merged.numel())))
    return merged.to(message.device)


def gather(
    message: torch.Tensor, channels: int, peers: Peers | None, call: Call
) -> tuple[torch.Tensor, torch.Tensor]:
    """Brings every rank's record of the welford mode to all ranks.

    Records travel in the first message of all exchanges, each rank's in a place of its own where
    the others add zeros; if they do not fit the frame, in an all-gather after it.

    Returns (merged message, whose header counts; records, one after the other, on CUDA each behind
    its header). Raises DivergenceError on every rank if the calls differ.
    """
    record = message[HEADER_WORDS:]
    if peers is None:
        return message, message if message.is_cuda else record
    if message.is_cuda:
        return _gather_from_device(message, channels, peers, call)
    frame, fits = refusing(_placed, (message, channels, peers), message, peers, call)
    words, size = frame.numel(), record.numel()
    first = sum_first(frame, peers, call)
    dtype = check_header(first, peers, call)
    if dtype is not None:
        size = record_words(channels, dtype)
    if fits and first.numel() == words:
        return first, first[HEADER_WORDS : HEADER_WORDS + peers.ranks * size]
    whole = torch.cat([frame[: first.numel()], record])
    record = ops.remaining_words(whole, first, peers.ranks, channels, size)
    return first, transports.all_gather(record, peers, call)


def _placed(message: torch.Tensor, channels: int, peers: Peers) -> tuple[torch.Tensor, bool]:
    """The first message of gather(), and whether it has room for all records."""
    record = message[HEADER_WORDS:]
    size = record.numel()
    words = frame_words(peers) or HEADER_WORDS + peers.ranks * size
    frame = torch.zeros(words, dtype=torch.int64, device=message.device)
    frame[:HEADER_WORDS] = message[:HEADER_WORDS]
    # By the largest record: a rank without samples may be of another dtype than the group.
    fits = peers.any_length or HEADER_WORDS + peers.ranks * (1 + 2 * channels) <= words
    if fits:
        begin = HEADER_WORDS + peers.rank * size
        frame[begin : begin + size] = record
    return frame, fits


def _gather_from_device(
    message: torch.Tensor, channels: int, peers: Peers, call: Call
) -> tuple[torch.Tensor, torch.Tensor]:
    """As gather(), each record behind its header, for the device to look at."""
    if peers.cuda:
        messages = transports.gather_in_stream_order(message, peers)
        return messages[:, :HEADER_WORDS].sum(0), messages.flatten()
    own = message.cpu()  # waits for the device
    merged, records = gather(own, channels, peers, call)
    records = records.view(peers.ranks, -1)
    headers = own[:HEADER_WORDS].repeat(peers.ranks, 1)  # the calls agree
    headers[:, 0], headers[:, 3] = records[:, 0], 0
    headers[0, 3] = merged[3]
    messages = torch.cat([headers, records], 1).flatten()
    return merged[:HEADER_WORDS].to(message.device), messages.to(message.device)


def trimmed(
    message: torch.Tensor, merged: torch.Tensor, rest: torch.Tensor | None, needed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """What an exchange gave, without what statistics are not made of: this rank's own words, and
    what lies behind the first `needed` merged words. In memory of their own, to be kept."""

    def compact(words, size):
        words = words[:size]
        return words.clone() if words.untyped_storage().nbytes() > words.nbytes else words

    if rest is not None:
        rest = compact(rest, rest.numel())
    return compact(message, HEADER_WORDS), compact(merged, needed), rest


def sum_of_ranks(x: torch.Tensor, tag: int, peers: Peers | None, call: Call) -> torch.Tensor:
    """The sum of x over the group, float64; tag: 20 bits, equal on ranks whose x may be summed.

    Raises DivergenceError on every rank if they differ: a message of the frame's length goes first.
    Over NCCL the sum is NaN then.
    """
    if peers is None:
        return x
    if x.is_cuda and peers.cuda:
        return _tagged_sum(x, tag, peers)
    agree(torch.empty(0, dtype=torch.int64, device="cpu"), tag, peers, call)
    return transports.sum_over_gloo(x.cpu().contiguous(), peers, call).to(x.device)


def _tagged_sum(x: torch.Tensor, tag: int, peers: Peers) -> torch.Tensor:
    """In stream order; the tags travel in the same message."""
    tags = [x.new_full((1,), t) for t in (tag, tag * tag)]  # of up to 2,048 ranks exact
    total = transports.sum_in_stream_order(torch.cat([x.flatten(), *tags]), peers)
    tag_sum, squares = total[-2:].to(torch.int64)
    alike = peers.ranks * squares == tag_sum * tag_sum
    return torch.where(alike, total[:-2].view(x.shape), math.nan)
