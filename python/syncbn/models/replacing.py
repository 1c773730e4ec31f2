# SPDX-License-Identifier: Apache-2.0
"""Puts modules of a tree in the place of others, and undoes it."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from . import classes

_CONTAINERS = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


def replace(
    module: nn.Module, path: str, make: Callable[[nn.Module, str], nn.Module | None], done: dict
) -> Any:
    """Replaces depth first; a module that occurs twice, by one and the same module."""
    if id(module) in done:
        return done[id(module)][1]
    result = make(module, path) or module
    done[id(module)] = module, result  # holds the module, so that nothing else gets its id
    if result is not module:  # what is in it is make's choice
        return result
    for name, child in list(module._modules.items()):  # named_children skips second mentions
        if child is None:
            continue
        changed = replace(child, f"{path}.{name}" if path else name, make, done)
        if changed is not child:
            setattr(module, name, changed)
    return module


class Undo:
    """The state of the modules of a tree, to make them so again. Containers are remembered by their
    contents, because they stay the same objects."""

    def __init__(self, module: nn.Module) -> None:
        self._before = []
        for m in module.modules():
            if isinstance(m, torch.jit.ScriptModule):  # nothing in it is converted
                continue
            contents = {v: copy.copy(vars(m)[v]) for v in _CONTAINERS}
            self._before.append((m, m.__class__, dict(vars(m)), contents))

    def rebind(self) -> None:
        """Binds anew the methods on modules of layers that are of another class now."""
        classes.rebind([(m, cls) for m, cls, *_ in self._before])

    def __call__(self) -> None:
        for module, cls, attributes, contents in self._before:
            module.__class__ = cls
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for name, content in contents.items():
                attributes[name].clear()
                attributes[name].update(content)
