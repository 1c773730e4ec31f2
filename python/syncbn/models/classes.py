# SPDX-License-Identifier: Apache-2.0
"""Turning a layer into another class in place, with the methods of it that others hold, finding
layers by class, and the registry of conversions, with those of timm's batch norms."""

import functools
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CellType, CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, NamedTuple, TypeVar, cast

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils import parametrize

from ..nn import SyncBatchNorm
from ..step.options import ACTIVATIONS, ActivationName

#: What is converted without being registered.
PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
LAZY = (nn.LazyBatchNorm1d, nn.LazyBatchNorm2d, nn.LazyBatchNorm3d)
_TIMM = "timm.layers.norm_act"
_FUSED: dict[object, ActivationName] = {
    a.module: name for name, a in ACTIVATIONS.items() if name != "none"
}

_Layer = TypeVar("_Layer", bound=nn.Module)


class Conversion(NamedTuple):
    """How layers of a registered class are converted, and back."""

    make: Callable[..., nn.Module]
    revert: Callable[[nn.Module], nn.Module] | None


registered: dict[type[nn.Module], Conversion] = {}


def register_conversion(
    cls: type[nn.Module],
    make: Callable[..., nn.Module],
    revert: Callable[[nn.Module], nn.Module] | None = None,
) -> None:
    """Tells convert_sync_batchnorm what to do with layers of another class.

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
    """Tells whether the module is a batch norm, by its class or by its buffers."""
    if isinstance(module, _BatchNorm):
        return True
    if isinstance(module, _InstanceNorm):
        return False
    return "running_mean" in module._buffers and "running_var" in module._buffers


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


# A bound method that a patch took of a layer, of its forward for example, keeps the function of the
# class that the layer had then, so it is bound anew when the layer's class changes.

#: What of a module leads to its model and its tensors instead of to a method.
_CONTENTS = ("_parameters", "_buffers", "_modules")
#: Nobody keeps a method deeper, or in a larger container.
_DEEPEST, _LARGEST = 150, 1000
#: Their functions mention all that a module can do.
_LIBRARIES = ("torch", "syncbn")


class _Walk:
    """Goes to the bound methods that a value holds, and puts what visit() gives in their place.
    With `names` it goes through those attributes alone that are in it, and adds what the code
    mentions that it comes by. visit() sees the classes that code mentions, too.

    It asks for types, because some objects act when they are asked for their class.
    """

    def __init__(self, visit: Callable[[Any], Any], names: set[str] | None = None) -> None:
        self._visit, self._names = visit, names
        self._done: dict[int, tuple[Any, Any]] = {}  # holds the values, so that ids stay theirs
        self._depth = 0

    def __call__(self, value: Any) -> Any:
        """Gives what takes the value's place: itself, unless it is a method, or holds one."""
        if id(value) not in self._done and self._depth < _DEEPEST:
            self._done[id(value)] = value, value
            self._depth += 1
            self._done[id(value)] = value, self._replaced(value)
            self._depth -= 1
        return self._done.get(id(value), (value, value))[1]

    def _replaced(self, value: Any) -> Any:
        kind = type(value)
        if kind is MethodType:
            bound = value.__func__, value.__self__
            new, changed = self._visit(value), self(bound)
            return new if new is not value or changed is bound else MethodType(*changed)
        if issubclass(kind, (type, ModuleType)):
            return value
        if issubclass(kind, (tuple, list, dict)) and len(value) > _LARGEST:
            return value
        if issubclass(kind, tuple):
            items = [self(item) for item in value]
            same = all(a is b for a, b in zip(items, value))
            return value if same else getattr(kind, "_make", kind)(items)
        if issubclass(kind, dict):
            self._in(dict.items(value), functools.partial(dict.__setitem__, value))
        elif issubclass(kind, list):
            self._in(enumerate(value), functools.partial(list.__setitem__, value))
        elif kind is CellType:
            try:
                contents = value.cell_contents
            except ValueError:  # nothing yet
                return value
            self._in([("cell_contents", contents)], functools.partial(setattr, value))
        elif kind is FunctionType:
            self._in_function(value)
        elif kind is functools.partial:
            called = value.func, value.args, value.keywords
            changed = self(called)
            if changed is not called:
                value.__setstate__((*changed, vars(value)))
        elif self._names is not None and not issubclass(kind, SyncBatchNorm):
            for cls in kind.__mro__:  # whose methods mention what they need of the object
                for name in self._names & vars(cls).keys():
                    if type(vars(cls)[name]) is FunctionType:
                        self(vars(cls)[name])
        self._in_attributes(value)
        return value

    def _in(self, items: Iterable[tuple[Any, Any]], put: Callable[[Any, Any], None]) -> None:
        for key, value in list(items):
            new = self(value)
            if new is not value:
                put(key, new)

    def _in_function(self, function: Any) -> None:
        mentioned = _mentioned(function.__code__)
        if self._names is not None:
            self._names |= mentioned
        self(function.__closure__)  # the cells stay, and their contents change
        defaults = self(function.__defaults__)
        if defaults is not function.__defaults__:
            function.__defaults__ = defaults
        self(function.__kwdefaults__)
        scopes = [function.__globals__]
        if str(scopes[0].get("__name__")).partition(".")[0] in _LIBRARIES:
            return
        for scope in scopes:  # and those of modules that are mentioned, as they are found
            for name in mentioned & scope.keys():
                value = scope[name]
                if issubclass(type(value), type):
                    self._visit(value)
                elif not issubclass(type(value), ModuleType):
                    self._in([(name, value)], scope.__setitem__)
                elif all(vars(value) is not other for other in scopes):
                    scopes.append(vars(value))

    def _in_attributes(self, owner: Any) -> None:
        kind = type(owner)
        try:
            own = object.__getattribute__(owner, "__dict__")
        except AttributeError:
            own = {}
        left_out = _CONTENTS if issubclass(kind, nn.Module) else ()

        def wanted(name: str, value: Any) -> bool:
            """Others lead to all that a program has."""
            if name in left_out or self._names is not None and name not in self._names:
                return False
            if issubclass(type(value), (tuple, list, dict)):
                return len(value) > 0
            return callable(value)

        self._in([item for item in own.items() if wanted(*item)], own.__setitem__)
        slots = [
            name
            for cls in kind.__mro__
            if "__slots__" in vars(cls)
            for name, member in vars(cls).items()
            if type(member) is MemberDescriptorType and hasattr(owner, name)
        ]
        held = [(name, getattr(owner, name)) for name in slots]
        self._in([item for item in held if wanted(*item)], functools.partial(setattr, owner))


