# SPDX-License-Identifier: Apache-2.0
"""How long each layer summed, waited for other ranks and normalized, and for which rank."""

import html
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from ..exchange import callers
from ..exchange.call import Call, Times, tag_of
from ..exchange.host import transport_of
from ..exchange.transport import Transport
from ..nn import SyncBatchNorm, device_of, layers_of
from ..operators import ops
from .report import table


class LayerTiming(NamedTuple):
    """One row of a Timing. Seconds are sums over the exchanges of the block."""

    path: str
    #: of forward and backward together; 0 where nobody is waited for on the host
    exchanges: int
    #: of this rank; summed and normalized are None on CUDA
    summed: float | None
    waited: float
    normalized: float | None
    #: how many exchanges the next two are of: the last ones, at most 512
    compared: int
    #: by rank (global numbers): in how many it came last, and for how long the others waited then
    came_last: dict[int, int]
    waited_for: dict[int, float]


class Timing(list[LayerTiming]):
    """LayerTimings, when the block has ended; prints as a table and a sentence about the rank that
    the others waited for most. In a notebook it is a picture."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._layers = layers_of(module)

    def __enter__(self) -> "Timing":
        for path, layer in self._layers:
            if layer.state.times is not None:
                raise RuntimeError(
                    f"timing: got {path or 'a layer'}, which is being timed already, expected one "
                    "block at a time"
                )
        for _, layer in self._layers:
            layer.state.times = Times()
        _count_blocks(1)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        _count_blocks(-1)
        noted = []
        for path, layer in self._layers:
            # A layer that was given another group meanwhile begins anew, without times.
            noted.append((path, layer, layer.state.times or Times()))
            layer.state.times = None
        if kind is None:
            self[:] = _gathered(noted)

    @property
    def straggler(self) -> int | None:
        """The rank that the others waited for most, all layers together. None: nobody waited."""
        waits = _totals(row.waited_for for row in self)
        return max(waits, key=lambda rank: waits[rank]) if waits else None

    @property
    def summary(self) -> str:
        """A sentence that names the rank that the others wait for."""
        rank = self.straggler
        if rank is None:
            return "no exchange between ranks on the host"
        times = sum(row.came_last.get(rank, 0) for row in self)
        compared = sum(row.compared for row in self if rank in row.came_last)
        most = max(self, key=lambda row: row.waited_for.get(rank, 0.0))
        wait = _totals(row.waited_for for row in self)[rank] / max(times, 1)
        return (
            f"rank {rank} came last in {_share(times, compared)} of {compared:,} exchanges, the "
            f"others waited {_duration(wait)} each time, mostly at {most.path or 'the layer'}"
        )

    def __str__(self) -> str:
        return f"{table([_HEADING, *map(_cells, self)])}\n{self.summary}"

    def svg(self) -> str:
        """Draws a row for each rank, a column for each layer, dark where the others waited."""
        rows = [row for row in self if row.waited_for]
        ranks = sorted({rank for row in rows for rank in row.waited_for})
        darkest = max((max(row.waited_for.values()) for row in rows), default=0.0) or 1.0
        parts = []
        for y, rank in enumerate(ranks):
            parts.append(f'<text x="0" y="{20 * y + 14}">rank {rank}</text>')
            for x, row in enumerate(rows):
                seconds = row.waited_for.get(rank, 0.0)
                label = html.escape(f"rank {rank}, {row.path}: {_duration(seconds)}")
                parts.append(
                    f'<rect x="{70 + 20 * x}" y="{20 * y}" width="19" height="19" fill="#b00" '
                    f'fill-opacity="{seconds / darkest:.3f}" stroke="#ccc">'
                    f"<title>{label}</title></rect>"
                )
        for x, row in enumerate(rows):
            place = f'x="{70 + 20 * x}" y="{20 * len(ranks) + 8}"'
            turn = f'transform="rotate(45 {70 + 20 * x} {20 * len(ranks) + 8})"'
            parts.append(f"<text {place} {turn}>{html.escape(row.path)}</text>")
        deep = 20 * len(ranks) + 12 + 6 * max((len(row.path) for row in rows), default=0)
        size = f'width="{100 + 20 * len(rows) + deep}" height="{deep + 12}"'
        style = 'xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="11"'
        return "\n".join([f"<svg {style} {size}>", *parts, "</svg>\n"])

    _repr_svg_ = svg


_blocks = 0


def _count_blocks(change: int) -> None:
    """Operators note times while any block has begun."""
    global _blocks
    _blocks += change
    ops.shm_set(None, None, _blocks > 0)


def timing(module: nn.Module) -> Timing:
    """Notes where the time of the layers' exchanges goes, in a with block around training steps.

    Its end is a collective call of the ranks of the layers' groups: each brings its times to all.

        with syncbn.timing(model) as times:
            train_some_steps()
        print(times)

    Training has the same bits inside the block as outside. A copy of the model is not timed. If the
    block ends by an error, nothing is gathered.

    Args:
        module: the model.

    Returns:
        A list with one LayerTiming per synchronized layer, empty before the block has ended. It
        prints as a table and a sentence about the rank that the others waited for most, which are
        times.straggler and times.summary. times.svg() is a picture of ranks and layers.

    Raises:
        DivergenceError: at the end, the ranks timed models of different layers.
        ExchangeTimeout, PeerLost: at the end, a rank did not come, or has ended.
        RuntimeError: a layer is in another such block.
        ValueError: `module` is not a module.
    """
    return Timing(module)


def _totals(parts: Iterable[dict[int, float]]) -> Counter:
    total: Counter = Counter()
    for part in parts:
        total.update(part)
    return total


def _share(part: int, whole: int) -> str:
    return f"{100 * part / max(whole, 1):.0f} %"


def _duration(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


_HEADING = ("path", "exchanges", "summed", "waited", "normalized", "last", "waited_for")


def _cells(row: LayerTiming) -> tuple[object, ...]:
    """Gives the cells of a row, with times per exchange."""
    if row.exchanges == 0:
        return row.path, 0, *(None,) * 5
    own = (row.summed, row.waited, row.normalized)
    means = [None if seconds is None else _duration(seconds / row.exchanges) for seconds in own]
    if row.compared == 0:
        return row.path, row.exchanges, *means, None, None
    rank = max(row.waited_for, key=lambda rank: row.waited_for[rank])
    times = row.came_last[rank]
    last = f"rank {rank} ({_share(times, row.compared)})"
    return row.path, row.exchanges, *means, last, _duration(row.waited_for[rank] / max(times, 1))


def _gathered(noted: Sequence[tuple[str, SyncBatchNorm, Times]]) -> list[LayerTiming]:
    """Gives the layers' rows; groups one after the other, in the order of their first layers."""
    rows: dict[int, LayerTiming] = {}
    by_group: dict[str, tuple[Transport, list[int]]] = {}
    for number, (path, layer, _) in enumerate(noted):
        rows[number] = LayerTiming(path, 0, None, 0.0, None, 0, {}, {})
        outside = layer.state.sharing.name == callers.OUTSIDE
        peers = None if outside else layer.state.peers(layer.options())
        transport = transport_of(peers, device_of(layer))
        if peers is not None and transport.on_host:
            by_group.setdefault(peers.group_name, (transport, []))[1].append(number)
    for name, (transport, numbers) in by_group.items():
        members = callers.global_ranks(callers.resolve(name))
        waits = _waits_of_all(transport, [noted[n] for n in numbers])
        for number, of_layer in zip(numbers, waits, strict=True):
            rows[number] = _row(*noted[number], of_layer, members)
    return list(rows.values())


