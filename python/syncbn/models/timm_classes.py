# SPDX-License-Identifier: Apache-2.0
"""timm's batch norms with an activation and a drop layer. timm is not imported here: what is not
loaded has made no layer of a model."""

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from ..nn import SyncBatchNorm
from ..step.options import ACTIVATIONS, ActivationName

_MODULE = "timm.layers.norm_act"
_FUSED: dict[object, ActivationName] = {
    a.module: name for name, a in ACTIVATIONS.items() if name != "none"
}


def fuses(layer: nn.Module) -> bool:
    """Whether a converted layer of timm is the layer of this package, with its activation."""
    return type(layer).__module__ == __name__ and "_original_activation" in vars(layer)


@functools.cache
def _class(theirs: type[nn.Module]) -> type[SyncBatchNorm]:
    """What converted layers become: timm's synchronized class too, whose forward calls this
    package's and then drop and act, and which timm freezes together with them."""

    def forward(self: nn.Module, x: Any) -> Any:
        return (SyncBatchNorm if fuses(self) else theirs).forward(self, x)

    body = {"forward": forward, "__module__": __name__}
    return type("SyncBatchNormAct", (theirs, SyncBatchNorm), body)


def __getattr__(name: str) -> type[SyncBatchNorm]:
    """For pickle, which asks for the class by its name."""
    if name != "SyncBatchNormAct":
        raise AttributeError(name)
    return _class(importlib.import_module(_MODULE).SyncBatchNormAct)


def _convert(layer: nn.Module, sync: Callable[..., nn.Module]) -> nn.Module:
    cls = __getattr__("SyncBatchNormAct")
    act, drop = getattr(layer, "act", None), getattr(layer, "drop", None)
    fused = _FUSED.get(type(act))
    if fused is None or type(drop) is not nn.Identity:
        return sync(layer, cls)
    slope = getattr(act, "negative_slope", 0.01)
    return sync(layer, cls, activation=fused, negative_slope=slope)


def conversions() -> dict[type[nn.Module], Callable]:
    """What to do with each of timm's classes, if timm is loaded."""
    loaded = sys.modules.get(_MODULE)
    if loaded is None:
        return {}
    return {
        loaded.BatchNormAct2d: _convert,
        loaded.SyncBatchNormAct: _convert,
        loaded.FrozenBatchNormAct2d: lambda layer, sync: layer,  # constants
    }
