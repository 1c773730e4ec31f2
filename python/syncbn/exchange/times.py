# SPDX-License-Identifier: Apache-2.0
"""How long this rank takes for the exchanges of a layer, noted while syncbn.timing is at work."""

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Literal


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
