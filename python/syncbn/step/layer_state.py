# SPDX-License-Identifier: Apache-2.0
"""What a layer has besides the tensors of a batch norm: its path, its group, and its call number.

None of it is a buffer: code that copies, moves, broadcasts or materializes the buffers of a model
meets exactly those of PyTorch's layer. None of it is a constant of a compiled graph either: the
graph holds a tensor with the state's id, so that equal layers share one graph.

Ranks compare the paths of layers before a layer's first exchange in a group: layers of equal shape
that ranks call in different orders would mix their statistics.
"""

import gc
import itertools
import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import DivergenceError
from ..exchange import agreement, callers, groups
from ..exchange.agreement import Engine
from ..exchange.call import Call, Peers, tag_of
from ..exchange.callers import Sharing
from ..operators import FRAME_WORDS, HEADER_WORDS, without_modes
from .options import Form, Options, check_options, form_of, is_strided

_WORLD = Sharing()
#: The name of a layer that was made directly.
UNNAMED = "SyncBatchNorm"
#: What wrappers (DDP, torch.compile, FSDP, checkpoint_wrapper) put into paths.
WRAPPERS = frozenset(("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))
#: In the header of a comparison, in the place of a call's fingerprint.
_TAG = tag_of("syncbn paths")
#: A rank's words of that message, at most.
_WORDS = 64
#: Layers of one path that are remembered, at most.
_MOST = 1000


class Identity(NamedTuple):
    """A state as a graph of torch.export or torch.fx holds it: constants that find the state in
    whichever process runs the graph. counted: whether it has a call number."""

    name: str
    sharing: Sharing = _WORLD
    counted: bool = True


def _numbers(*values: int) -> Tensor:
    """Makes integers on the CPU, which is real, whatever mode makes tensors fake, meta or of
    inference."""
    with without_modes(), torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.int64, device="cpu")


class LayerState:
    """The state of one layer. A copy, by deepcopy or pickle, begins at call 0 with the same path.

    name: the path, and what tells the layer apart from that which it is a deepcopy of: an averaged
    copy of a model has the model's paths.
    counters: int64 [2], whose entries are call and count. They lie where the layer was last called,
    and are None for a function, which has no calls of its own. call: which call of the layer is
    next; all ranks must be at the same one. count: elements per channel over all ranks in the last
    call; -1 where ranks disagreed on CUDA. handle: int64 [1] on the CPU, the id by which operators
    of compiled graphs find the state.
    number: what stands for the layer in the fingerprint, 32 bits; agreed on in each group where
    compares is true.
    """

    def __init__(
        self, name: str, sharing: Sharing = _WORLD, counted: bool = True, compares: bool = True
    ) -> None:
        self.name = name
        self.apart = ""  # with which the name ends
        self.origin: Callable[[], LayerState | None] = lambda: None  # what it is a deepcopy of
        #: whether the layer, which was given no name, was sought among the living modules; the name
        #: is then where it was found, if a module holds it
        self.sought = False
        self.sharing = sharing
        self._count_in(_numbers(0, 0) if counted else None)
        self.had_list = False  # of inputs, in the last call
        self.evaded = False  # by a training call of PyTorch's forward
        self.compares = compares
        self.number = zlib.crc32(name.encode())
        self.options: Options | None = None  # of the last call
        self._formed: tuple[Options, int, Form] | None = None
        self.numbers: dict[str, int] = {}  # by group
        self.group = ""  # to which number belongs
        self.made = next(_ids)
        self.handle = _numbers(self.made)
        _states[self.made] = self

    def __reduce__(self) -> tuple:
        return LayerState, tuple(self.identity)

    def __deepcopy__(self, memo: dict) -> "LayerState":
        copied = LayerState(*self.identity)
        copied.tell_apart(" (copy)")
        copied.origin = weakref.ref(self)
        return copied

    @property
    def path(self) -> str:
        return self.name.removesuffix(self.apart)

    def tell_apart(self, text: str) -> None:
        self.name, self.apart = self.path + text, text

    @property
    def identity(self) -> Identity:
        name = UNNAMED if self.sought else self.path
        return Identity(name, self.sharing, self.call is not None)

    def rename(self, path: str) -> None:
        """Gives a layer that was made directly its path in a model that is converted."""
        if path and self.identity.name == UNNAMED:
            self.name, self.sought = path + self.apart, False

    def peers(self, options: Options) -> Peers | None:
        """Finds whom a training call exchanges with, if anybody."""
        return groups.training_peers(self.sharing, self.find_path) if options.sync else None

    def find_path(self) -> str:
        """Gives the name. All layers that were made directly get the path where they lie first."""
        if self.path == UNNAMED and not self.sought:
            paths = paths_of_living()
            for other in list(_states.values()):
                if other.path == UNNAMED and not other.sought:
                    path = paths.get(other)
                    # Of clones in one model the path says enough.
                    alike = path == paths.get(other.origin())
                    other.sought, other.name = True, path or UNNAMED
                    other.tell_apart(other.apart if alike else "")
        return self.name

    def place_of(self, path: str) -> str:
        """Gives a path in a model without wrappers, which a rank may have alone."""
        return ".".join(p for p in path.split(".") if p not in WRAPPERS) or self.find_path()

    def move(self, device: torch.device) -> None:
        """Brings the counters to the device of a call."""
        if self.call is None or self.call.device == device:
            return
        self.refuse_capture(device.type == "cuda", f"call on {device}")
        with without_modes(), torch.inference_mode(False):
            self._count_in(self.counters.to(device))

    def _count_in(self, counters: Tensor | Any) -> None:
        self.counters = counters
        self.call: Tensor | Any = None
        self.count: Tensor | Any = None
        if counters is not None:
            with without_modes(), torch.inference_mode(False):
                self.call, self.count = counters.split(1)

    def form(self, options: Options) -> Form:
        """Gives the form of a step with these options, which are checked."""
        formed = self._formed
        if formed is None or formed[0] is not options or formed[1] != self.number:
            try:
                form = form_of(self.number, *options)
            except TypeError:  # what cannot be hashed is no option
                check_options(options)
                raise
            self._formed = formed = options, self.number, form
        return formed[2]

    def refuse_capture(self, on_cuda: bool, first: str) -> None:
        """Refuses what cannot be done while a CUDA graph is captured."""
        if on_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{self.name}: got its first {first} while a CUDA graph is captured, expected an "
                "eager training step before the capture"
            )

    def reached(self, peers: Peers | None) -> Peers | None:
        """Gives the peers as a rank reaches them that refuses its input: as long as they may be
        comparing paths, over the host."""
        if peers is None or not self.compares or peers.group_name in self.numbers:
            return peers
        self.find_path()  # for the error's text
        return peers._replace(cuda="")

    def call_of(self, x: object, options: Options, parts: Sequence[object] | None = None) -> Call:
        """Gives the next call with that input, as errors name it. parts: the residual, the weight
        and the bias; None: nobody compares whether they are there."""
        # A counter on a GPU is not read, that would wait for the device.
        known = self.call is not None and self.call.is_cpu
        number: Any = self.call.item() if known else None
        channels = dtype = given = None
        if is_strided(x):  # else it is refused
            channels, dtype = x.size(1) if x.dim() > 1 else None, x.dtype
        if parts is not None:
            given = sum((part is not None) << bit for bit, part in enumerate(parts))
        return Call(self.name, number, "forward", channels, dtype, options, given)


