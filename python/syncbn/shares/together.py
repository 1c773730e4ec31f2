# SPDX-License-Identifier: Apache-2.0
"""What the shares of a process have together: objects that the loss, hooks and attributes reach
and no namespace has copies of. A share that changes them changes what the next one computes."""

import functools
import random
import sys
import types
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..namespaces import CONTAINERS, SHARED

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CHILDREN = (dict, list, tuple, set, frozenset)
#: Packages whose objects keep books of their own, in which no result is.
_SKIPPED = ("torch", "syncbn", "logging", "lightning", "pytorch_lightning", "accelerate", "tqdm")
#: Objects that are looked at, and items of a container, at most.
_OBJECTS, _ITEMS = 100_000, 1_000


def _is_skipped(kind: type) -> bool:
    package = kind.__module__.partition(".")[0]
    return package in _SKIPPED and not kind.__module__.startswith("torch.utils.data")


def drawn_from(value: Any) -> Any:
    """Gives the state of a generator of random numbers; None of anything else."""
    numpy = sys.modules.get("numpy")
    if isinstance(value, torch.Generator):
        return bytes(value.get_state().tolist())
    if isinstance(value, random.Random):
        return value.getstate()
    if numpy is None:
        return None
    if isinstance(value, numpy.random.Generator):
        return text_of(value.bit_generator.state)
    if isinstance(value, numpy.random.RandomState):
        return text_of(value.get_state(legacy=False))
    return None


def text_of(state: dict[str, Any]) -> str:
    """Writes the state of one of NumPy's bit generators."""
    asarray = sys.modules["numpy"].asarray
    inner = {n: asarray(part).tolist() for n, part in state["state"].items()}
    return str({**state, "state": inner})


class _At(NamedTuple):
    """An object and how the program comes to it. own: of a share alone, like what it contains."""

    name: str
    value: Any
    own: bool


class Together:
    """Marks of all that a module and others reach, by name. own: also of what namespaces have
    copies of. draws: the states of generators of random numbers among the marks."""

    def __init__(self, module: nn.Module, others: dict[str, Any], own: bool = False) -> None:
        self.marks: dict[str, Any] = {}
        self.draws: dict[str, Any] = {}
        self._kept: list[Any] = []  # or another would get its id
        self._seen: set[int] = set()
        functions = map(_inner, others.values())
        self._globals = [f.__globals__ for f in functions if hasattr(f, "__globals__")]
        self._tree = {id(m) for m in module.modules()}
        self._waiting = [_At(name, value, False) for name, value in others.items()]
        for path, m in module.named_modules():
            named = ((n, v, not own) for n, v in vars(m).items() if n not in SHARED)
            of_class = ((n, v, False) for n, v in self._of_class(type(m)))
            for name, value, alone in (*named, *of_class):
                self._waiting.append(_At(f"{path}.{name}".lstrip("."), value, alone))
        while self._waiting and len(self._seen) < _OBJECTS:
            self._look(self._waiting.pop())

    def check(self, after: "Together", what: str) -> None:
        """Refuses a difference. what: made it."""
        for name in {**self.marks, **after.marks}:
            if name not in self.marks or self.marks[name] != after.marks.get(name):
                raise ValueError(
                    f"loss: got a {what} that changes {name}, which the shares of a process have "
                    "together, expected changes in a forward, of the model's tensors, lists, "
                    "dictionaries and sets alone; loss returns numbers to be noted"
                )

    def _of_class(self, module: type[nn.Module]) -> Iterator[tuple[str, Any]]:
        yield "forward", module.forward
        for kind in module.__mro__[:-1]:
            for name, value in vars(kind).items() if not _is_skipped(kind) else ():
                if isinstance(value, (*_PLAIN, *_CHILDREN, Tensor)) and name[:2] != "__":
                    yield name, value

    def _look(self, at: _At) -> None:
        name, value, own = at
        kind = type(value)
        if isinstance(value, _PLAIN):
            if not own:
                self.marks[name] = repr(value)
            return
        if id(value) in self._seen or id(value) in self._tree:
            return
        self._seen.add(id(value))
        self._kept.append(value)
        if isinstance(value, Tensor):
            if not own:
                self.marks[name] = id(value), value._version
        elif (state := drawn_from(value)) is not None:
            self.marks[name] = self.draws[name] = state
        elif isinstance(value, _CHILDREN) or hasattr(kind, "popleft"):
            own = own and kind in CONTAINERS
            if not own:
                self.marks[name] = len(value)
            self._push(name, value, own)
        else:
            self._look_at_object(name, value)

    def _push(self, name: str, container: Any, own: bool) -> None:
        if len(container) <= _ITEMS:
            items = container.items() if isinstance(container, dict) else enumerate(container)
            self._waiting += [_At(f"{name}[{n!r:.40}]", v, own) for n, v in list(items)]

    def _look_at_object(self, name: str, value: Any) -> None:
        parts: dict[str, Any] = {}
        numpy = sys.modules.get("numpy")
        if isinstance(value, types.FunctionType):
            parts = dict(self._of_function(value))
        elif isinstance(value, types.MethodType):
            parts = {name: value.__func__, f"{name}.__self__": value.__self__}
        elif isinstance(value, functools.partial):
            parts = {name: value.func, f"{name}.args": (value.args, value.keywords)}
        elif numpy is not None and isinstance(value, numpy.ndarray):
            self.marks[name] = zlib.crc32(value.tobytes())
        elif isinstance(value, types.GeneratorType):
            frame = value.gi_frame
            self.marks[name] = frame and frame.f_lasti
            parts = {} if frame is None else frame.f_locals
        elif hasattr(value, "__length_hint__"):  # an iterator, which says how much is left
            self.marks[name] = value.__length_hint__()
        elif isinstance(value, nn.Module) or not (
            isinstance(value, (types.ModuleType, type)) or _is_skipped(type(value))
        ):
            slots = [s for k in type(value).__mro__ for s in getattr(k, "__slots__", ())]
            own = [*getattr(value, "__dict__", {}), *(s for s in slots if hasattr(value, s))]
            parts = {f"{name}.{n}": getattr(value, n, None) for n in map(str, own)}
        self._waiting += [_At(n, v, False) for n, v in parts.items()]

    def _of_function(self, function: Callable) -> Iterator[tuple[str, Any]]:
        code = function.__code__
        for name, cell in zip(code.co_freevars, function.__closure__ or ()):
            try:
                yield name, cell.cell_contents
            except ValueError:  # is empty yet
                continue
        yield f"{function.__name__}.__defaults__", (function.__defaults__, function.__kwdefaults__)
        if any(function.__globals__ is known for known in self._globals):
            for name in _names_in(code):
                if name in function.__globals__:
                    yield name, function.__globals__[name]


def _inner(function: Any) -> Any:
    while isinstance(function, (functools.partial, types.MethodType)):
        is_partial = isinstance(function, functools.partial)
        function = getattr(function, "func" if is_partial else "__func__")
    return function


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)
