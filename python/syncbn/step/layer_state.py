# SPDX-License-Identifier: Apache-2.0
"""What a layer has besides the tensors of a batch norm: its name, its group, and its call number.

None of it is a buffer: code that copies, moves, broadcasts or materializes the buffers of a model
meets exactly those of PyTorch's layer. None of it is a constant of a compiled graph either: the
graph holds a tensor with the state's id, so that equal layers share one graph.
"""

import itertools
import weakref
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..exchange import groups
from ..exchange.call import Call, Peers, Times
from ..exchange.callers import Sharing
from .living_modules import paths_of_living
from .options import Options, is_strided

_WORLD = Sharing()
#: The name of a layer that was made directly.
UNNAMED = "SyncBatchNorm"


class Identity(NamedTuple):
    """A state as a graph of torch.export or torch.fx holds it: constants that find the state in
    whichever process runs the graph. counted: whether it has a call number."""

    name: str
    sharing: Sharing = _WORLD
    counted: bool = True


def _number(value: int) -> Tensor:
    """int64 [1] on the CPU: real, whatever mode makes tensors fake, meta or of inference."""
    with _disable_current_modes(), torch.inference_mode(False):
        return torch.tensor([value], dtype=torch.int64, device="cpu")


class LayerState:
    """The state of one layer. A copy, by deepcopy or pickle, begins at call 0 with the same path.

    name: the path, and what tells the layer apart from that which it is a deepcopy of: an averaged
    copy of a model has the model's paths.
    call: int64 [1], which call of the layer is next; all ranks must be at the same one. count:
    int64 [1], elements per channel over all ranks in the last call; -1 where ranks disagreed on
    CUDA. Both lie where the layer was last called; None for a function, which has no calls of its
    own. handle: int64 [1] on the CPU, the id by which operators of compiled graphs find the state.
    number: what stands for the layer in the fingerprint, 32 bits; agreed on in each group
    (step/layer_paths.py) where compares is true.
    """

    def __init__(
        self, name: str, sharing: Sharing = _WORLD, counted: bool = True, compares: bool = True
    ) -> None:
        self.name = name
        self.apart = ""  # with which the name ends
        self.origin: Callable[[], LayerState | None] = _nothing  # what it is a deepcopy of
        #: whether the layer, which was given no name, was sought among the living modules; the name
        #: is then where it was found, if a module holds it
        self.sought = False
        self.sharing = sharing
        self.call: Tensor | Any = _number(0) if counted else None
        self.count: Tensor | Any = _number(0) if counted else None
        self.had_list = False  # of inputs, in the last call
        self.evaded = False  # by a training call of PyTorch's forward
        self.compares = compares
        self.number = zlib.crc32(name.encode())
        self.numbers: dict[str, int] = {}  # by group
        self.group = ""  # to which number belongs
        self.times: Times | None = None  # while syncbn.timing notes them
        self.made = next(_ids)
        self.handle = _number(self.made)
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
        """Whom a training call exchanges with, if anybody."""
        return groups.training_peers(self.sharing, self.find_path) if options.sync else None

    def find_path(self) -> str:
        """The name. A layer that was made directly, and all others of them, get the path where they
        lie first."""
        if self.path == UNNAMED and not self.sought:
            paths = paths_of_living(LayerState)
            for other in living():
                if other.path == UNNAMED and not other.sought:
                    path = paths.get(other)
                    # Of clones in one model the path says enough.
                    alike = path == paths.get(other.origin())
                    other.sought, other.name = True, path or UNNAMED
                    other.tell_apart(other.apart if alike else "")
        return self.name

    def move(self, device: torch.device) -> None:
        """Brings the counters to the device of a call."""
        if self.call is None or self.call.device == device:
            return
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{self.name}: got its first call on {device} while a CUDA graph is captured, "
                "expected an eager training step before the capture"
            )
        with _disable_current_modes(), torch.inference_mode(False):
            self.call, self.count = self.call.to(device), self.count.to(device)

    def call_of(self, x: object, options: Options) -> Call:
        """The next call with that input, as errors name it."""
        # A counter on a GPU is not read, that would wait for the device.
        counter = self.call
        known = counter is not None and counter.is_cpu
        number: Any = counter.item() if known else None
        channels = dtype = None
        if is_strided(x):  # else it is refused
            channels, dtype = x.size(1) if x.dim() > 1 else None, x.dtype
        return Call(self.name, number, "forward", channels, dtype, options, self.times)


def _nothing() -> None:
    return None


_ids = itertools.count(1)
_states: "weakref.WeakValueDictionary[int, LayerState]" = weakref.WeakValueDictionary()
_by_identity: dict[Identity, LayerState] = {}


def living() -> list[LayerState]:
    """All states of this process."""
    return list(_states.values())


def named(identity: Identity) -> LayerState:
    """The state of that identity in this process, made when it is first asked for."""
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
