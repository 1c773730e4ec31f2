# SPDX-License-Identifier: Apache-2.0
"""What ranks must have in common, and what they say when they do not."""

from collections.abc import Sequence
from typing import Protocol

import torch

from ..errors import DivergenceError, ExchangeTimeout, PeerLost
from ..operators import COMES, DTYPES, FRAME_WORDS, HEADER_WORDS, WANTS_SUMS, ops, without_modes
from .call import Backward, Call, Peers, tag_of


class Engine(Protocol):
    """Sums int64 words over the ranks of a group, on the host; OnHost of host.py does."""

    peers: Peers
    frame_words: int

    def within(self, seconds: float) -> "Engine": ...

    def sum_words(self, words: torch.Tensor, call: Call) -> torch.Tensor: ...

    def sum_first(self, message: torch.Tensor, call: Call) -> torch.Tensor: ...


def check_header(merged: torch.Tensor, engine: Engine, call: Call) -> torch.dtype | None:
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


def exchange_texts(text: str, engine: Engine, call: Call) -> dict[int, str]:
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


def numbers_of_ranks(number: int, tag: int, engine: Engine | None, call: Call) -> list[int]:
    """Gives every rank's number. Raises DivergenceError on every rank if tags (20 bits) differ, or
    other ranks are in another exchange of the group."""
    if engine is None:
        return [number]
    numbers = torch.zeros(engine.peers.ranks, dtype=torch.int64, device="cpu")
    numbers[engine.peers.rank] = number
    return agree(numbers, tag, engine, call).tolist()


def raise_together(error: Exception | None, engine: Engine | None, call: Call) -> None:
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


def agree(words: torch.Tensor, tag: int, engine: Engine, call: Call) -> torch.Tensor:
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


def backward_of(word: int, own: int, engine: Engine, call: Call) -> Backward:
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
