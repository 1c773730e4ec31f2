# SPDX-License-Identifier: Apache-2.0
"""The streams of a backward node that has tensors on several devices.

The autograd engine makes one of forward's streams current, that of the node's first device. On the
others the current stream is another one, mostly the default stream, for which the engine orders
gradients alone. So what forward saved is waited for here. The caching allocator is told which
streams use memory that belongs to another one: it would give it away before they are done.
"""

from collections.abc import Iterable

import torch
from torch import Tensor


class Streams:
    """The current streams of the CUDA devices that the tensors lie on."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        devices = {t.device for t in tensors if t.is_cuda}
        self._of = {device: torch.cuda.current_stream(device) for device in devices}

    def enter(self, tensors: Iterable[Tensor | None]) -> None:
        """In backward, of the tensors that it reads."""
        now = {device: torch.cuda.current_stream(device) for device in self._of}
        for device, stream in self._of.items():
            if now[device] != stream:
                now[device].wait_stream(stream)
        _record(tensors, now)

    def leave(self, results: Iterable[Tensor | None]) -> None:
        """At the end of backward, of what it gives: the engine hands it to forward's streams."""
        _record(results, self._of)


def _record(tensors: Iterable[Tensor | None], streams: dict) -> None:
    for tensor in tensors:
        if tensor is not None and tensor.device in streams:
            tensor.record_stream(streams[tensor.device])
