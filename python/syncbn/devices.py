# SPDX-License-Identifier: Apache-2.0
"""A layer with the inputs of several devices of one process: a list of them."""

import contextlib
import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .baton import inside
from .step import recomputation
from .step.masks import check_mask
from .step.node import apply_step, tell
from .step.options import RUNNING, check_arguments, check_counter, check_options, check_plain
from .step.surroundings import check_transforms, like_operators, plain, recorded, refuse_tracing
from .step.training import has_samples

#: The digits of a message have room for this many (docs/numerics.md).
MAX_DEVICES = 2048


def _check_list(name: str, tensors, xs: Sequence[Tensor]) -> None:
    if not isinstance(tensors, (list, tuple)) or len(tensors) != len(xs):
        given = len(tensors) if isinstance(tensors, (list, tuple)) else type(tensors).__name__
        raise ValueError(f"{name}: got {given}, expected a list of {len(xs)}, one per input")


def _plain(tensors):
    return [plain(t) for t in tensors] if isinstance(tensors, (list, tuple)) else tensors


def _check_some(xs: Sequence[Tensor]) -> None:
    if not xs:
        raise ValueError("inputs: got an empty list, expected one tensor per device")


def _check_inputs(layer, xs: Sequence[Tensor], residuals, masks, ranks: int) -> None:
    _check_some(xs)
    if len(xs) * ranks > MAX_DEVICES:
        raise ValueError(
            f"inputs: got {len(xs)} devices in each of {ranks} processes, expected at most "
            f"{MAX_DEVICES} devices in all"
        )
    _check_list("residual", residuals, xs)
    _check_list("mask", masks, xs)
    for k, x in enumerate(xs):
        if not isinstance(x, Tensor):
            raise ValueError(f"inputs[{k}]: got {type(x).__name__}, expected a tensor")
        if x.device.type != xs[0].device.type:
            raise ValueError(
                f"inputs[{k}]: got a tensor on {x.device}, expected {xs[0].device.type}, as "
                "inputs[0]"
            )
        # The parameters lie on the first device and are copied to the others.
        tensors = (layer.running_mean, layer.running_var, layer.weight, layer.bias)
        try:
            mean, var, weight, bias = (None if t is None else t.to(x.device) for t in tensors)
            check_arguments(x, mean, var, weight, bias, residuals[k])
            if masks[k] is not None:
                check_mask(masks[k], x)
            check_plain(ranks == 1, input=x, residual=residuals[k], mask=masks[k])
        except ValueError as error:
            raise ValueError(f"inputs[{k}], of device {k}: {error}") from None
        if x.shape[1] != xs[0].shape[1]:
            raise ValueError(
                f"inputs[{k}]: got {x.shape[1]} channels, expected {xs[0].shape[1]}, those of "
                "inputs[0]"
            )
    filled = [k for k, x in enumerate(xs) if has_samples(x, masks[k])]
    for k in filled:
        if xs[k].dtype != xs[filled[0]].dtype:
            raise ValueError(
                f"inputs[{k}]: got {xs[k].dtype}, expected {xs[filled[0]].dtype}, the dtype of "
                f"inputs[{filled[0]}]"
            )


