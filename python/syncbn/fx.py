# SPDX-License-Identifier: Apache-2.0
"""How torch.fx sees the layer: as one call, whichever tracer is used."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch import Tensor, fx, nn

_Forward = TypeVar("_Forward", bound=Callable[..., Any])


def leaf(forward: _Forward) -> _Forward:
    """A module's forward that a symbolic tracer records as a call of the module.

    Tracers take modules of torch.nn alone for leaves. Within this layer they would meet an
    exchange, and bake its mode (training or evaluation) into the graph.
    """

    @functools.wraps(forward)
    def wrapper(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and type(args[0]) is Tensor and not kwargs:  # mostly, and quickly
            return forward(self, *args)
        for value in (*args, *kwargs.values()):
            # An argument may be a list of tensors, one per device.
            for part in value if isinstance(value, (list, tuple)) else (value,):
                tracer = part.tracer if isinstance(part, fx.Proxy) else None
                # A layer that is itself the traced model has no name to be called by.
                if isinstance(tracer, fx.Tracer) and self is not tracer.root:
                    path = tracer.path_of_module(self)
                    return tracer.create_proxy("call_module", path, args, kwargs)
        return forward(self, *args, **kwargs)

    return cast(_Forward, wrapper)
