# SPDX-License-Identifier: Apache-2.0
"""What a forward by shares has: random numbers of each share, and the ends of its graphs."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten


class Generators:
    """The random numbers of shares: PyTorch's default generators, of the CPU and of the device,
    hold the state of the share that runs, and the program's own state again afterwards."""

    def __init__(self, seeds: Iterable[int], device: torch.device) -> None:
        self._defaults = [torch.default_generator]
        if device.type == "cuda":
            self._defaults.append(torch.cuda.default_generators[device.index])
        self._states = [
            [torch.Generator(g.device).manual_seed(seed).get_state() for g in self._defaults]
            for seed in seeds
        ]
        self._states.append(self._current())
        self._at = len(self._states) - 1

    def _current(self) -> list[Tensor]:
        return [g.get_state() for g in self._defaults]

    def switch(self, k: int) -> None:
        self._states[self._at], self._at = self._current(), k
        for generator, state in zip(self._defaults, self._states[k]):
            generator.set_state(state)

    def leave(self) -> None:
        self.switch(len(self._states) - 1)


def _refuse_another(gradient: Tensor) -> None:
    raise ValueError(
        "losses: got one of a forward that had its backward, expected all losses of a forward in "
        "one call"
    )


class Step:
    """One forward of this process's shares.

    aliases: of each share, the trained parameters under names of its own. Autograd would add the
    gradients of shares in an order of its own; so they are kept apart. outputs: what the model
    gave, and the leaf that the caller has of it: all shares begin backward at the same place,
    whatever graph the losses have.
    """

    def __init__(self, parameters: Sequence[Tensor], shares: int) -> None:
        self.aliases = [[p.detach().requires_grad_() for p in parameters] for _ in range(shares)]
        self.outputs: list[tuple[Tensor, Tensor]] = []

    def cut(self, output: Any) -> Any:
        """The same output, of leaves."""
        parts, spec = tree_flatten(output)
        for i, part in enumerate(parts):
            if isinstance(part, Tensor) and part.requires_grad:
                parts[i] = part.detach().requires_grad_()
                self.outputs.append((part, parts[i]))
        return tree_unflatten(parts, spec)

    def reached(self, share: int) -> bool:
        """Tells whether a backward came to the parameters, of which the leaves keep it."""
        return any(alias.grad is not None for alias in self.aliases[share])

    def end(self) -> None:
        """No other backward comes here."""
        for _, leaf in self.outputs:
            leaf.register_hook(_refuse_another)
        self.outputs = []

    def backward(self) -> None:
        """From the leaves on."""
        roots = [(part, leaf.grad) for part, leaf in self.outputs if leaf.grad is not None]
        self.end()
        if roots:
            torch.autograd.backward([part for part, _ in roots], [grad for _, grad in roots])
