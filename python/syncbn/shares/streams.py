# SPDX-License-Identifier: Apache-2.0
"""Random numbers that a share or a sample has for itself."""

import contextlib
import hashlib
import random
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from .together import drawn_from, text_of


def number_of(*parts: object) -> int:
    """A seed of 64 bits that stands for these parts."""
    text = " ".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little")


#: NumPy's bit generators that no stream has now; to make one takes NumPy longer than to seed it.
_spare: list[Any] = []


class Streams:
    """The random numbers of shares. The default generators of PyTorch, on the CPU and on a device,
    of Python and of NumPy have the state of the share that runs, and the program's own state again
    afterwards. Of NumPy each share has a bit generator, because to copy a state takes NumPy longer
    than a small layer."""

    def __init__(self, seeds: Iterable[int], device: torch.device) -> None:
        self._defaults = [torch.default_generator]
        if device.type == "cuda":
            self._defaults.append(torch.cuda.default_generators[device.index])
        self._states: list[Any] = list(seeds)
        self._own, self._at = self._now(), -1

    def _now(self) -> tuple:
        numpy = sys.modules.get("numpy")
        of_numpy = numpy.random.get_bit_generator() if numpy else None
        return [g.get_state() for g in self._defaults], random.getstate(), of_numpy

    def _set(self, state: Any) -> None:
        numpy = sys.modules.get("numpy")
        if isinstance(state, int):  # a seed
            for generator in self._defaults:
                generator.manual_seed(state)
            random.seed(state)
            if numpy:
                own = _spare.pop() if _spare else numpy.random.MT19937(0)
                numpy.random.set_bit_generator(own)
                numpy.random.seed(state % 2**32)
            return
        for generator, own in zip(self._defaults, state[0]):
            generator.set_state(own)
        random.setstate(state[1])
        if numpy and state[2]:
            numpy.random.set_bit_generator(state[2])

    def enter(self, k: int) -> None:
        """Says that share k draws next."""
        if k != self._at:
            self._keep()
            self._at = k
            self._set(self._states[k])

    def _keep(self) -> None:
        if self._at >= 0:
            self._states[self._at] = self._now()

    def leave(self) -> None:
        """The program draws next, as if nothing had been drawn."""
        self._keep()
        self._at = -1
        self._set(self._own)
        _spare.extend(state[2] for state in self._states if isinstance(state, tuple) and state[2])
        self._states = []

    def position(self) -> tuple:
        """Tells where the default generators are: another place once one of them has been drawn
        from."""
        numpy = sys.modules.get("numpy")
        of_numpy = text_of(numpy.random.get_state(legacy=False)) if numpy else None
        return *map(drawn_from, self._defaults), random.getstate(), of_numpy


@contextlib.contextmanager
def seeded(*parts: object) -> Iterator[None]:
    """Gives random numbers on the CPU that these parts decide, in a with block."""
    streams = Streams([number_of(*parts)], torch.device("cpu"))
    streams.enter(0)
    try:
        yield
    finally:
        streams.leave()