def _mentioned(code: CodeType) -> set[str]:
    """Names and texts in a function's code, and in that of functions inside it."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if type(constant) is str:
            names.add(constant)
        elif type(constant) is CodeType:
            names |= _mentioned(constant)
    return names


def _bound_anew(method: Any, former: type[nn.Module]) -> Any:
    """Gives a bound method of a layer that was of another class, as its class has it now."""
    names = (getattr(method, "__name__", ""), *dir(former))
    name = next((n for n in names if getattr(former, n, None) is method.__func__), None)
    function = None if name is None else getattr(type(method.__self__), name, None)
    if function is method.__func__ or type(function) is not FunctionType:
        return method
    return MethodType(function, method.__self__)


def rebind(former: Sequence[tuple[nn.Module, type[nn.Module]]]) -> None:
    """Binds anew what modules, which were of these classes, hold of methods of each other."""
    classes = {id(module): cls for module, cls in former if type(module) is not cls}

    def visit(value: Any) -> Any:
        if type(value) is not MethodType or id(value.__self__) not in classes:
            return value
        return _bound_anew(value, classes[id(value.__self__)])

    if classes:
        walk = _Walk(visit)
        for module, _ in former:
            walk(module)


def _synchronizes(value: Any) -> bool:
    """Tells whether a bound method calls a synchronized layer, or a class is one of such layers."""
    if type(value) is not MethodType:
        return issubclass(value, SyncBatchNorm)
    cls = type(value.__self__)
    return issubclass(cls, SyncBatchNorm) and value.__func__ in (
        cls.forward,
        cls._call_impl,
        cls.__call__,
    )


def _comes_to_a_layer(patch: Any) -> bool:
    """Tells whether a call of it is seen to come to a synchronized layer."""
    found: list[Any] = []
    names, size = {"__call__"}, 0

    def visit(value: Any) -> Any:
        if _synchronizes(value):
            found.append(value)
        return value

    while not found and size != len(names):
        size = len(names)  # until nothing else is mentioned
        _Walk(visit, names)(patch)
    return bool(found)


def evades(layer: SyncBatchNorm) -> bool:
    """Tells whether what lies on the layer in the place of its forward is not seen to call it."""
    places = ("forward", "_call_impl", "_compiled_call_impl")
    own = [vars(layer)[name] for name in places if name in vars(layer)]
    return not all(_comes_to_a_layer(value) for value in own if value is not None)
