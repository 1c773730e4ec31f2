# SPDX-License-Identifier: Apache-2.0
"""What one exchange is about: with whom, of which call of a layer, and how errors name it."""

import re
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch


class Peers(NamedTuple):
    """The ranks that share a layer's statistics: a group of this package's own, by name."""

    group_name: str
    ranks: int
    rank: int  # this process's
    timeout: float
    #: shared memory of the ranks on this node, and the group of the nodes' first ranks, if there
    #: are several nodes and this rank is such a one
    shared: int | None = None
    nodes: int = 1
    leaders: str | None = None
    #: why there is no shared memory
    note: str = ""
    #: seconds that the first exchange of a layer waits: at least as long as the caller's group
    patience: float = 0.0
    #: the caller's group of these ranks, if it exchanges CUDA tensors over NCCL; else "", and
    #: messages on CUDA go through the host
    cuda: str = ""

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.ranks}"


class Call(NamedTuple):
    """A call of a layer, as error texts name it."""

    layer: str
    number: int | None = None
    direction: str = "forward"
    channels: int | None = None
    dtype: torch.dtype | None = None
    options: Any = None  # its shared() is named only where ranks are compared
    given: int | None = None  # bits: which of the parts there are; None: nobody compares them
    parts: tuple[str, str, str] = ("residual", "weight", "bias")

    def __str__(self) -> str:
        parts = [self.layer]
        if self.number is not None:
            parts.append(f"call {self.number}")
        parts.append(self.direction)
        if self.channels is not None:
            parts.append(f"{self.channels} channels")
        if self.dtype is not None:
            parts.append(str(self.dtype).removeprefix("torch."))
        return ", ".join(parts)

    def fields(self) -> dict[str, str]:
        """Lists what ranks must have in common, by name."""
        own: dict[str, object] = {
            "layer": self.layer,
            "call": self.number,
            "direction": self.direction,
            "channels": self.channels,
            "dtype": None if self.dtype is None else str(self.dtype).removeprefix("torch."),
        }
        own |= {} if self.options is None else self.options.shared()
        if self.given is not None:
            for bit, name in enumerate(self.parts):
                own[name] = "given" if self.given >> bit & 1 else "absent"
        return {name: str(value) for name, value in own.items() if value is not None}


class Said(NamedTuple):
    """The facts that ranks must say alike in an exchange of no layer, in place of options."""

    fields: Mapping[str, object]

    def shared(self) -> dict[str, object]:
        return dict(self.fields)


def tag_of(*what: object) -> int:
    """Gives 20 bits of what ranks must have in common for an exchange, by which it is told from
    others."""
    return zlib.crc32(repr(what).encode()) & 0xFFFFF


class Backward(NamedTuple):
    """Tells who takes part in the backward of a step: whether any rank wants the gradient of x, or
    the global gradients of weight and bias, so that backward exchanges; and the ranks that cannot
    come to it."""

    x: bool
    sums: bool
    absent: tuple[int, ...] = ()


#: An operator's error about an argument.
_INVALID = re.compile(r"\w+: got [^\n]*, expected ")
#: In PyTorch's error for a tensor on CPU, which has no type of its own.
_NO_MEMORY = re.compile(r"DefaultCPUAllocator: .* allocate (\d+) bytes")


class Busy(RuntimeError):
    """Says that another thread of this rank exchanges in the group."""


def lacks_memory(error: BaseException) -> bool:
    """Tells whether it is what PyTorch and the operators raise when an allocation fails."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)  # PyTorch 2.15 does not hand on the type of the operators' error
    known = text.startswith(("memory: got none", "std::bad_alloc"))
    return known or bool(_NO_MEMORY.search(text))


def reason_of(error: BaseException) -> str:
    """Gives its text; C++ and Python have none of their own for lack of memory, and PyTorch names
    its allocator."""
    text = str(error)
    if asked := _NO_MEMORY.search(text):
        return f"memory: got none for a tensor of {asked[1]} bytes"
    return "memory: got none" if text in ("", "std::bad_alloc") else text


def explained(error: BaseException, call: Call, peers: Peers | None) -> BaseException:
    """Gives the error with the names of the layer and of this rank where memory lacked, and as a
    ValueError where an operator refused an argument, which PyTorch makes a RuntimeError. Any other
    error stays as it is."""
    where = str(call) if peers is None else f"{call}, {peers}"
    if lacks_memory(error):
        return MemoryError(f"{where}: {reason_of(error)}")
    return ValueError(f"{where}: {error}") if _INVALID.match(str(error)) else error
