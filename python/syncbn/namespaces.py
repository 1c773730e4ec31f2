# SPDX-License-Identifier: Apache-2.0
"""One module for several devices or shares, each with a namespace of its own.

A share's namespace is a __dict__ for each submodule, which is in the place of the module's own
while the share runs. Parameters and buffers in it are those that the caller gives in their place;
hooks, containers and attributes are copies. The modules are the same objects, so bound methods,
closures and lists that hold a module find what the share has.
"""

import collections
import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

#: In a module's __dict__: hooks that a forward may add, each a dictionary by number.
_HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    *("_backward_hooks", "_backward_pre_hooks"),
)
#: What no forward changes: submodules, and what state_dict() is made with.
SHARED = (
    *("_modules", "_non_persistent_buffers_set", "_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
_TENSORS = ("_parameters", "_buffers")
_DICTIONARIES = (collections.OrderedDict, collections.defaultdict, collections.Counter)
#: Of which each share has its own.
CONTAINERS = (list, tuple, set, dict, collections.deque, *_DICTIONARIES)
_NOTHING = object()


def _seen(value: Any) -> Any:
    """Notes what a container holds now, to be compared with what it holds later."""
    if type(value) not in CONTAINERS:
        return value
    items = itertools.chain(*value.items()) if isinstance(value, dict) else value
    return [value, *map(_seen, items)]


def _differ(a: Any, b: Any) -> bool:
    if type(a) is list and type(b) is list:
        return len(a) != len(b) or a[0] is not b[0] or any(map(_differ, a[1:], b[1:]))
    return a is not b


def write(module: nn.Module, namespace: dict[str, Any]) -> None:
    """Makes it the module's __dict__."""
    object.__setattr__(module, "__dict__", namespace)


class Namespaces:
    """The namespaces of a module and all in it.

    substitutes: for each share the tensors that it has in the place of others, by their ids.
    Tensors that are found in attributes are copied, and added. What a forward puts into its
    namespace stays there for the share's next step; the program's own stays as it is.
    """

    def __init__(self, module: nn.Module, substitutes: Sequence[dict[int, Tensor]]) -> None:
        self.at: int | None = None
        self.modules = list(module.modules())
        self.base = [vars(m) for m in self.modules]
        self._substitutes, self._kept = substitutes, list[Tensor]()
        self.spaces = [[self._begun(b, own) for b in self.base] for own in substitutes]
        self._last = [{n: _seen(v) for n, v in b.items() if n not in SHARED} for b in self.base]

    def enter(self, k: int) -> None:
        """Says that share k runs next."""
        self.at = k
        for module, namespace in zip(self.modules, self.spaces[k]):
            write(module, namespace)

    def leave(self) -> None:
        """The program goes on."""
        self.at = None
        for module, namespace in zip(self.modules, self.base):
            write(module, namespace)

    def bound(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Gives a function that runs in the namespaces of the share that runs now."""
        share = self.at

        def run(*arguments: Any, **named: Any) -> Any:
            if self.at == share or share is None:
                return function(*arguments, **named)
            before = self.at
            self.enter(share)
            try:
                return function(*arguments, **named)
            finally:
                self.leave() if before is None else self.enter(before)

        return run

    def _begun(self, base: dict[str, Any], own: dict[int, Tensor]) -> dict[str, Any]:
        return {n: v if n in SHARED else self._of_share(v, own) for n, v in base.items()}

    def _of_share(self, value: Any, own: dict[int, Tensor]) -> Any:
        if isinstance(value, Tensor):
            if id(value) in own:
                return own[id(value)]
            if value.requires_grad:  # a result of something, or a parameter of nobody
                return value
            self._kept.append(value)  # or another would get its id
            own[id(value)] = value.detach().clone()
            return own[id(value)]
        kind = type(value)
        if kind not in CONTAINERS:
            return value
        if isinstance(value, (dict, collections.deque)):
            made = copy.copy(value)
            for n, v in value.items() if isinstance(value, dict) else enumerate(value):
                made[n] = self._of_share(v, own)
            return made
        return kind([self._of_share(v, own) for v in value])

    def refresh(self) -> None:
        """Brings what the program changed since the last time into all namespaces: attributes,
        containers, hooks."""
        for i, (base, last) in enumerate(zip(self.base, self._last)):
            for name in last.keys() - base.keys():
                del last[name]
                for space in self.spaces:
                    space[i].pop(name, None)
            for name, value in base.items():
                if name in SHARED or name in _TENSORS:
                    continue
                seen = _seen(value)
                if _differ(seen, last.get(name, _NOTHING)):
                    for space, own in zip(self.spaces, self._substitutes):
                        if name in _HOOKS:
                            self._bring_hooks(value, last.get(name, [value]), space[i][name])
                        else:
                            space[i][name] = self._of_share(value, own)
                    last[name] = seen

    @staticmethod
    def _bring_hooks(now: dict, last: list, own: dict) -> None:
        """Keeps those, too, that the share's forward has put there."""
        before = dict(zip(last[1::2], last[2::2]))
        for number in before.keys() - now.keys():
            own.pop(number, None)
        own.update((n, hook) for n, hook in now.items() if before.get(n) is not hook)
