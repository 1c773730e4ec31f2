# SPDX-License-Identifier: Apache-2.0
"""Checks of a user's own model."""

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from .models.classes import wrapper
from .models.convert import convert_sync_batchnorm
from .models.report import table
from .nn import SyncBatchNorm, device_of, layers_of
from .parallel import SelfDataParallel
from .step.options import check_module

__all__ = ["LayerParity", "Parity", "parity"]


class LayerParity(NamedTuple):
    """The differences in one call of one layer.

    Each number is the largest absolute difference; 0.0 means equal bits. statistics, output and
    input_gradient are for identical inputs and output gradients: the layer promises 0.0.
    output_drift and gradient_drift are of the layer in the network, where other layers round
    differently; None where they cannot be compared.
    """

    path: str
    call: int
    shape: tuple[int, ...]
    statistics: float
    output: float
    input_gradient: float
    output_drift: float | None
    gradient_drift: float | None


class Parity(list[LayerParity]):
    """A list of LayerParity that prints as a table.

    ranks is the number of ranks. losses are those of the whole network in one process and on the
    ranks. gradient_drift is the largest difference of the parameters' gradients, relative to their
    largest entry.
    """

    def __init__(
        self,
        rows: Iterable[LayerParity],
        ranks: int,
        losses: tuple[float, float],
        gradient_drift: float,
    ) -> None:
        super().__init__(rows)
        self.ranks = ranks
        self.losses = losses
        self.gradient_drift = gradient_drift

    @property
    def exact(self) -> bool:
        """Whether every layer gave the same bits for identical inputs."""
        return all(not any((r.statistics, r.output, r.input_gradient)) for r in self)

    def __str__(self) -> str:
        def cell(difference: float | None) -> str | None:
            return None if difference is None else f"{difference:.2g}"

        rows: list[tuple[object, ...]] = [LayerParity._fields]
        for row in self:
            exact = ("same bits" if d == 0 else cell(d) for d in row[3:6])
            shape = "x".join(map(str, row.shape))
            rows.append((row.path, row.call, shape, *exact, *map(cell, row[6:])))
        one, several = self.losses
        return (
            f"{table(rows)}\nwhole network (drift): loss {one:.9g} in one process, "
            f"{several:.9g} on {self.ranks} ranks; gradients of parameters differ by up to "
            f"{self.gradient_drift:.2g} of the largest entry"
        )


class _Call:
    """What a layer was given in one call, and what came of it."""

    def __init__(self, x: Tensor, residual: Tensor | None, mask: Tensor | None, y: Tensor) -> None:
        self.x, self.y = x.detach().clone(), y.detach().clone()
        self.residual = None if residual is None else residual.detach().clone()
        self.mask = None if mask is None else mask.clone()
        self.dy = torch.zeros_like(self.y)  # stays, if no gradient comes back
        if y.requires_grad:
            y.register_hook(self._gradient)

    def _gradient(self, dy: Tensor) -> None:
        self.dy = dy.detach().clone()


def _layers(model: nn.Module) -> dict[str, SyncBatchNorm]:
    return {name: layer for name, layer in layers_of(model) if layer.training}


def _run(
    model: nn.Module, call: Callable[[], list[Any]], loss: Callable[[Any], Tensor]
) -> tuple[dict[str, list[_Call]], float]:
    """Gives the calls of each layer, device after device, and the loss."""
    calls: dict[str, list[_Call]] = {}

    def record(name: str) -> Callable[..., None]:
        def hook(
            layer: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any], y: Tensor
        ) -> None:
            given = dict(zip(("input", "residual", "mask"), arguments)) | options
            call = _Call(given["input"], given.get("residual"), given.get("mask"), y)
            calls.setdefault(name, []).append(call)

        return hook

    for name, layer in _layers(model).items():
        layer.register_forward_hook(record(name), with_kwargs=True)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        value = loss(_joined(call()))
        if not isinstance(value, Tensor) or value.numel() != 1:
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise ValueError(f"loss: got {got} as its result, expected a tensor of one number")
        if value.requires_grad or any(p.requires_grad for p in model.parameters()):
            value.backward()
    return calls, float(value.detach())


