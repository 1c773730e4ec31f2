# SPDX-License-Identifier: Apache-2.0
"""Forward and backward of this process's shares."""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..baton import run_in_turns
from ..step import node, recomputation
from .streams import Streams
from .tensors import Tensors
from .together import Together

#: After so many steps of a loss little is looked at.
LOOKS = 3


class Turns:
    """The shares of this process, which take turns. mine: their numbers. meet: computes a layer
    for all of them."""

    def __init__(
        self, tensors: Tensors, mine: range, streams: Streams, module: nn.Module, meet: Callable
    ) -> None:
        self._meet = meet
        self._tensors, self._mine, self._streams, self._module = tensors, mine, streams, module

    # A function of TorchScript has other bits once it has run a few times.
    @torch.jit.optimized_execution(False)
    def run(
        self,
        loss: Callable[[nn.Module, Any], Any],
        batches: Sequence[Any],
        looks: int,
        exact: list[Tensor | None],
        observer: Any,
    ) -> tuple[list[list[float]], dict[str, Tensor]]:
        """Makes forward and backward. Gives each share's numbers, and those of the first by name.
        Gradients of shares are kept by their tensors, and those of synchronized layers, which are
        sums over all shares, are added to exact. looks: how many of the first steps of
        such a loss are left, after which little is looked at."""
        tensors = self._tensors
        again = 0 < looks < LOOKS  # what is made once, such as a table, is there
        before = Together(self._module, {"loss": loss}) if again else None
        calls = [functools.partial(loss, self._module, batch) for batch in batches]
        with recomputation.wrapped(tensors.spaces.bound):
            worlds = [tensors.spaces, self._streams]
            outputs = run_in_turns(calls, self._meet, lambda *_: tensors.spaces.leave(), worlds)
        tensors.check_written()
        if before is not None:
            before.check(Together(self._module, {"loss": loss}), "forward")
        numbers = [_numbers(output) for output in outputs]
        names = [list(each) for each in numbers]
        if any(each != names[0] for each in names):
            raise ValueError(f"loss: got {names}, expected the same names of all shares")
        losses = [each["loss"] for each in numbers]
        likes = {name: value.detach() for name, value in numbers[0].items()}
        found = [[float(v.detach()) for v in each.values()] for each in numbers]
        del outputs, numbers
        for given in zip(self._mine, batches, losses) if observer else ():
            observer.share(*given)
        outside = self._look(losses, batches) if looks else []
        before = Together(self._module, {"loss": loss}, True) if again else None
        at = self._streams.position()
        with _apart(tensors.trained.values()) as reached:
            torch.autograd.backward(losses)
        if before is not None:
            before.check(Together(self._module, {"loss": loss}, True), "backward")
        if self._streams.position() != at:
            raise ValueError(
                "loss: got a backward that draws random numbers, expected them in the forward: "
                "the shares of a process would draw in turns"
            )
        for i, (name, p) in enumerate(tensors.trained.items()):
            if (gradient := reached[i]) is not None:
                if id(p) not in tensors.exact:
                    raise ValueError(_past(repr(name)))
                kept = exact[i]
                exact[i] = gradient if kept is None else kept + gradient
        del losses
        if any(ref() is not None for ref in outside):
            raise ValueError(_past("of a tensor that outlives the step"))
        return found, likes

    def _look(self, losses: list[Tensor], batches: Any) -> list[weakref.ref]:
        """Refuses losses that come to what is not their share's. Gives other leaves, which must not
        outlive the step."""
        tensors = self._tensors
        if list(self._module.modules()) != tensors.spaces.modules:
            raise ValueError(
                "module: got a forward that adds or removes modules, expected them in the "
                "constructor: each share would make its own"
            )
        names = {id(p): name for name, p in tensors.trained.items()}
        owner = {id(a): k for k, aliases in enumerate(tensors.aliases) for a in aliases}
        given, outside = {id(t) for t in tree_leaves(batches)}, []
        for k, loss in enumerate(losses):
            for leaf in _leaves_of(loss, k, len(losses)):
                if owner.get(id(leaf), k) != k:
                    raise ValueError(
                        f"loss: got that of share {self._mine[k]} with results of share "
                        f"{self._mine[owner[id(leaf)]]}, expected its own: a forward leaves them "
                        "where all shares see them, such as a dictionary outside of the modules"
                    )
                if id(leaf) in names:
                    raise ValueError(_past(repr(names[id(leaf)])))
                if id(leaf) in owner or id(leaf) in given:
                    continue
                if isinstance(leaf, nn.Parameter):
                    raise ValueError(_past(f"of shape {tuple(leaf.shape)}, of no part of it"))
                outside.append(weakref.ref(leaf))
        return outside


def _past(what: str) -> str:
    return (
        f"loss: got a gradient of the parameter {what}, past the model that it was given, expected "
        "what loss(model, batch) finds in model: a parameter elsewhere would get the gradients of "
        "this process's shares alone"
    )


def _numbers(output: Any) -> dict[str, Tensor]:
    """A share's loss and other numbers, by name; "" beside a loss that comes alone."""
    given = {"loss": output, "": 0.0} if isinstance(output, Tensor) else output
    numbers = {}
    for name, value in given.items() if isinstance(given, Mapping) else ():
        if isinstance(value, (bool, int, float)):
            value = torch.tensor(value, dtype=torch.float64)
        if not isinstance(value, Tensor) or value.numel() != 1 or value.is_complex():
            raise ValueError(f"loss: got {name!r} of {type(value).__name__}, expected a number")
        dtype = value.dtype if value.is_floating_point() else torch.float64
        numbers[str(name)] = value.to(dtype)
    if "loss" not in numbers or not numbers["loss"].requires_grad:
        raise ValueError(
            f"loss: got {output!r:.200}, expected a tensor of one number that has a gradient, or a "
            'dictionary of numbers with such a "loss"'
        )
    return numbers


@contextlib.contextmanager
def _apart(parameters: Iterable[Tensor]) -> Iterator[list[Tensor | None]]:
    """A list that afterwards has what a with block adds to .grad, which stay as they were."""
    parameters = list(parameters)
    reached: list[Tensor | None] = []
    before = [p.grad for p in parameters]
    try:
        for p in parameters:
            p.grad = None
        yield reached
        reached += [p.grad for p in parameters]
    finally:
        for p, gradient in zip(parameters, before):
            p.grad = gradient


def _leaves_of(loss: Tensor, share: int, shares: int) -> Iterator[Tensor]:
    """Gives the leaves that a share's loss comes to by itself. At a synchronized layer, whose node
    is that of all shares of the process, it goes on with the share's own input and residual."""
    seen: set[Any] = set()
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        at = waiting.pop()
        if at is None or at in seen:
            continue
        seen.add(at)
        variable = getattr(at, "variable", None)
        if variable is not None:
            yield variable
        following = [n for n, _ in at.next_functions]
        if node.is_layer(at):
            weight, bias = at.saved_tensors[0], at.step.bias_dtype
            after = shares + (weight is not None) + (bias is not None)
            following = [following[share], *following[after : after + shares][share : share + 1]]
        waiting += following
