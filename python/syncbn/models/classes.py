# SPDX-License-Identifier: Apache-2.0
"""Turning a layer into another class in place, with the methods of it that lie on modules, finding
layers by class, and the registry of conversions, with those of timm's batch norms."""

import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, MethodType
from typing import Any, NamedTuple, TypeVar, cast

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils import parametrize

from ..nn import SyncBatchNorm
from ..step.options import ACTIVATIONS, ActivationName
from .frozen import is_frozen

#: What is converted without being registered.
PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
LAZY = (nn.LazyBatchNorm1d, nn.LazyBatchNorm2d, nn.LazyBatchNorm3d)
_TIMM = "timm.layers.norm_act"
_FUSED: dict[object, ActivationName] = {
    a.module: name for name, a in ACTIVATIONS.items() if name != "none"
}

_Layer = TypeVar("_Layer", bound=nn.Module)


class Conversion(NamedTuple):
    """The two ways of layers of a registered class: converted, and back."""

    make: Callable[..., nn.Module]
    revert: Callable[[nn.Module], nn.Module] | None


registered: dict[type[nn.Module], Conversion] = {}


def register_conversion(
    cls: type[nn.Module],
    make: Callable[..., nn.Module],
    revert: Callable[[nn.Module], nn.Module] | None = None,
) -> None:
    """Tells convert_sync_batchnorm what to do with layers of another class. The function has no
    promise of compatibility between versions.

    Args:
        cls: the class. Its subclasses are not included. A second call replaces the first.
        make: called as make(layer, sync); returns what takes the layer's place. To leave the layer
            as it is, without a warning, return it. sync(layer, cls=SyncBatchNorm, **options) turns
            a layer derived from PyTorch's batch norm classes into SyncBatchNorm, or a subclass of
            it, in place, and returns it. Options are activation, negative_slope and others of
            SyncBatchNorm. A subclass's __init__ is not called.
        revert: revert_sync_batchnorm calls it with what make returned; returns a layer of `cls`.
            A layer that went through sync does not need it: it gets its class back.

    Raises:
        ValueError: an argument is not of its type, or cls is a SyncBatchNorm of this package.
    """
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise ValueError(f"cls: got {cls!r}, expected a subclass of torch.nn.Module")
    if issubclass(cls, SyncBatchNorm):
        raise ValueError(
            f"cls: got {cls.__name__}, expected a class that is not a syncbn.SyncBatchNorm"
        )
    if not callable(make):
        raise ValueError(f"make: got {make!r}, expected a function of a layer and of sync")
    if revert is not None and not callable(revert):
        raise ValueError(f"revert: got {revert!r}, expected a function of a layer, or None")
    registered[cls] = Conversion(make, revert)


def conversion_of(cls: type[nn.Module]) -> Conversion | None:
    """Gives what is registered for the class, or known of a library."""
    if cls in registered:
        return registered[cls]
    make = _timms().get(cls)
    return None if make is None else Conversion(make, None)


def class_of(module: nn.Module) -> type[nn.Module]:
    """Gives the module's class, without what torch.nn.utils.parametrize derives from it."""
    return parametrize.type_before_parametrizations(module)


def class_name(module: nn.Module) -> str:
    cls = class_of(module)
    return f"{cls.__module__}.{cls.__qualname__}"


def set_class(layer: nn.Module, cls: type[_Layer]) -> _Layer:
    """Turns the layer into another class: it stays the same object, with its parameters, buffers,
    hooks and flags, for all that refer to it. Returns it."""
    layer.__class__ = cls
    parametrized = layer._modules.get("parametrizations")
    if isinstance(parametrized, nn.ModuleDict):  # they live in a class of the layer's own
        parametrize._inject_new_class(layer)
        for name in parametrized:
            parametrize._inject_property(layer, name)
    return cast(_Layer, layer)


def holds_statistics(module: nn.Module) -> bool:
    """Tells whether the module is a batch norm, by its class or by its buffers, and not frozen."""
    if isinstance(module, _BatchNorm):
        return True
    if isinstance(module, _InstanceNorm):
        return False
    own = "running_mean" in module._buffers and "running_var" in module._buffers
    return own and not is_frozen(module)


