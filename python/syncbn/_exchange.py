"""The messages of an exchange: framing, headers, and what ranks get when their calls differ."""

import contextlib
import math

import torch
import torch.nn.functional as F

from . import _collective, _groups
from ._groups import Peers
from ._ops import DTYPES, HEADER_WORDS, MESSAGE_WORDS, ops, record_words
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


def _traced(message, channels, peers, call, own) -> tuple:
    """What the operators of traced graphs are given (_traced.py)."""
    layer = call.settings
    options = (layer.eps, layer.statistics, layer.activation, layer.negative_slope)
    return message, channels, own, peers.group_name, call.layer, call.dtype, *options


def _kept_in_graph(merged: torch.Tensor) -> torch.Tensor:
    """A graph may not drop what other processes wait for. Marking the operator as having side
    effects would do, but no graph with activation checkpointing may hold such a one, except
    PyTorch's own wait, which does nothing to a tensor that is there."""
    return torch.ops._c10d_functional.wait_tensor(merged)


def exchange(
    message: torch.Tensor, channels: int, peers: Peers | None, call: Call, own: int = 0
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Sums a message over the group.

    own: of a forward call, this rank's count as for check_count(), which a traced graph calls in
    here.

    Returns (first part, the words beyond it or None). Raises DivergenceError on every rank if the
    calls differ.
    """
    if peers is None:
        return message, None
    if torch.compiler.is_compiling():
        arguments = _traced(message, channels, peers, call, own)
        return _kept_in_graph(ops.all_reduce_message(*arguments, call.direction)), None
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


def _exchanged_pass(name, x: torch.Tensor, arguments: tuple, mask, peers, call, own) -> tuple:
    """What the operator local_`name` gives, a message first, and exchange() of the message. Through
    the shared memory of one node both are one operator."""
    channels = x.shape[1]
    shared = peers is not None and peers.any_length and not x.is_cuda
    if not shared or torch.compiler.is_compiling():
        given = getattr(ops, f"local_{name}")(*arguments, frame_words(peers, x.device), mask)
        given = (given,) if isinstance(given, torch.Tensor) else given
        return *given, *exchange(given[0], channels, peers, call, own)
    run = getattr(ops, f"shm_{name}")
    given, merged, agree = _collective.sum_of_pass(run, (*arguments, mask), peers, call)
    if agree:
        return *given, merged, None
    if merged is None:
        merged = _collective.all_reduce(given[0][:HEADER_WORDS], peers, call)
    return *given, *_rest_after(merged, given[0], channels, peers, call)


def moments(
    arguments: tuple, mask: torch.Tensor | None, peers: Peers | None, call: Call, own: int
) -> tuple:
    """local_moments and its exchange(): (message, merged, rest). arguments: of the operator,
    without frame and mask."""
    return _exchanged_pass("moments", arguments[0], arguments, mask, peers, call, own)


def gradients(
    arguments: tuple, mask: torch.Tensor | None, peers: Peers | None, call: Call
) -> tuple:
    """local_gradients and its exchange(): (message, u, merged, rest). arguments: as in moments."""
    return _exchanged_pass("gradients", arguments[1], arguments, mask, peers, call, 0)


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
    message: torch.Tensor, channels: int, peers: Peers | None, call: Call, own: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Brings every rank's record of the welford mode to all ranks.

    Records travel in the first message of all exchanges, each rank's in a place of its own where
    the others add zeros; if they do not fit the frame, in an all-gather after it. own: as for
    exchange().

    Returns (merged message, whose header counts; records, one after the other, on CUDA each behind
    its header). Raises DivergenceError on every rank if the calls differ.
    """
    record = message[HEADER_WORDS:]
    if peers is None:
        return message, message if message.is_cuda else record
    if torch.compiler.is_compiling():
        arguments = _traced(message, channels, peers, call, own)
        merged, records = ops.all_gather_record(*arguments, peers.ranks)
        return _kept_in_graph(merged), records
    if message.is_cuda:
        return _gather_from_device(message, channels, peers, call)
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
    dtype = _check(first, peers, call)
    if dtype is not None:
        size = record_words(channels, dtype)
    if fits and first.numel() == words:
        return first, first[HEADER_WORDS : HEADER_WORDS + peers.ranks * size]
    whole = torch.cat([frame[: first.numel()], record])
    record = ops.remaining_words(whole, first, peers.ranks, channels, size)
    return first, _collective.all_gather(record, peers, call)


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


def check_count(merged: torch.Tensor, own: int, peers: Peers | None, sizes: str) -> None:
    """Refuses one value per channel over all ranks: it has no variance. All ranks see the same
    count, so all refuse it.

    own: this rank's count, known without a look at the device; 0 where it is not. Only a rank with
    at most one value looks at the sum: on a GPU it waits for that, and not in a captured graph.
    """
    if own > 1:
        return
    if torch.compiler.is_compiling():
        count = own if peers is None else 0  # with peers the operator of the exchange looks
    elif merged.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    else:
        count = int(merged[0])
    if count == 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got 1 over all {sizes}"
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
        texts = _texts(call.details(), peers, call)
        error = DivergenceError(f"{call}, {peers}: {reason}: {'; '.join(texts)}")
        error.group_name = peers.group_name
        raise error
    return None if dtype < 0 else DTYPES[dtype]


def _texts(text: str, peers: Peers, call: Call) -> list[str]:
    """Each rank's text, "rank 0: ...", exchanged once more in the frame. All ranks see the same
    header and come here, but those in a compiled step, which raises at once: hence the short
    limit."""
    size = (FRAME_WORDS - HEADER_WORDS) // peers.ranks
    own = text.encode()[: 8 * size].ljust(8 * size, b"\0")
    frame = torch.zeros(FRAME_WORDS, dtype=torch.int64, device="cpu")
    begin = HEADER_WORDS + peers.rank * size
    frame[begin : begin + size] = torch.frombuffer(bytearray(own), dtype=torch.int64)
    try:
        limited = peers._replace(timeout=min(peers.timeout, 5.0))
        merged = _collective.all_reduce(frame, limited, call)
    except (ExchangeTimeout, PeerLost):
        return [f"rank {peers.rank}: {text}", "the others did not say"]
    lines = []
    for rank in range(peers.ranks):
        words = merged[HEADER_WORDS + rank * size :][:size].contiguous()
        said = words.numpy().tobytes().rstrip(b"\0").decode(errors="replace")
        lines.append(f"rank {rank}: {said}")
    return lines


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
        raise ValueError("; ".join(text for text in texts if not text.endswith(": ")))


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
        if compare and not torch.compiler.is_compiling():
            _texts(f"{call}: {type(error).__name__}: {error}", peers, call)


def _device_of_others(
    peers: Peers,
    x: object,
    parameter: torch.Tensor | None,
    counter: torch.Tensor | None,
) -> torch.device:
    """Where the messages of ranks lie that do not refuse, which decides the way that they take:
    where the layer lies, because the input may be what is refused."""
    for tensor in (parameter, counter):
        if tensor is not None:
            return tensor.device
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
    settings, size = call.settings, channels * MESSAGE_WORDS[x.dtype]
    gathers = settings is not None and settings.statistics == "welford"
    gathers = gathers and call.direction == "forward"
    if gathers:
        size = record_words(channels, x.dtype)
    message = torch.zeros(HEADER_WORDS + size, dtype=torch.int64, device=device)
    message[HEADER_WORDS - 1 :][:1].fill_(1)  # ranks that refuse
    if gathers:
        _collective.gather_in_stream_order(message, peers)
    else:
        _collective.sum_in_stream_order(message, peers)
