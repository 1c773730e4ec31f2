# SPDX-License-Identifier: Apache-2.0
"""The paths of layers in their models, which the ranks compare before a layer's first exchange in a
group: layers of equal shape that ranks call in different orders would mix their statistics. The
number that stands for the layer from then on is the same on all ranks."""

import gc
import zlib

import torch

from ..errors import DivergenceError
from ..exchange import agreement, callers, engines
from ..exchange.call import Call, Peers
from ..operators import HEADER_WORDS
from .layer_state import UNNAMED, LayerState, living
from .living_modules import WRAPPERS
from .options import Options

#: In the header of a comparison, in the place of a call's fingerprint.
_TAG = zlib.crc32(b"syncbn paths") & 0xFFFFF
#: A rank's part of the message, at most.
_WORDS = 64
#: Layers of one path that are remembered.
_MOST = 1000


class _Group:
    """What was compared in a group, as often on all its ranks. made: by path, the layers, as
    numbers in the order in which this rank made them."""

    def __init__(self) -> None:
        self.count = 0
        self.made: dict[str, list[int]] = {}


_compared: dict[str, _Group] = {}


def compare(state: LayerState, peers: Peers, x: torch.Tensor, options: Options) -> None:
    """Before an exchange of a layer in another group than its last one: sets state.number to what
    the ranks agree on, which in the first exchange takes a message. Raises DivergenceError on every
    rank if they call different layers."""
    group = peers.group_name
    if state.compares:
        if group not in state.numbers:
            state.numbers = {g: n for g, n in state.numbers.items() if callers.exists(g)}
            state.numbers[group] = _agreed(state, peers, x, options)
        state.number = state.numbers[group]
    state.group = group


def way(state: LayerState, peers: Peers | None) -> Peers | None:
    """The peers as a rank reaches them that refuses its input: as long as they may be comparing
    paths, over the host."""
    if peers is None or not state.compares or peers.group_name in state.numbers:
        return peers
    state.find_path()  # for the error's text
    return peers.over_host()


def _agreed(state: LayerState, peers: Peers, x: torch.Tensor, options: Options) -> int:
    state.find_path()
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{state.name}: got its first exchange in a group while a CUDA graph is captured, "
            "expected an eager training step before the capture"
        )
    if peers.group_name not in _compared:
        for gone in [name for name in list(_compared) if not callers.exists(name)]:
            _compared.pop(gone, None)
        _compared[peers.group_name] = _Group()
    group, path = _compared[peers.group_name], _end_of(_path(state), peers)
    call = state.call_of(x, options)
    said = _exchanged(path, peers, call)
    longest = max(said, key=len)
    same, places = all(_ends(longest, one) for one in said), [0]
    made = group.made.get(longest, [])
    if same and longest and (made or len(set(said)) > 1):
        older = sum(number < state.made for number in made)
        other = path != longest and _has(longest, peers)
        places = agreement.numbers_of_ranks(-1 if other else older, _TAG, peers, call)
        same = -1 not in places
    if not same or len(set(places)) > 1:
        texts = [one or "a layer that no module holds" for one in said]
        if same:
            others = f"of {len(made)} others of that path"
            texts = [f"{text}, made after {place} {others}" for text, place in zip(texts, places)]
        lines = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))
        error = DivergenceError(f"{call}, {peers}: the ranks call different layers: {lines}")
        error.group_name = peers.group_name
        raise error
    group.count += 1
    if state.apart and places[0] > 1:  # after the model and a copy at least
        state.tell_apart(f" (copy {places[0]})")
    if longest:
        group.made[longest] = [*made, state.made][-_MOST:]
    return zlib.crc32(f"{longest} {group.count}".encode())


def _has(path: str, peers: Peers) -> bool:
    """Whether this rank has a layer of that very path which it has not compared in the group. Then
    a shorter path on this rank is that of another layer, and not of a model with less around it."""

    def found() -> bool:
        return any(
            state.compares
            and peers.group_name not in state.numbers
            and _end_of(_path(state), peers) == path
            for state in living()
        )

    if not found():
        return False
    gc.collect()  # it may be what is left of another model
    return found()


def _size(peers: Peers) -> int:
    """How many words of the message a rank has."""
    return min(_WORDS, (engines.FRAME_WORDS - HEADER_WORDS) // peers.ranks)


def _end_of(path: str, peers: Peers) -> str:
    """The end of the path that there is room for."""
    room = 8 * _size(peers)
    while len(path.encode()) > room and "." in path:
        path = path.partition(".")[2]
    return path.encode()[-room:].decode(errors="ignore")


def _exchanged(path: str, peers: Peers, call: Call) -> list[str]:
    """Every rank's path."""
    size = _size(peers)
    letters = bytearray(path.encode().ljust(8 * size, b"\0"))
    words = torch.zeros(peers.ranks, size, dtype=torch.int64, device="cpu")
    words[peers.rank] = torch.frombuffer(letters, dtype=torch.int64)
    words = agreement.agree(words.flatten(), _TAG, peers, call).view(peers.ranks, size)
    return [agreement.text_of(row) for row in words]


def _ends(path: str, end: str) -> bool:
    """Whether the path ends with the other: there may be more modules around one rank's model."""
    return not end or f".{path}".endswith(f".{end}")


def _path(state: LayerState) -> str:
    """Without wrappers; "" of a layer that no module holds."""
    path = state.path
    if path == UNNAMED:
        return ""
    return ".".join(part for part in path.split(".") if part not in WRAPPERS)