@recorded(lambda module, *_: module.state.name)
def train_on_devices(
    module,
    xs: Sequence[Tensor],
    residuals: Sequence[Tensor | None] | None = None,
    masks: Sequence[Tensor | None] | None = None,
) -> list[Tensor]:
    """Makes a training forward of a SyncBatchNorm for all devices, and one change of statistics."""
    options, state = module.options(), module.state
    refuse_tracing(state, None, devices=2)
    zs = residuals if isinstance(residuals, (list, tuple)) else ()  # else refused below
    check_transforms(
        state,
        [
            *(("weight", module.weight), ("bias", module.bias)),
            *((f"inputs[{k}]", x) for k, x in enumerate(xs)),
            *((f"residual[{k}]", z) for k, z in enumerate(zs)),
        ],
    )
    peers = state.peers(options)
    none = [None] * len(xs)
    masks = none if masks is None else masks
    given = xs, residuals, masks
    xs, residuals, masks = map(_plain, given)
    inputs = [t for t in (xs, masks) if isinstance(t, (list, tuple))]  # else refused below
    segment = recomputation.segment(
        state, options, residuals is not None, *itertools.chain(*inputs)
    )
    residuals = none if residuals is None else residuals
    again = segment is not None and segment.kept is not None
    try:
        check_options(options)
        statistics = tuple(map(plain, module._tracked()))
        shared = dict(zip((*RUNNING, "weight", "bias"), (*statistics, *module._affine())))
        check_plain(peers is None, **shared)
        check_counter(options.momentum, *statistics)
        if options.statistics != "reproducible":
            raise ValueError(
                f"statistics: got {options.statistics!r} for a list of inputs, expected "
                "'reproducible', which does not depend on the number of devices"
            )
        if options.writes_over_input:
            raise ValueError("inplace: got True for a list of inputs, expected False")
        ranks = 1 if peers is None else peers.ranks
        _check_inputs(module, xs, residuals, masks, ranks)
        state.move(xs[0].device)
    except Exception as error:
        if not again:
            _tell(module, error, xs[0] if xs else None)
        raise
    masks = [None if mask is None else mask.contiguous() for mask in masks]
    weight, bias = map(plain, module._affine())
    step = (statistics, options, state, peers, segment)
    ys = apply_step(xs, weight, bias, residuals, masks, *step)
    ys = [ys] if len(xs) == 1 else ys
    if not again:
        state.had_list = True
    own = *module._tracked()[:2], *module._affine()
    return [like_operators(*each, *own) for each in zip(ys, *(t or none for t in given))]


def forward(
    module,
    xs: Sequence[Tensor],
    residuals: Sequence[Tensor | None] | None = None,
    masks: Sequence[Tensor | None] | None = None,
) -> list[Tensor]:
    """Calls a SyncBatchNorm with a list of inputs."""
    if not module.training:
        _check_some(xs)
        none = [None] * len(xs)
        residuals, masks = (none if t is None else t for t in (residuals, masks))
        _check_list("residual", residuals, xs)
        _check_list("mask", masks, xs)
        return [module(*each) for each in zip(xs, residuals, masks)]
    if inside():
        raise RuntimeError(
            f"{module.state.name}: got a list of inputs inside SelfDataParallel, expected the one "
            "tensor of this device"
        )
    return train_on_devices(module, xs, residuals, masks)


def check_alone(module) -> None:
    """Refuses a training call for one device's samples where the statistics are meant for all."""
    if module.state.had_list and torch._C._current_graph_task_id() != -1:
        raise RuntimeError(
            f"{module.state.name}: got one device's samples during a backward pass, expected those "
            "of all devices; activation checkpointing around a synchronized layer does not work "
            "where a process has several devices or shares"
        )
    if vars(module).get("_is_replica"):
        raise RuntimeError(
            f"{module.state.name}: got a call of one replica alone, as torch.nn.DataParallel "
            "makes, whose replicas cannot exchange statistics; expected "
            "syncbn.parallel.SelfDataParallel"
        )
    module.state.had_list = False


def _tell(module, error: BaseException, x: object) -> None:
    parameter = module.weight if module.running_mean is None else module.running_mean
    tell(error, module.state, x, parameter, module.options())


def give_up(calls: Iterable[tuple], error: BaseException) -> None:
    """Tells the other processes, once per group, that this one does not come to the exchange.

    calls: layers at which devices of this process wait, each with such a device's input.
    """
    # The error of the device is the one to raise, whatever becomes of this.
    with contextlib.suppress(Exception):
        groups = {module.state.peers(module.options()): (module, x) for module, x in calls}
        for module, x in groups.values():
            _tell(module, error, x)