def _joined(outputs: list) -> Any:
    """Gives the devices' outputs as that of the whole batch."""
    leaves, specifications = zip(*(tree_flatten(output) for output in outputs))
    joined = []
    for parts in zip(*leaves):
        if not all(isinstance(part, Tensor) and part.dim() > 0 for part in parts):
            raise ValueError(
                f"model: got {type(parts[0]).__name__} {parts[0]!r} in its output, expected "
                "tensors with the samples along their first axis"
            )
        joined.append(torch.cat(parts))
    return tree_unflatten(joined, specifications[0])


def _mean_square(output: Any) -> Tensor:
    tensors = [t for t in tree_flatten(output)[0] if t.is_floating_point()]
    if not tensors:
        raise ValueError(
            "loss: got None for an output without floating-point numbers, expected one"
        )
    return torch.stack([t.float().square().mean() for t in tensors]).sum()


def _difference(a: Tensor, b: Tensor) -> float:
    """Gives 0.0 for equal bits (NaN equals NaN), else the largest absolute difference."""
    same = (a == b) & (a.signbit() == b.signbit()) | a.isnan() & b.isnan()
    if bool(same.all()):
        return 0.0
    largest = float((a.double() - b.double())[~same].abs().max())
    # Of a pair of zeros of different signs, and where one is NaN.
    return math.inf if math.isnan(largest) else largest or math.ulp(0.0)


def _step(layer: nn.Module, calls: list[_Call]) -> tuple[Tensor, Tensor]:
    """Output and input gradient; one call per device."""
    xs = [call.x.clone().requires_grad_() for call in calls]
    arguments: list[tuple[Any, ...]] = [(x, c.residual, c.mask) for x, c in zip(xs, calls)]
    while arguments[0][-1] is None:  # a subclass may take fewer
        arguments = [given[:-1] for given in arguments]
    with torch.enable_grad():
        ys = layer(arguments) if len(calls) > 1 else [layer(*arguments[0])]
        torch.autograd.backward(ys, [call.dy for call in calls])
    dxs: list[Any] = [x.grad for x in xs]
    return torch.cat([y.detach() for y in ys]), torch.cat(dxs)


def _split(call: _Call, devices: int) -> list[_Call]:
    """Shares of a call, with its output gradient."""
    parts = [
        [None] * devices if t is None else t.tensor_split(devices) for t in vars(call).values()
    ]
    shares = []
    for values in zip(*parts):
        share = copy.copy(call)
        vars(share).update(zip(vars(call), values))
        shares.append(share)
    return shares


def _exact(layer: SyncBatchNorm, call: _Call, devices: list) -> tuple[float, float, float]:
    """Differences of statistics, output and input gradient for identical inputs."""
    layers = [copy.deepcopy(layer) for _ in range(2)]
    for each in layers:
        each.momentum = 1.0  # the running statistics are the batch's
    y, dx = _step(layers[0], [call])
    shared = SelfDataParallel(layers[1], devices)
    # One device, with samples that are the whole batch, gives no list.
    ys, dxs = _step(shared if len(devices) > 1 else layers[1], _split(call, len(devices)))
    statistics = 0.0
    if layer.running_mean is not None:
        statistics = max(
            _difference(*(getattr(each, name) for each in layers))
            for name in ("running_mean", "running_var")
        )
    return statistics, _difference(y, ys), _difference(dx, dxs)


def _drift(whole: Tensor, parts: list[Tensor]) -> float | None:
    joined = torch.cat(parts) if parts else None
    if joined is None or joined.shape != whole.shape:
        return None
    return _difference(whole, joined)


