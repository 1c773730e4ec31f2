# SPDX-License-Identifier: Apache-2.0
"""What a rank is doing in an exchange, as it tells the other ranks."""

from typing import NamedTuple, Protocol

import torch

from .times import Times


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
