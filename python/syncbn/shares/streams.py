# SPDX-License-Identifier: Apache-2.0
"""Random numbers that a share or a sample has for itself."""

import contextlib
import hashlib
import random
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch


def number_of(*parts: object) -> int:
    """A seed of 64 bits that stands for these parts."""
    text = " ".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little")


class Streams:
    """The random numbers of shares. The default generators of PyTorch, on the CPU and on a device,
    of Python and of NumPy have the state of the share that runs, and the program's own state again
    afterwards."""

    def __init__(self, seeds: Iterable[int], device: torch.device) -> None:
        self._defaults = [torch.default_generator]
        if device.type == "cuda":
            self._defaults.append(torch.cuda.default_generators[device.index])
        self._states: list[Any] = list(seeds)
        self._own, self._at = self.state(), -1

    def state(self) -> tuple:
        numpy = sys.modules.get("numpy")
        drawn = numpy.random.get_state(legacy=False) if numpy else None
        return [g.get_state() for g in self._defaults], random.getstate(), drawn

    def _set(self, state: Any) -> None:
        numpy = sys.modules.get("numpy")
        if isinstance(state, int):  # a seed
            for generator in self._defaults:
                generator.manual_seed(state)
            random.seed(state)
            if numpy:
                numpy.random.seed(state % 2**32)
            return
        for generator, own in zip(self._defaults, state[0]):
            generator.set_state(own)
        random.setstate(state[1])
        if numpy and state[2]:
            numpy.random.set_state(state[2])

    def enter(self, k: int) -> None:
        """Says that share k draws next."""
        if k != self._at:
            if self._at >= 0:
                self._states[self._at] = self.state()
            self._at = k
            self._set(self._states[k])

    def leave(self) -> None:
        """The program draws next, as if nothing had been drawn."""
        self._at = -1
        self._set(self._own)

    def drawn(self) -> bool:
        """Tells whether the program drew since the streams were made."""
        (before, *others), (now, *later) = self._own, self.state()
        if not all(map(torch.equal, before, now)) or others[0] != later[0]:
            return True
        a, b = (each[1] and each[1]["state"] for each in (others, later))
        return bool(a and b) and (a["pos"] != b["pos"] or bytes(a["key"]) != bytes(b["key"]))


@contextlib.contextmanager
def seeded(*parts: object) -> Iterator[None]:
    """Gives random numbers on the CPU that these parts decide, in a with block."""
    streams = Streams([number_of(*parts)], torch.device("cpu"))
    streams.enter(0)
    try:
        yield
    finally:
        streams.leave()