def _waits_of_all(
    transport: Transport, noted: Sequence[tuple[str, SyncBatchNorm, Times]]
) -> list[torch.Tensor]:
    """Gives (ranks, n) of each layer: the waits of the last n exchanges that all ranks noted."""
    peers = transport.peers
    assert peers is not None
    # Of each rank its part: how many waits, then these, the newest first.
    parts = torch.zeros(peers.ranks, len(noted), 1 + Times.MOST, device="cpu")
    for own, (_, _, times) in zip(parts[peers.rank], noted, strict=True):
        n = len(times.waits)
        own[0] = n
        own[1 : 1 + n] = torch.tensor(list(reversed(times.waits)))
    paths = [path for path, *_ in noted]
    what = f"syncbn.timing of {len(paths)} layers from {paths[0]!r}"
    parts = transport.sum(parts, tag_of(paths), Call(what, direction="gathering"))
    return [of[:, 1 : 1 + int(of[:, 0].min())] for of in parts.unbind(1)]


def _row(
    path: str, layer: SyncBatchNorm, times: Times, waits: torch.Tensor, members: list[int]
) -> LayerTiming:
    ranks, compared = waits.shape
    came_last: dict[int, int] = {}
    waited_for: dict[int, float] = {}
    if compared > 0:
        # Who came last waited least, whatever the clocks show.
        least, last = waits.double().min(0)
        others = (waits.double().sum(0) - least) / (ranks - 1) - least
        came_last = dict(zip(members, last.bincount(minlength=ranks).tolist(), strict=True))
        waited_for = dict(zip(members, last.bincount(others, ranks).tolist(), strict=True))
    on_host = device_of(layer).type != "cuda"
    return LayerTiming(
        path,
        times.exchanges,
        times.summed if on_host else None,
        times.waited,
        times.normalized if on_host else None,
        compared,
        came_last,
        waited_for,
    )
