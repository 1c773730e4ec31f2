# SPDX-License-Identifier: Apache-2.0
"""Where the devices, or shares, of one process meet: at a synchronized layer."""

import contextlib
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from .baton import OperatorCall, Request
from .devices import train_on_devices
from .errors import DivergenceError
from .exchange.turn import refuse
from .nn import SyncBatchNorm
from .step.surroundings import has_no_values


def give_up(calls: Iterable[tuple], error: BaseException) -> None:
    """Tells the other processes, once per group, that this one does not come to the exchange.

    calls: layers at which devices of this process wait, each with such a device's input.
    """
    if has_no_values():
        return
    # The error of the device is the one to raise, whatever becomes of this.
    with contextlib.suppress(Exception):
        groups = {module.state.peers(module.options()): (module, x) for module, x in calls}
        for peers, (module, x) in groups.items():
            state = module.state
            call = state.call_of(x, module.options())
            parameter = module.weight if module.running_mean is None else module.running_mean
            refuse(state.reached(peers), call, error, x, parameter, state.counters)


def layers_of(module: nn.Module) -> dict[int, tuple[str, Any]]:
    """Finds the synchronized layers in a module, with their paths, by their ids."""
    found: dict[int, tuple[str, Any]] = {}
    for name, part in module.named_modules():
        if isinstance(part, nn.SyncBatchNorm):
            layer: Any = part
            found[id(part)] = name or layer.state.name, part
    return found


class Meeting:
    """The place where devices meet: a layer's list form, under the program's own namespaces."""

    def __init__(self, module: nn.Module, *spaces: Any) -> None:
        self._layers, self._spaces = layers_of(module), spaces

    def meet(self, requests: list[Request | None]) -> list[Tensor]:
        for space in self._spaces:
            space.leave()
        waiting = [r for r in requests if r is not None]
        ended = len(waiting) < len(requests)
        if ended or any(self._place(r) != self._place(waiting[0]) for r in waiting):
            error = DivergenceError(self._difference(requests))
            self.give_up(requests, error)
            raise error
        first, xs = waiting[0], [r.x for r in waiting]
        if isinstance(first.layer, OperatorCall):
            try:
                first.layer.check(xs)
            except ValueError as error:
                self.give_up(requests, error)
                raise
        with first.state.entered():
            if isinstance(first.layer, OperatorCall):
                return first.layer.together(xs)
            if len(waiting) == 1:
                # Not the forward of a class that made this call, such as timm's.
                given = first.x, first.residual, first.mask
                return [SyncBatchNorm.forward(first.layer, *given)]
            residuals = [r.residual for r in waiting if r.residual is not None]
            masks = [r.mask for r in waiting]
            return train_on_devices(first.layer, xs, residuals or None, masks)

    def give_up(self, requests: list[Request | None], error: BaseException) -> None:
        """Tells the other processes, at the layers where devices wait; where none does, at any
        that trains."""
        for space in self._spaces:
            space.leave()
        calls = [(r.layer, r.x) for r in requests if r is not None]
        trained = (own for _, own in self._layers.values() if own.training and own.sync)
        give_up(calls or [(layer, None) for layer in trained][:1], error)

    @staticmethod
    def _place(request: Request) -> tuple:
        state = request.state
        common = state.inference, state.grad, state.autocast
        return request.layer, *common, request.residual is not None

    def _difference(self, requests: list[Request | None]) -> str:
        places: dict[str, list[str]] = {}
        for k, request in enumerate(requests):
            text = "finished"
            if request is not None:
                layer = request.layer
                state = request.state
                autocast = [f"{kind} {dtype}" for kind, on, dtype in state.autocast if on]
                name, _ = self._layers.get(id(layer), (layer.state.name, layer))
                text = (
                    f"at layer {name!r} (grad mode "
                    f"{state.grad}, inference mode {state.inference}, autocast "
                    f"{', '.join(autocast) or 'off'}, "
                    f"{'no' if request.residual is None else 'a'} residual)"
                )
            places.setdefault(text, []).append(str(k))
        return "the devices of this process did not make the same call: " + "; ".join(
            f"{'device' if len(ks) == 1 else 'devices'} {', '.join(ks)} {text}"
            for text, ks in places.items()
        )
