# SPDX-License-Identifier: Apache-2.0
"""Layers whose running statistics are constants, as those of a detector's backbone: they need no
other ranks."""

from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn

#: What a layer mentions that learns statistics: it has the batch's, or writes to its own.
_LEARNS = frozenset(
    ("training", "momentum", "instance_norm", "mean", "var", "std", "var_mean", "std_mean", "lerp")
)


def is_frozen(module: nn.Module) -> bool:
    """Tells whether it is seen that the module trains neither parameters nor statistics: its class
    is none of PyTorch's or derived from one, and its forward, with the functions that this comes
    to, takes no statistics of a batch and changes no tensor in place."""
    cls = type(module)
    theirs = (base for base in cls.__mro__ if base not in (nn.Module, object))
    if any(p is not None and p.requires_grad for p in module._parameters.values()) or any(
        map(_is_torchs, theirs)
    ):
        return False
    forward = getattr(cls, "forward", None)
    return type(forward) is FunctionType and all(map(_is_constant, _functions(cls, forward)))


def _is_torchs(value: Any) -> bool:
    return getattr(value, "__module__", "").partition(".")[0] == "torch"


def _functions(cls: type, first: FunctionType) -> Iterator[Any]:
    """Lists the functions to which a call of the first is seen to come, and other values of the
    caller's that it may come to."""
    found: list[Any] = [first]
    for function in found:
        yield function
        if type(function) is not FunctionType:
            continue
        for name in _names(function.__code__):
            values = [vars(base)[name] for base in cls.__mro__ if name in vars(base)]
            values += [function.__globals__[name]] if name in function.__globals__ else []
            for value in values:
                if not isinstance(value, ModuleType) and not _is_torchs(value):
                    found += [value] if all(value is not one for one in found) else []


def _is_constant(value: Any) -> bool:
    if type(value) is not FunctionType:
        return isinstance(value, (int, float, str, type(None)))
    names = set(_names(value.__code__))
    changes = any(name.endswith("_") and not name.startswith("__") for name in names)
    # As an argument of batch_norm it is that of training.
    return not changes and not names & _LEARNS and True not in _constants(value.__code__)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _constants(code: CodeType) -> list[Any]:
    return [one for one in code.co_consts if isinstance(one, bool)]
