# SPDX-License-Identifier: Apache-2.0
"""Methods that were taken of a layer, by a patch of its forward for example. A bound method keeps
the function of the class that the layer had then, so it is bound anew when the layer's class
changes."""

import functools
from collections.abc import Callable, Iterable, Sequence
from types import CellType, CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

from torch import nn

from ..nn import SyncBatchNorm

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