_ids = itertools.count(1)
_states: "weakref.WeakValueDictionary[int, LayerState]" = weakref.WeakValueDictionary()
_by_identity: dict[Identity, LayerState] = {}


def named(identity: Identity | LayerState) -> LayerState:
    """Gives the state of that identity in this process, made when it is first asked for."""
    if isinstance(identity, LayerState):
        return identity
    state = _by_identity.get(identity)
    if state is None:
        state = _by_identity.setdefault(identity, LayerState(*identity, compares=False))
    return state


def of_handle(handle: Tensor) -> LayerState:
    state = _states.get(int(handle.item()))
    if state is None:
        raise RuntimeError(
            "syncbn: the layer of a compiled graph is gone; expected the model to live as long as "
            "the function compiled from it"
        )
    return state


def paths_of_living() -> dict[LayerState | None, str]:
    """Gives the path of each layer in the largest model that holds it, so that it does not depend
    on what else, a feature extractor for example, holds parts of the model."""
    classes = _with_subclasses(nn.Module)
    objects = gc.get_objects()  # by type, and without asking the objects: some do things then
    chosen = map(classes.__contains__, map(id, map(type, objects)))
    modules = list(itertools.compress(objects, chosen))
    del objects
    inner = {id(child) for module in modules for _, child in _children(module)}
    found: dict[LayerState | None, tuple[int, str]] = {}
    for module in modules:
        if id(module) not in inner:
            size, paths = _layers(module)
            for state, path in paths.items():
                found[state] = max(found.get(state, (0, "")), (size, path))
    return {state: path for state, (_, path) in found.items()}


def _with_subclasses(cls: type) -> set[int]:
    """Gives the ids of the class and of all that are derived from it."""
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
    """Tells how many modules are in a model; and the first path of each layer, without wrappers."""
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
            left.append((child, path if name in WRAPPERS else inside))
    return len(seen), found


