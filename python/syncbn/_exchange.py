"""The messages of an exchange: framing, headers, and what ranks get when their calls differ."""

import contextlib
import math
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from . import _collective, _groups
from ._groups import Peers
from ._ops import DTYPES, HEADER_BACKWARD, HEADER_WORDS, MESSAGE_WORDS, ops, record_words
from ._where import Call
from .errors import DivergenceError, ExchangeTimeout, PeerLost

#: Words of the first message of an exchange over Gloo, the same for every call of the group: Gloo
#: ends the process when ranks bring different lengths, so lengths may differ only after the first
#: message has shown that the calls agree. 512 channels of float32 fit.
FRAME_WORDS = HEADER_WORDS + 512 * 19

_CPU = torch.device("cpu")


def frame_words(peers: Peers | None, device: torch.device = _CPU) -> int:
    """How many words a message to that group has at least. On CUDA there is no frame: over NCCL
    nobody reads a header, and what goes through the host is framed there."""
    return 0 if peers is None or peers.any_length or device.type == "cuda" else FRAME_WORDS


def _sum_first(message: torch.Tensor, peers: Peers, call: Call) -> torch.Tensor:
    """The sum of what goes first: over Gloo the frame; where lengths may differ the whole message,
    and if they do the header alone, which tells why."""
    if not peers.any_length:
        return _collective.all_reduce(message[:FRAME_WORDS], peers, call)
    try:
        return _collective.all_reduce(message, peers, call)
    except _collective.LengthsDiffer:
        return _collective.all_reduce(message[:HEADER_WORDS], peers, call)


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
    return _rest_after(_sum_first(message, peers, call), message, channels, peers, call)


def _rest_after(first, message, channels, peers, call) -> tuple:
    """What exchange() returns, when the first part of the sum is there."""
    _check(first, peers, call)
    rest = ops.remaining_words(message, first, peers.ranks, channels, -1)
    if rest.numel() == 0:
        return first, None
    return first, _collective.all_reduce(rest, peers, call)


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
        given, merged, agree = _collective.sum_of_pass(run, (*arguments, *rest), peers, call)
    except _collective.PassFailed as error:
        raise _refused(error.__cause__, x, peers, call) from None
    if agree:
        return *given, merged, None
    if merged is None:
        merged = _collective.all_reduce(given[0][:HEADER_WORDS], peers, call)
    return *given, *_rest_after(merged, given[0], channels, peers, call)


def refusing(run, arguments: tuple, x: torch.Tensor, peers: Peers | None, call: Call):
    """run(*arguments), a pass over x before an exchange. Its error is told to the others."""
    try:
        return run(*arguments)
    except Exception as error:
        raise _refused(error, x, peers, call) from None


def _refused(error: Exception, x: torch.Tensor, peers: Peers | None, call: Call) -> Exception:
    """The error to raise, which names the layer where there was no memory."""
    if not _collective.lacks_memory(error):
        reject(peers, call, error, x=x)
        return error
    reject(peers, call, MemoryError(_collective.reason_of(error)), x=x)
    return _collective.out_of_memory(error, peers, call)


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
        return _collective.sum_in_stream_order(message, peers)
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
    first = _sum_first(frame, peers, call)
    dtype = _check(first, peers, call)
    if dtype is not None:
        size = record_words(channels, dtype)
    if fits and first.numel() == words:
        return first, first[HEADER_WORDS : HEADER_WORDS + peers.ranks * size]
    whole = torch.cat([frame[: first.numel()], record])
    record = ops.remaining_words(whole, first, peers.ranks, channels, size)
    return first, _collective.all_gather(record, peers, call)


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
        messages = _collective.gather_in_stream_order(message, peers)
        return messages[:, :HEADER_WORDS].sum(0), messages.flatten()
    own = message.cpu()  # waits for the device
    merged, records = gather(own, channels, peers, call)
    records = records.view(peers.ranks, -1)
    headers = own[:HEADER_WORDS].repeat(peers.ranks, 1)  # the calls agree
    headers[:, 0], headers[:, 3] = records[:, 0], 0
    headers[0, 3] = merged[3]
    messages = torch.cat([headers, records], 1).flatten()
    return merged[:HEADER_WORDS].to(message.device), messages.to(message.device)


def check_count(merged: torch.Tensor, own: int, sizes: str) -> None:
    """Refuses one value per channel over all ranks: it has no variance. All ranks see the same
    count, so all refuse it.

    own: this rank's count, known without a look at the device; 0 where it is not. Only a rank with
    at most one value looks at the sum: on a GPU it waits for that, and not in a captured graph.
    """
    if own > 1 or (merged.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    if int(merged[0]) == 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got 1 over all {sizes}"
        )


class Backward(NamedTuple):
    """Who takes part in the backward of a step: whether any rank wants the gradient of x, or the
    global gradients of weight and bias, so that backward exchanges; and the ranks that cannot come
    to it."""

    x: bool
    sums: bool
    absent: tuple[int, ...] = ()


