# SPDX-License-Identifier: Apache-2.0
"""Sums over V shares, on any number of processes, whose bits depend on no order: each summand is
rounded to a multiple of one power of two, the same for all, and the sums of those are exact in
float64."""

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from . import callers, groups, host
from .call import Call, Peers, Said, tag_of

#: An exponent where there is no summand, and that of zeros.
NONE, ZERO = -(1 << 15), -1100
#: Elements that are rounded at a time, so that they stay in a cache.
_PIECE = 1 << 16


def _largest(x: Tensor) -> float:
    if x.numel() == 0:
        return 0.0
    low, high = torch.stack(torch.aminmax(x)).double().tolist()
    return max(-low, high) if low == low else math.nan


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x) if x.is_complex() else x


def exponent_of(summands: Iterable[Tensor | None]) -> int:
    """Gives the smallest e such that all finite numbers in them are below 2^e; NONE without any."""
    exponent = NONE
    for x in summands:
        if x is not None:
            x = _real(x.detach())
            largest = _largest(x)
            if not math.isfinite(largest):
                largest = _largest(x.nan_to_num(0.0, 0.0, 0.0))
            exponent = max(exponent, math.frexp(largest)[1] if largest else ZERO)
    return exponent


def pack(exponents: Sequence[int]) -> Tensor:
    """Makes words of exponents, four in each."""
    padded = [*exponents, *[NONE] * (-len(exponents) % 4)]
    return torch.tensor(padded, dtype=torch.int16).view(torch.int64)


def unpack(words: Tensor, count: int) -> list[int]:
    """Gives the largest of the ranks' exponents. words: each rank's, (ranks, n)."""
    return words.view(torch.int16).amax(0)[:count].tolist()


class Parties:
    """The processes of a group, which have V shares: each has neighbours, as evenly as can be.
    Without torch.distributed one process has all.

    shares: their number; None: one for each process. mine: the numbers of this process's shares.
    """

    def __init__(self, shares: int | None, sharing: callers.Sharing, who: str) -> None:
        self.processes, self.rank, self._sharing, self._who = 1, 0, sharing, who
        if callers.initialized():
            group = callers.resolve(sharing.name)
            self.processes, self.rank = group.size(), group.rank()
        self.shares = shares or self.processes
        bounds = [self.shares * i // self.processes for i in range(self.processes + 1)]
        self.mine = range(bounds[self.rank], bounds[self.rank + 1])
        self._room = max(2, (self.shares - 1).bit_length())

    def _peers(self) -> Peers:
        peers = groups.peers(self._sharing, self._who)
        assert peers is not None  # there are several processes
        return peers

    def gather(self, what: str, said: dict[str, object], own: Tensor) -> Tensor:
        """Gives the int64 words (n,) of all processes, (processes, n), over the host. All must say
        the same by name.

        Raises DivergenceError on every rank if they do not, ExchangeTimeout or PeerLost.
        """
        if self.processes == 1:
            return own[None]
        places = own.new_zeros(self.processes, own.numel())
        places[self.rank] = own
        call = Call(f"{self._who}.{what}", options=Said(said))
        way = host.engine_of(self._peers())
        return way.sum(places, tag_of(what, own.numel(), said), call)

    def of_first(self, what: str, own: Tensor) -> Tensor:
        """Gives the bytes of the first process, of which each has as many."""
        words = nn.functional.pad(own.cpu(), (0, -len(own) % 8)).view(torch.int64)
        if self.rank > 0:
            words = torch.zeros_like(words)
        if self.processes > 1:
            way = host.engine_of(self._peers())
            words = way.sum(words, tag_of(what, len(words)), Call(f"{self._who}.{what}"))
        return words.view(torch.uint8)[: len(own)].to(own.device)

    def total(
        self, what: str, summands: Sequence[Sequence[Tensor]], exponents: Sequence[int]
    ) -> list[Iterable[Tensor]]:
        """Gives sums over all shares, each in pieces of a flat float64 tensor, for mean_of().
        summands: for each sum the tensors of this process's shares, which have no more than one
        each, on one device. exponents: for each sum the largest of all processes."""
        pieces: list[Iterable[Tensor]] = list(map(self._pieces, summands, exponents))
        if self.processes == 1:
            return pieces
        like = [next(iter(own), None) for own in summands]
        sizes = [0 if x is None else _real(x).numel() for x in like]
        device = next((x.device for x in like if x is not None), None)
        whole = torch.empty(sum(sizes), dtype=torch.float64, device=device)
        for place, own in zip(whole.split(sizes), pieces):
            for part, piece in zip(place.split(_PIECE), own):
                part.copy_(piece)
        way = host.transport_of(self._peers(), whole.device)
        whole = way.sum(whole, tag_of(what, sizes), Call(f"{self._who}.{what}"))
        return [total.split(_PIECE) for total in whole.split(sizes)]

    def refuse(self, what: str, error: BaseException) -> None:
        """Tells the others, who are in an exchange of this group or come to one, that this process
        does not come."""
        if self.processes > 1:
            host.engine_of(self._peers()).refuse(Call(f"{self._who}.{what}"), error)

    def _pieces(self, own: Sequence[Tensor], exponent: int) -> Iterator[Tensor]:
        """Rounds to the multiple of a power of two, of which a float64 holds V, and adds."""
        scale = math.ldexp(1.5, min(exponent, 1023 - self._room) + self._room - 1)
        for parts in zip(*(_real(x).flatten().split(_PIECE) for x in own)):
            total, *others = (p.to(torch.float64, copy=True).add_(scale).sub_(scale) for p in parts)
            for more in others:
                total += more
            yield total


def mean_of(pieces: Iterable[Tensor], count: int, room: Tensor) -> Tensor:
    """Writes a sum over a count to a contiguous tensor, which may be one of the summands."""
    for part, piece in zip(_real(room).view(-1).split(_PIECE), pieces, strict=True):
        part.copy_(piece.div_(count) if count > 1 else piece)
    return room