def left_alone(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Lists layers with batch statistics that are neither converted nor told to be left."""
    for path, layer in module.named_modules():
        cls = class_of(layer)
        known = isinstance(layer, SyncBatchNorm) or cls in PLAIN + LAZY or conversion_of(cls)
        if not known and holds_statistics(layer):
            yield path, layer


def wrapper(module: nn.Module) -> str | None:
    """Gives what has been done to the module that must come after conversion, if anything.

    What is not imported cannot have wrapped anything.
    """
    for text, package, cls in (
        ("wrapped by DistributedDataParallel", "torch.nn.parallel", "DistributedDataParallel"),
        ("wrapped by replicate", "torch.distributed._composable.replicate", "DDP"),
        ("sharded by FSDP", "torch.distributed.fsdp", "FullyShardedDataParallel"),
        ("sharded by FSDP", "torch.distributed.fsdp", "FSDPModule"),
        ("compiled by torch.compile", "torch._dynamo.eval_frame", "OptimizedModule"),
    ):
        found = getattr(sys.modules.get(package), cls, None)
        if found is not None and isinstance(module, found):
            return text
    # Of Module.compile(), which changes the module in place.
    return None if module._compiled_call_impl is None else "compiled by torch.compile"


@functools.cache
def _timms_class(theirs: type[nn.Module]) -> type[SyncBatchNorm]:
    """Gives what converted layers become: timm's synchronized class too, whose forward calls this
    package's and then drop and act, and which timm freezes together with them."""

    def forward(self: nn.Module, x: Any) -> Any:
        # With its activation the layer is this package's, and nothing of timm's follows.
        fuses = type(self).__module__ == __name__ and "_original_activation" in vars(self)
        return (SyncBatchNorm if fuses else theirs).forward(self, x)

    body = {"forward": forward, "__module__": __name__}
    return type("SyncBatchNormAct", (theirs, SyncBatchNorm), body)


def __getattr__(name: str) -> type[SyncBatchNorm]:
    """Gives pickle the class of timm's converted layers, which it asks for by name."""
    if name != "SyncBatchNormAct":
        raise AttributeError(name)
    return _timms_class(importlib.import_module(_TIMM).SyncBatchNormAct)


def _convert_timms(layer: nn.Module, sync: Callable[..., nn.Module]) -> nn.Module:
    cls = __getattr__("SyncBatchNormAct")
    act, drop = getattr(layer, "act", None), getattr(layer, "drop", None)
    fused = _FUSED.get(type(act))
    if fused is None or type(drop) is not nn.Identity:
        return sync(layer, cls)
    slope = getattr(act, "negative_slope", 0.01)
    return sync(layer, cls, activation=fused, negative_slope=slope)


def _timms() -> dict[type[nn.Module], Callable]:
    """Tells how to convert timm's classes. What is not loaded has made no layer of a model."""
    loaded = sys.modules.get(_TIMM)
    if loaded is None:
        return {}
    return {
        loaded.BatchNormAct2d: _convert_timms,
        loaded.SyncBatchNormAct: _convert_timms,
        loaded.FrozenBatchNormAct2d: lambda layer, sync: layer,  # constants
    }


def rebind(former: Sequence[tuple[nn.Module, type[nn.Module]]]) -> None:
    """Binds anew the bound methods that lie on modules, which were of these classes, of each other:
    such a method keeps the function of the class that its module had then."""
    classes = {id(module): cls for module, cls in former if type(module) is not cls}
    for module, _ in former:
        for name, method in list(vars(module).items()):
            if type(method) is not MethodType or id(method.__self__) not in classes:
                continue
            own, theirs = method.__self__, method.__func__
            known = getattr(theirs, "__name__", "")
            if getattr(classes[id(own)], known, None) is theirs and hasattr(own, known):
                vars(module)[name] = MethodType(getattr(type(own), known), own)


def _mentioned(code: CodeType) -> set[str]:
    """Names and texts in a function's code, and in that of functions inside it."""
    inside = [_mentioned(part) for part in code.co_consts if type(part) is CodeType]
    return set(code.co_names).union(*inside, (p for p in code.co_consts if type(p) is str))


def evades(layer: SyncBatchNorm) -> bool:
    """Tells whether what lies on the layer in the place of its forward is not seen to call it. What
    does is a bound method of the layer, or names an attribute of the layer that is one."""
    own = {}
    for name, value in vars(layer).items():
        while isinstance(value, functools.partial):
            value = value.func
        own[name] = getattr(value, "_torchdynamo_orig_callable", value)  # of torch.compile
    methods = {type(layer).forward, type(layer)._call_impl, type(layer).__call__}
    calls = {
        name
        for name, value in own.items()
        if type(value) is MethodType and value.__self__ is layer and value.__func__ in methods
    }
    for place in ("forward", "_call_impl", "_compiled_call_impl"):
        value = own.get(place)
        code = getattr(getattr(value, "__func__", value), "__code__", None)
        seen = place in calls or isinstance(code, CodeType) and calls & _mentioned(code)
        if value is not None and not seen:
            return True
    return False