def _prepared(model: nn.Module) -> nn.Module:
    """Makes a copy whose layers share statistics with the devices of this process alone."""
    model = copy.deepcopy(model)
    if not any(isinstance(m, SyncBatchNorm) for m in model.modules()):
        model = convert_sync_batchnorm(model, sync=False)
    for name, layer in _layers(model).items():
        if layer.statistics != "reproducible":
            raise ValueError(
                f"model: got statistics={layer.statistics!r} in {name or 'the model'}, expected "
                "'reproducible', whose bits are the same for any number of ranks"
            )
        layer.sync = False
        layer.inplace = False  # forward has the same bits
    return model


def _share(arguments: tuple, k: int, ranks: int) -> tuple:
    return tree_map(lambda t: t.tensor_split(ranks)[k] if isinstance(t, Tensor) else t, arguments)


def parity(
    model: nn.Module, batch: Any, ranks: int = 4, loss: Callable[[Any], Tensor] | None = None
) -> Parity:
    """Compares one process that has the whole batch with `ranks` ranks that share it.

    Ranks are virtual devices of this process (syncbn.parallel). They give the bits of as many
    processes. No process group is needed, and none is used. For each call of each synchronized
    layer in training mode two things are compared:

    - The layer alone, for the inputs and output gradients of the run with the whole batch.
      Statistics, output and input gradient must have the same bits.
    - The layer in the network. There its inputs differ, because convolutions and other layers round
      differently for another batch size. This drift is no error of the layer.

    Args:
        model: in training mode, not wrapped by DistributedDataParallel or FSDP. It is not changed.
            If it has no SyncBatchNorm, a converted copy is examined.
        batch: the model's argument, or the tuple of its arguments: tensors, or nested tuples, lists
            and dictionaries of tensors. Samples lie along the first axis of each tensor.
        ranks: how many ranks the samples are split among. Shares may be empty.
        loss: a function of the model's output for the whole batch that returns a tensor of one
            number. None: the mean of squares. The ranks' outputs are joined along their first axis.

    Returns:
        A Parity: one LayerParity per layer and call. Its `exact` tells whether all layers gave the
        same bits.

    Raises:
        ValueError: an argument is refused, or the model's output is not made of tensors with
            samples along their first axis. Errors of the model itself pass through.
    """
    check_module(model, "model")
    for path, part in model.named_modules():
        text = wrapper(part)
        if text is not None and not text.startswith("compiled"):
            raise ValueError(
                f"model: got {path or 'a model'}, {text}, expected the model without that"
            )
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise ValueError(f"ranks: got {ranks!r}, expected an integer of at least 1")
    if loss is not None and not callable(loss):
        raise ValueError(f"loss: got {loss!r}, expected a function of the model's output, or None")
    loss = _mean_square if loss is None else loss
    layers = _layers(_prepared(model))
    if not layers:
        raise ValueError("model: got no batch norm layer in training mode, expected at least one")
    device = device_of(next(iter(layers.values())))
    devices = [device] * ranks
    arguments = batch if isinstance(batch, tuple) else (batch,)
    shares = [_share(arguments, k, ranks) for k in range(ranks)]
    one, several = _prepared(model), _prepared(model)
    calls, whole_loss = _run(one, lambda: [one(*arguments)], loss)
    parallel = SelfDataParallel(several, devices)
    parts, shared_loss = _run(several, lambda: parallel(shares), loss)
    rows = []
    for name, whole_calls in calls.items():
        for number, call in enumerate(whole_calls):
            own = parts.get(name, [])[number * ranks : (number + 1) * ranks]
            drifts = _drift(call.y, [c.y for c in own]), _drift(call.dy, [c.dy for c in own])
            exact = _exact(layers[name], call, devices)
            rows.append(LayerParity(name, number, tuple(call.x.shape), *exact, *drifts))
    drift, scale = 0.0, 0.0
    for p, q in zip(one.parameters(), several.parameters()):
        if p.grad is not None and q.grad is not None and p.numel() > 0:
            scale = max(scale, float(p.grad.double().abs().max()))
            drift = max(drift, _difference(p.grad, q.grad))
    # Not of each parameter by itself: a bias before batch norm has rounding for its gradient.
    drift /= scale or 1.0
    return Parity(rows, ranks, (whole_loss, shared_loss), drift)
