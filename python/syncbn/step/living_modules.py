# SPDX-License-Identifier: Apache-2.0
"""Where layers lie in the models of this process."""

import gc
from itertools import compress
from typing import Any

from torch import nn

#: What wrappers (DDP, torch.compile, FSDP, checkpoint_wrapper) put into paths.
WRAPPERS = frozenset(("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))


def paths_of_living(kind: type) -> dict[Any, str]:
    """The path of each module whose `state` is of that type, by the state: in the largest model
    that holds it, so that it does not depend on what else, a feature extractor for example, holds
    parts of the model."""
    classes = _with_subclasses(nn.Module)
    objects = gc.get_objects()  # by type, and without asking the objects: some do things then
    chosen = map(classes.__contains__, map(id, map(type, objects)))
    modules = list(compress(objects, chosen))
    del objects
    inner = {id(child) for module in modules for _, child in _children(module)}
    found: dict[Any, tuple[int, str]] = {}
    for module in modules:
        if id(module) not in inner:
            size, paths = _layers(module, kind)
            for state, path in paths.items():
                found[state] = max(found.get(state, (0, "")), (size, path))
    return {state: path for state, (_, path) in found.items()}


def _with_subclasses(cls: type) -> set[int]:
    """The ids of the class and of all that are derived from it."""
    found, left = set(), [cls]
    while left:
        cls = left.pop()
        if id(cls) not in found:
            found.add(id(cls))
            left += type.__subclasses__(cls)
    return found


def _children(module: nn.Module) -> list[tuple[str, Any]]:
    children = vars(module).get("_modules")  # none yet in a constructor
    if not isinstance(children, dict):
        return []
    return [(name, child) for name, child in children.items() if isinstance(child, nn.Module)]


def _layers(root: nn.Module, kind: type) -> tuple[int, dict[Any, str]]:
    """How many modules are in a model; and the first path of each layer, without wrappers."""
    seen: set[int] = set()
    found: dict[Any, str] = {}
    left: list[tuple[nn.Module, str]] = [(root, "")]
    while left:
        module, path = left.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        state = vars(module).get("state")
        if type(state) is kind:
            found.setdefault(state, path)
        for name, child in reversed(_children(module)):
            inside = f"{path}.{name}" if path else name
            left.append((child, path if name in WRAPPERS else inside))
    return len(seen), found
