"""The paths of layers in their models, which the ranks compare before a layer's first exchange in a
group: layers of equal shape that ranks call in different orders would mix their statistics. The
number that stands for the layer from then on is the same on all ranks."""

import gc
import zlib
from itertools import compress
from typing import Any

import torch
from torch import nn

from . import _exchange, _groups, _state
from ._groups import Peers
from ._ops import HEADER_WORDS
from ._options import Options
from ._state import UNNAMED, LayerState
from ._where import Call
from .errors import DivergenceError

#: What wrappers (DDP, torch.compile, FSDP, checkpoint_wrapper) put into paths.
_WRAPPERS = frozenset(("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))
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
            state.numbers = {g: n for g, n in state.numbers.items() if _groups.exists(g)}
            state.numbers[group] = _agreed(state, peers, x, options)
        state.number = state.numbers[group]
    state.group = group


def way(state: LayerState, peers: Peers | None) -> Peers | None:
    """The peers as a rank reaches them that refuses its input: as long as they may be comparing
    paths, over the host."""
    if peers is None or not state.compares or peers.group_name in state.numbers:
        return peers
    find(state)  # for the error's text
    return peers._replace(cuda="")


def _agreed(state: LayerState, peers: Peers, x: torch.Tensor, options: Options) -> int:
    find(state)
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{state.name}: got its first exchange in a group while a CUDA graph is captured, "
            "expected an eager training step before"
        )
    if peers.group_name not in _compared:
        for gone in [name for name in _compared if not _groups.exists(name)]:
            del _compared[gone]
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
        places = _exchange.numbers_of_ranks(-1 if other else older, _TAG, peers, call)
        same = -1 not in places
    if not same or len(set(places)) > 1:
        texts = [one or "a layer that no module holds" for one in said]
        if same:
            others = f"of {len(made)} others of that path"
            texts = [f"{text}, made after {place} {others}" for text, place in zip(texts, places)]
        texts = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))
        error = DivergenceError(f"{call}, {peers}: the ranks call different layers: {texts}")
        error.group_name = peers.group_name
        raise error
    group.count += 1
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
            for state in list(_state._states.values())
        )

    if not found():
        return False
    gc.collect()  # it may be what is left of another model
    return found()


def _size(peers: Peers) -> int:
    """How many words of the message a rank has."""
    return min(_WORDS, (_exchange.FRAME_WORDS - HEADER_WORDS) // peers.ranks)


def _end_of(path: str, peers: Peers) -> str:
    """As much of the path as there is room for."""
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
    words = _exchange._agree(words.flatten(), _TAG, peers, call).view(peers.ranks, size)
    return [row.contiguous().numpy().tobytes().rstrip(b"\0").decode() for row in words]


def _ends(path: str, end: str) -> bool:
    """Whether the path ends with the other: there may be more modules around one rank's model."""
    return not end or f".{path}".endswith(f".{end}")


def _path(state: LayerState) -> str:
    """Without wrappers; "" of a layer that no module holds."""
    if state.name == UNNAMED:
        return ""
    return ".".join(part for part in state.name.split(".") if part not in _WRAPPERS)


def find(state: LayerState) -> None:
    """Gives a layer that was made directly, and all others of them, the path where it lies."""
    if state.name != UNNAMED or state.sought:
        return
    paths = _paths()
    for other in list(_state._states.values()):
        if other.name == UNNAMED and not other.sought:
            other.sought, other.name = True, paths.get(other) or UNNAMED


def _paths() -> dict[LayerState, str]:
    """The path of each layer of this process in the largest model that holds it, so that it does
    not depend on what else, a feature extractor for example, holds parts of the model."""
    classes = _with_subclasses(nn.Module)
    objects = gc.get_objects()  # by type, and without asking the objects: some do things then
    chosen = map(classes.__contains__, map(id, map(type, objects)))
    modules = list(compress(objects, chosen))
    del objects
    inner = {id(child) for module in modules for _, child in _children(module)}
    found: dict[LayerState, tuple[int, str]] = {}
    for module in modules:
        if id(module) not in inner:
            size, paths = _layers(module)
            for state, path in paths.items():
                found[state] = max(found.get(state, (0, "")), (size, path))
    return {state: path for state, (_, path) in found.items()}


def _with_subclasses(cls: type) -> set[int]:
    """The ids of the class and of all that are derived from it."""
    found, left = set(), [cls]
    while left:
        cls = left.pop()
        if id(cls) not in found:
            found.add(id(cls))
            left += type.__subclasses__(cls)
    return found


def _children(module: nn.Module) -> list[tuple[str, Any]]:
    children = vars(module).get("_modules")  # none yet in a constructor
    if not isinstance(children, dict):
        return []
    return [(name, child) for name, child in children.items() if isinstance(child, nn.Module)]


def _layers(root: nn.Module) -> tuple[int, dict[LayerState, str]]:
    """How many modules are in a model; and the first path of each layer, without wrappers."""
    seen: set[int] = set()
    found: dict[LayerState, str] = {}
    left: list[tuple[nn.Module, str]] = [(root, "")]
    while left:
        module, path = left.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        state = vars(module).get("state")
        if type(state) is LayerState:
            found.setdefault(state, path)
        for name, child in reversed(_children(module)):
            inside = f"{path}.{name}" if path else name
            left.append((child, path if name in _WRAPPERS else inside))
    return len(seen), found
