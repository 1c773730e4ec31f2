# SPDX-License-Identifier: Apache-2.0
"""What one exchange is about: with whom, of which call of a layer, and how long it takes."""

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

import torch


class Times:
    """Seconds of one layer on this rank. waits: those of the last exchanges, each."""

    #: Exchanges whose waits are kept.
    MOST = 512

    def __init__(self) -> None:
        self.exchanges = 0
        self.summed = self.waited = self.normalized = 0.0
        self.waits: deque[float] = deque(maxlen=self.MOST)

    def add(self, summed: float, waited: float, normalized: float) -> None:
        """An exchange, and what the operator computed that it was a part of."""
        self.exchanges += 1
        self.summed += summed
        self.waited += waited
        self.normalized += normalized
        self.waits.append(waited)


def timed(
    function: Callable[..., Any], times: Times | None, what: Literal["summed", "normalized"]
) -> Callable[..., Any]:
    """The function, a pass over the tensor that it is given first, which notes how long it takes.
    On CUDA it would note how long it takes to launch kernels."""
    if times is None:
        return function

    def run(x, *arguments):
        begin = time.monotonic()
        result = function(x, *arguments)
        setattr(times, what, getattr(times, what) + time.monotonic() - begin)
        return result

    return run


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

    def over_host(self) -> "Peers":
        """The same ranks, whose messages on CUDA go through the host."""
        return self._replace(cuda="")

    def within(self, seconds: float) -> "Peers":
        """The same ranks, which wait for each other so long at most."""
        return self._replace(timeout=min(self.timeout, seconds))


class Shared(Protocol):
    """Options of a layer, of which ranks must have some in common."""

    @property
    def eps(self) -> float: ...

    @property
    def statistics(self) -> str: ...

    def shared(self) -> dict[str, object]: ...


class Call(NamedTuple):
    """One call of a layer, as error texts name it."""

    layer: str
    number: int | None = None
    direction: str = "forward"
    channels: int | None = None
    dtype: torch.dtype | None = None
    options: Shared | None = None  # named only where ranks are compared
    times: Times | None = None  # where to note how long it takes, if anywhere

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
        """What ranks must have in common, by name."""
        own: dict[str, object] = {
            "layer": self.layer,
            "call": self.number,
            "direction": self.direction,
            "channels": self.channels,
            "dtype": None if self.dtype is None else str(self.dtype).removeprefix("torch."),
        }
        own |= {} if self.options is None else self.options.shared()
        return {name: str(value) for name, value in own.items() if value is not None}