class _Group:
    """The calls compared in a group, as often on all its ranks. made: by path, the layers, as
    numbers in the order in which this rank made them."""

    def __init__(self) -> None:
        self.count = 0
        self.made: dict[str, list[int]] = {}


_compared: dict[str, _Group] = {}


def compare(state: LayerState, engine: Engine, x: torch.Tensor, options: Options) -> None:
    """Sets, before an exchange of a layer in another group than its last one, state.number, and in
    the first exchange state.call, to what the ranks agree on in a message.
    Raises DivergenceError on every rank if they call different layers."""
    group = engine.peers.group_name
    if state.compares:
        if group not in state.numbers:
            state.numbers = {g: n for g, n in state.numbers.items() if callers.exists(g)}
            state.numbers[group] = _agreed(state, engine, x, options)
        state.number = state.numbers[group]
    state.group = group


def _agreed(state: LayerState, engine: Engine, x: torch.Tensor, options: Options) -> int:
    peers = engine.peers
    state.find_path()
    state.refuse_capture(x.is_cuda, "exchange in a group")
    if peers.group_name not in _compared:
        for gone in [name for name in list(_compared) if not callers.exists(name)]:
            _compared.pop(gone, None)
        _compared[peers.group_name] = _Group()
    group, path = _compared[peers.group_name], _end_of(_path(state), peers)
    call = state.call_of(x, options)
    said = _exchanged(path, state, engine, call)
    longest = max(said, key=len)
    same, places = all(_ends(longest, one) for one in said), [0]
    made = group.made.get(longest, [])
    if same and longest and (made or len(set(said)) > 1):
        older = sum(number < state.made for number in made)
        other = path != longest and _has(longest, peers)
        places = agreement.numbers_of_ranks(-1 if other else older, _TAG, engine, call)
        same = -1 not in places
    if not same or len(set(places)) > 1:
        texts = [one or "a layer that no module holds" for one in said]
        if same:
            others = f"of {len(made)} others of that path"
            texts = [f"{text}, made after {place} {others}" for text, place in zip(texts, places)]
        lines = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))
        raise DivergenceError(
            f"{call}, {peers}: the ranks call different layers: {lines}", peers.group_name
        )
    group.count += 1
    if state.apart and places[0] > 1:  # after the model and a copy at least
        state.tell_apart(f" (copy {places[0]})")
    if longest:
        group.made[longest] = [*made, state.made][-_MOST:]
    return zlib.crc32(f"{longest} {group.count}".encode())


def _has(path: str, peers: Peers) -> bool:
    """Tells whether this rank has a layer of that very path which it has not compared in the group.
    Then a shorter path on this rank is that of another layer, and not of a model with less around
    it."""

    def found() -> bool:
        return any(
            state.compares
            and peers.group_name not in state.numbers
            and _end_of(_path(state), peers) == path
            for state in list(_states.values())
        )

    if not found():
        return False
    gc.collect()  # it may be what is left of another model
    return found()


def _size(peers: Peers) -> int:
    """Tells how many words of the message a rank has."""
    return min(_WORDS, (FRAME_WORDS - HEADER_WORDS) // peers.ranks)


def _end_of(path: str, peers: Peers) -> str:
    """Gives the end of the path that there is room for."""
    room = 8 * (_size(peers) - 1)
    while len(path.encode()) > room and "." in path:
        path = path.partition(".")[2]
    return path.encode()[-room:].decode(errors="ignore")


def _exchanged(path: str, state: LayerState, engine: Engine, call: Call) -> list[str]:
    """Gives every rank's path. All go on from the largest call number: a rank may be new, or have
    been alone."""
    peers = engine.peers
    size = _size(peers)
    letters = bytearray(path.encode().ljust(8 * (size - 1), b"\0"))
    words = torch.zeros(peers.ranks, size, dtype=torch.int64, device="cpu")
    words[peers.rank, 1:] = torch.frombuffer(letters, dtype=torch.int64)
    if state.call is not None:
        words[peers.rank, 0] = state.call.item()
    words = agreement.agree(words.flatten(), _TAG, engine, call).view(peers.ranks, size)
    if state.call is not None:
        state.call.fill_(words[:, 0].max().item())
    return [agreement.text_of(row) for row in words[:, 1:]]


def _ends(path: str, end: str) -> bool:
    """Tells whether the path ends with the other: one rank may have more around its model."""
    return not end or f".{path}".endswith(f".{end}")


def _path(state: LayerState) -> str:
    """Gives the path without wrappers; "" of a layer that no module holds."""
    path = state.path
    if path == UNNAMED:
        return ""
    return ".".join(part for part in path.split(".") if part not in WRAPPERS)
