# SPDX-License-Identifier: Apache-2.0
"""Layers as ranges of a profile."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch.autograd import profiler

_Function = TypeVar("_Function", bound=Callable[..., Any])


def recorded(name_of: Callable[..., str], suffix: str = "") -> Callable[[_Function], _Function]:
    """The function is a range of a profile, "syncbn::", the layer's name and the suffix.

    name_of: finds the layer's name among the function's arguments.
    """

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not profiler._is_profiler_enabled:
                return function(*args, **kwargs)
            with profiler.record_function(f"syncbn::{name_of(*args)}{suffix}"):
                return function(*args, **kwargs)

        return cast(_Function, wrapper)

    return decorate
