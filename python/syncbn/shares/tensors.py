# SPDX-License-Identifier: Apache-2.0
"""What shares have of their own: parameters under other names, buffers, and a namespace."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..namespaces import Namespaces


def bits(tensor: Tensor) -> Tensor:
    """Gives its bytes, which differ where 0 has another sign, and do not where both are NaN."""
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def _sum_of_bits(tensor: Tensor) -> Tensor:
    flat = bits(tensor)
    padded = nn.functional.pad(flat, (0, -flat.numel() % 8)).view(torch.int64)
    return padded.sum()


def _mark(tensor: Tensor) -> tuple[Tensor, int, int]:
    return tensor, tensor._version, tensor.data_ptr()


def _moved(tensor: Tensor, mark: tuple[Tensor, int, int]) -> bool:
    return tensor is not mark[0] or tensor._version != mark[1] or tensor.data_ptr() != mark[2]


class _Free:
    """A tensor that no gradient changes and a forward may write to: a buffer, or a parameter that
    is frozen. Each share has its own; share 0's stays.

    place: the module's number, the dictionary in its namespace, the name there. restless: a share
    wrote to it past its version, as .data does. shared: a frozen parameter to which nobody wrote,
    of which the shares have no copies.
    """

    def __init__(self, name: str, place: tuple[int, str, str], base: Tensor, shares: int) -> None:
        self.name, self.place = name, place
        self.own: list[Tensor] = [self._copy(base) for _ in range(shares)]
        self.restless = self.shared = False
        self.mark(base)

    def _copy(self, base: Tensor) -> Tensor:
        copy = base.detach().clone()
        return nn.Parameter(copy, False) if isinstance(base, nn.Parameter) else copy

    def mark(self, base: Tensor) -> None:
        self._base, self._marks = _mark(base), [_mark(t) for t in self.own]

    def refresh(self, base: Tensor, now: Sequence[Tensor]) -> list[Tensor]:
        """Gives what the shares have now, with the bits of base."""
        if self.shared:
            for own in self.own:
                if own.data_ptr() != base.data_ptr():
                    own.data = base.data
        elif self.restless or _moved(base, self._base) or any(map(_moved, now, self._marks)):
            for k, own in enumerate(now):
                if own is not self.own[k] or own.shape != base.shape or own.dtype != base.dtype:
                    self.own[k] = self._copy(base)
                elif not _same(own, base):  # else backward of an earlier step may still need it
                    with torch.no_grad():
                        own.copy_(base)
        self.mark(base)
        return self.own

    def written(self, base: Tensor, now: Sequence[Tensor | None], looks: int) -> bool:
        """Tells whether the first of these shares wrote to it, in another way than it was."""
        for own, mark in zip(now, self._marks):
            if own is None or own.shape != base.shape or own.dtype != base.dtype:
                raise ValueError(
                    f"module: got another shape or dtype of {self.name!r} from a forward, expected "
                    f"{tuple(base.shape)} and {base.dtype} still"
                )
            moved = _moved(own, mark)
            if self.shared and moved:
                self.refuse()
            if looks and not self.shared and not moved:
                self.restless = self.restless or not _same(own, base)
        first = now[0]
        if self.shared or first is None:
            return False
        return (self.restless or _moved(first, self._marks[0])) and not _same(first, base)

    def refuse(self) -> None:
        raise ValueError(
            f"module: got a forward that writes to the frozen parameter {self.name!r} now, and did "
            "not in its first steps; expected a buffer"
        )

    def share(self, base: Tensor) -> None:
        """Drops the copies of a parameter to which nobody writes."""
        self.shared = True
        for own in self.own:
            own.data = base.data
        self.mark(base)


class Tensors:
    """The tensors of a module for the shares of this process. trained: names and parameters that
    get gradients. spaces: the namespaces."""

    def __init__(self, module: nn.Module, layers: Sequence[nn.Module], shares: int) -> None:
        named = list(module.named_parameters())
        self.trained = {name: p for name, p in named if p.requires_grad}
        self.exact = {id(p) for layer in layers for p in layer.parameters(recurse=False)}
        self.aliases = [[self._alias(p) for p in self.trained.values()] for _ in range(shares)]
        self.free: list[_Free] = []
        places = dict(self._places(module, layers))
        substitutes = []
        for name, (place, tensor) in places.items():
            self.free.append(_Free(name, place, tensor, shares))
        for k, aliases in enumerate(self.aliases):
            own: dict[int, Tensor] = {
                id(p): alias for p, alias in zip(self.trained.values(), aliases)
            }
            own |= {id(b): b for layer in layers for b in layer.buffers(recurse=False)}
            own |= {id(places[f.name][1]): f.own[k] for f in self.free}
            substitutes.append(own)
        self.spaces = Namespaces(module, substitutes)
        self.made_of = self.key(module)
        self._versions: list[int] = []
        self._sums: dict[str, int] = {}
        self._looks = False

    @staticmethod
    def _alias(parameter: nn.Parameter) -> nn.Parameter:
        alias = nn.Parameter(parameter.detach())
        alias.__dict__.update(vars(parameter))
        return alias

    @staticmethod
    def _places(module: nn.Module, layers: Sequence[nn.Module]) -> Iterator[tuple]:
        """Names, and places and tensors, of what is free; a tensor that has two names once."""
        seen = {id(b) for layer in layers for b in layer.buffers(recurse=False)}
        paths = dict((id(m), path) for path, m in module.named_modules())
        for i, m in enumerate(module.modules()):
            for kind in ("_buffers", "_parameters"):
                for name, tensor in getattr(m, kind).items():
                    if tensor is None or id(tensor) in seen or tensor.requires_grad:
                        continue
                    seen.add(id(tensor))
                    yield f"{paths[id(m)]}.{name}".lstrip("."), ((i, kind, name), tensor)

    @staticmethod
    def key(module: nn.Module) -> list:
        """Gives what changes where these tensors are no longer those of the module."""
        found = []
        for m in module.modules():
            own = vars(m)
            parameters = [
                (id(p), p.requires_grad) for p in own["_parameters"].values() if p is not None
            ]
            found.append((m, parameters, [n for n, b in own["_buffers"].items() if b is not None]))
        return found

    def _base(self, free: _Free) -> Any:
        i, kind, name = free.place
        return self.spaces.base[i][kind].get(name)

    def _now(self, free: _Free) -> list[Any]:
        i, kind, name = free.place
        return [space[i][kind].get(name) for space in self.spaces.spaces]

    def refresh(self, looks: int) -> None:
        """Brings what the program changed since the last step to the shares. looks: at what
        check_written() cannot see otherwise."""
        self.spaces.refresh()
        for aliases in self.aliases:
            for p, alias in zip(self.trained.values(), aliases):
                if p.data_ptr() != alias.data_ptr() or p.stride() != alias.stride():
                    alias.data = p.data
        for free in self.free:
            i, kind, name = free.place
            for space, own in zip(
                self.spaces.spaces, free.refresh(self._base(free), self._now(free))
            ):
                space[i][kind][name] = own
        self._versions = [p._version for p in self.trained.values()]
        self._looks = bool(looks)
        self._sums = self._sums_of_bits()

    def _sums_of_bits(self) -> dict[str, int]:
        """Sums the bits of tensors that shares have together, to which a forward may write past
        versions."""
        some = dict(self.trained) if self._looks else {}
        some |= {free.name: self._base(free) for free in self.free if free.shared}
        sums = [_sum_of_bits(t) for t in some.values()]
        return dict(zip(some, torch.stack(sums).tolist())) if sums else {}

    def check_written(self) -> None:
        """Refuses a forward that wrote to a parameter that is trained."""
        written = dict(self._sums.items() - self._sums_of_bits().items())
        for j, (name, p) in enumerate(self.trained.items()):
            moved = any(aliases[j].data_ptr() != p.data_ptr() for aliases in self.aliases)
            if moved or p._version != self._versions[j] or name in written:
                raise ValueError(
                    f"module: got a forward that writes to the trained parameter {name!r}, "
                    "expected such changes after training.step(): each share would make them"
                )
        for free in self.free:
            if free.name in written:
                free.refuse()
        held = [space[i]["_parameters"] for space in self.spaces.spaces for i in range(len(space))]
        own = {id(a) for aliases in self.aliases for a in aliases}
        own |= {id(t) for free in self.free for t in (*free.own, self._base(free))} | self.exact
        for parameters in held:
            for name, p in parameters.items():
                if p is not None and id(p) not in own:
                    raise ValueError(
                        f"module: got a forward that makes the parameter {name!r}, expected it in "
                        "the constructor: each share would have another"
                    )

    def written(self, looks: int) -> list[_Free]:
        """Gives what this process's first share wrote to."""
        return [f for f in self.free if f.written(self._base(f), self._now(f), looks)]

    def first(self, some: Sequence[_Free]) -> list[Tensor]:
        """Gives what the first share has of these."""
        return [self._now(free)[0] for free in some]

    def keep(self, free: _Free, value: Tensor | None) -> None:
        """Gives it to the program. value: bytes; None: what the first share has."""
        i, kind, name = free.place
        base, own = self._base(free), self._now(free)[0].detach()
        if value is not None:
            own = value.clone().view(base.dtype).view(base.shape)  # aligned
        expanded = any(s == 0 and n > 1 for s, n in zip(base.stride(), base.shape))
        with torch.no_grad():
            if expanded:
                self.spaces.base[i][kind][name] = own.clone()
            else:
                base.copy_(own)

    def settle(self, written: Sequence[str]) -> None:
        """Ends the first looks: copies of frozen parameters that nobody writes to are dropped."""
        for free in self.free:
            base = self._base(free)
            if free.place[1] == "_parameters" and not free.shared and free.name not in written:
                if not free.restless and all(_same(own, base) for own in self._now(free)):
                    free.share(base)