#: Counters of ranks in the header's word about backward: of those that want the gradient of x, of
#: those that want the global gradients of weight and bias, and of those that can come.
WANTS_X, WANTS_SUMS, COMES = 1, 1 << 12, 1 << 24
_COUNTER = (1 << 12) - 1


def backward_of(merged: torch.Tensor, own: int, peers: Peers | None, call: Call) -> Backward:
    """What the merged header of a forward says of its backward. own: this rank's word. If not
    all ranks can come to an exchange that some want, they say now who cannot."""
    if peers is None:
        return Backward(bool(own & WANTS_X), bool(own & WANTS_SUMS))
    if merged.is_cuda and peers.cuda:  # nobody looks at the header; every rank with a node comes
        return Backward(True, True)
    word = merged[HEADER_BACKWARD].item()
    wants = (bool(word & _COUNTER), bool(word // WANTS_SUMS & _COUNTER))
    if not any(wants) or word // COMES == peers.ranks:
        return Backward(*wants)
    comes = numbers_of_ranks(own // COMES, _BACKWARD_TAG, peers, call)
    return Backward(*wants, tuple(rank for rank, number in enumerate(comes) if not number))


#: Tells this exchange from others of the same kind.
_BACKWARD_TAG = zlib.crc32(b"who comes to backward") & 0xFFFFF


def check_present(backward: Backward, peers: Peers | None, call: Call) -> None:
    """Refuses a backward to which some ranks cannot come, before it waits for them."""
    if not backward.absent:
        return
    raise DivergenceError(
        f"{call}, {peers}: {_ranks(backward.absent)} made the forward without gradients "
        "(torch.no_grad, or neither an input nor a parameter that requires one) and cannot come to "
        "this backward; expected gradients on all ranks or on none"
    )


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


def _check(merged: torch.Tensor, peers: Peers, call: Call) -> torch.dtype | None:
    """The dtype of the ranks with samples, if any; raises if the calls differ. On a GPU the passes
    look at the header, where it lies: nobody waits, and calls that differ give NaN."""
    if merged.is_cuda:
        return None
    _, agree, rejected, dtype = ops.header(merged, peers.ranks).tolist()
    if rejected or not agree:
        reason = "a rank refused its input" if rejected else "the ranks did not make the same call"
        fields = [f"{name}={value}" for name, value in call.fields().items()]
        difference = _difference(_texts(_SEPARATOR.join(fields), peers, call))
        error = DivergenceError(f"{call}, {peers}: {reason}: {difference}")
        error.group_name = peers.group_name
        raise error
    return None if dtype < 0 else DTYPES[dtype]


#: Between the fields of a call; a text without it is that of a rank that refused its input.
_SEPARATOR = "\x1f"


def _texts(text: str, peers: Peers, call: Call) -> dict[int, str]:
    """Each rank's text, exchanged once more in the frame; this rank's alone if others do not come.
    All ranks see the same header and come here, unless one was interrupted: hence the short limit.
    A text that is too long loses the fields at its end."""
    size = (FRAME_WORDS - HEADER_WORDS) // peers.ranks
    own = text.encode()
    if len(own) > 8 * size:
        own = own[: 8 * size].rpartition(_SEPARATOR.encode())[0] or own[: 8 * size]
    own = own.ljust(8 * size, b"\0")
    frame = torch.zeros(FRAME_WORDS, dtype=torch.int64, device="cpu")
    begin = HEADER_WORDS + peers.rank * size
    frame[begin : begin + size] = torch.frombuffer(bytearray(own), dtype=torch.int64)
    try:
        limited = peers._replace(timeout=min(peers.timeout, 5.0))
        merged = _collective.all_reduce(frame, limited, call)
    except (ExchangeTimeout, PeerLost):
        return {peers.rank: text}
    words = merged[HEADER_WORDS:][: peers.ranks * size].view(peers.ranks, size)
    return {
        rank: own.contiguous().numpy().tobytes().rstrip(b"\0").decode(errors="replace")
        for rank, own in enumerate(words)
    }


def _difference(texts: dict[int, str]) -> str:
    """What ranks say that refused their input; else the fields of their calls that differ."""
    refused = [f"rank {rank}: {text}" for rank, text in texts.items() if _SEPARATOR not in text]
    if refused:
        return "; ".join(refused)
    if len(texts) == 1:
        ((rank, text),) = texts.items()
        return f"rank {rank}: {text.replace(_SEPARATOR, ', ')}; the others did not say"
    calls = {r: dict(f.partition("=")[::2] for f in t.split(_SEPARATOR)) for r, t in texts.items()}
    differing = []
    for name in dict.fromkeys(name for call in calls.values() for name in call):
        by_value: dict[str, list[int]] = {}
        for rank, call in calls.items():
            by_value.setdefault(call.get(name, "none"), []).append(rank)
        if len(by_value) > 1:
            values = (f"{value} on {_ranks(ranks)}" for value, ranks in by_value.items())
            differing.append(f"{name}: {', '.join(values)}")
    return "; ".join(differing) or "in something that their errors do not show"


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" * (len(ranks) > 8))
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def sum_of_ranks(x: torch.Tensor, tag: int, peers: Peers | None, call: Call) -> torch.Tensor:
    """The sum of x over the group, float64; tag: 20 bits, equal on ranks whose x may be summed.

    Raises DivergenceError on every rank if they differ: a message of the frame's length goes first.
    Over NCCL the sum is NaN then.
    """
    if peers is None:
        return x
    if x.is_cuda and peers.cuda:
        return _tagged_sum(x, tag, peers)
    _agree(torch.empty(0, dtype=torch.int64, device="cpu"), tag, peers, call)
    return _collective.sum_over_gloo(x.cpu().contiguous(), peers, call).to(x.device)


def _tagged_sum(x: torch.Tensor, tag: int, peers: Peers) -> torch.Tensor:
    """In stream order; the tags travel in the same message."""
    tags = [x.new_full((1,), t) for t in (tag, tag * tag)]  # of up to 2,048 ranks exact
    total = _collective.sum_in_stream_order(torch.cat([x.flatten(), *tags]), peers)
    tag_sum, squares = total[-2:].to(torch.int64)
    agree = peers.ranks * squares == tag_sum * tag_sum
    return torch.where(agree, total[:-2].view(x.shape), math.nan)


def numbers_of_ranks(number: int, tag: int, peers: Peers | None, call: Call) -> list[int]:
    """Every rank's number. Raises DivergenceError on every rank if tags (20 bits) differ, or other
    ranks are in another exchange of the group."""
    if peers is None:
        return [number]
    numbers = torch.zeros(peers.ranks, dtype=torch.int64, device="cpu")
    numbers[peers.rank] = number
    return _agree(numbers, tag, peers, call).tolist()


def raise_together(error: Exception | None, peers: Peers | None, call: Call) -> None:
    """Raises this rank's error, and on ranks without one a ValueError that quotes the others'. A
    collective call, also where there is no error."""
    failed = numbers_of_ranks(int(error is not None), 0, peers, call)
    if peers is not None and any(failed):
        texts = _texts("" if error is None else f"{call}: {error}", peers, call)
    if error is not None:
        raise error
    if any(failed):
        raise ValueError("; ".join(f"rank {r}: {text}" for r, text in texts.items() if text))


def _agree(words: torch.Tensor, tag: int, peers: Peers, call: Call) -> torch.Tensor:
    """The sum of a few words over ranks with equal tags, in a first message."""
    size = HEADER_WORDS + words.numel()
    words_in_all = max(frame_words(peers), size)
    message = torch.zeros(words_in_all, dtype=torch.int64, device="cpu")
    message[1], message[2] = tag, tag * tag
    message[HEADER_WORDS:size] = words
    merged = _sum_first(message, peers, call)
    _check(merged, peers, call)
    return merged[HEADER_WORDS:size]


def reject(
    peers: Peers | None,
    call: Call,
    error: Exception,
    compare: bool = True,
    x: object = None,
    parameter: torch.Tensor | None = None,
    counter: torch.Tensor | None = None,
) -> None:
    """Takes part in an exchange with the word that this rank cannot, so that the others get its
    error now and not when their time is up. compare: the others are in exchange() or gather().
    x: this rank's input. parameter: one that has the layer's number of channels. counter: a tensor
    of any shape that lies where the layer does."""
    if peers is None:
        return
    device = _device_of_others(peers, x, parameter, counter)
    if device.type == "cuda" and peers.cuda:
        _reject_in_stream_order(x, parameter, peers, call, device)
        return
    # This rank's own error is the one to raise, whatever becomes of the exchange.
    with contextlib.suppress(ExchangeTimeout, PeerLost):
        like = torch.empty(0, device="cpu")
        _sum_first(ops.rejection(like, frame_words(peers)), peers, call)
        if compare:
            _texts(f"{call}: {type(error).__name__}: {error}", peers, call)


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
    if _groups.is_nccl_alone(peers):
        return torch.device("cuda", torch.cuda.current_device())
    return x.device if isinstance(x, torch.Tensor) else _CPU


def _reject_in_stream_order(
    x: object,
    parameter: torch.Tensor | None,
    peers: Peers,
    call: Call,
    device: torch.device,
) -> None:
    """NaN for the others, if the length of their messages can be known: their channels, and by x
    their dtype. Else, and where they are in sum_of_ranks(), they wait for NCCL's time limit."""
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
    options, size = call.options, channels * MESSAGE_WORDS[x.dtype]
    gathers = options is not None and options.statistics == "welford"
    gathers = gathers and call.direction == "forward"
    if gathers:
        size = record_words(channels, x.dtype)
    message = torch.zeros(HEADER_WORDS + size, dtype=torch.int64, device=device)
    message[3:4].fill_(1)  # ranks that refuse
    if gathers:
        _collective.gather_in_stream_order(message, peers)
    else:
        _collective.sum_in_stream_order(message, peers)
