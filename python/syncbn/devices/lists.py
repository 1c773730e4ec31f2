"""The layer with the inputs of several devices of one process: one autograd node for all of them.

K nodes that wait for each other would deadlock: one backward() visits the nodes of CPU tensors in
one thread.
"""

import contextlib
import itertools
import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..exchange import agreement, frames, merging
from ..operators import HEADER_WORDS, message_words, ops
from ..step import paths, recomputation
from ..step.masks import check_mask
from ..step.modes import check_transforms, outside_transforms, recorded
from ..step.options import check_arguments, check_counter, check_options, values_per_channel
from ..step.training import Step, like, takes_part
from . import baton

#: The digits of a message have room for this many (docs/numerics.md).
MAX_DEVICES = 2048

# Layers whose last training call had a list of inputs.
_called_with_lists: weakref.WeakSet = weakref.WeakSet()


def _sum(messages: Sequence[Tensor], lead: int) -> Tensor:
    """One message for the process, which speaks in the header as one rank: the elements of all
    devices, the rest from a device that has samples, if any has."""
    total = messages[0].clone()
    for message in messages[1:]:
        total += message.to(total.device)
    total[1:HEADER_WORDS] = messages[lead][1:HEADER_WORDS].to(total.device)
    return total


def _on(device: torch.device, *tensors: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else t.to(device) for t in tensors]


class _BatchNormDevices(torch.autograd.Function):
    """ys, then mean, var (float64, biased) and info (count, fingerprint) of a training step.

    masks: of all devices. tensors: the inputs of all devices, then their residuals, if there are
    any.
    """

    @staticmethod
    def forward(ctx, weight, bias, options, state, peers, word, segment, masks, *tensors):
        devices = len(masks)
        xs, residuals = tensors[:devices], tensors[devices:]
        channels, frame = xs[0].shape[1], frames.frame_words(peers, xs[0].device)
        # A device without samples sends zeros in the format of the others: autocast may have given
        # it another dtype.
        lead = next((k for k, (x, m) in enumerate(zip(xs, masks)) if _has_samples(x, m)), 0)
        dtype = xs[lead].dtype
        if segment is not None and segment.kept is not None:
            ctx.step, (message, merged, rest) = segment.kept.step, segment.kept.words
        else:
            if peers is not None and peers.group_name != state.group:
                paths.compare(state, peers, xs[lead], options)
            number = options.identity(state.number, len(residuals) > 0)
            where = state.call_of(xs[lead], options)
            messages = [
                ops.local_moments(
                    x.to(dtype),
                    number,
                    *_on(x.device, state.call),
                    options.eps,
                    frame,
                    m,
                    word,
                )
                for x, m in zip(xs, masks)
            ]
            message = _sum(messages, lead)
            own = sum(map(values_per_channel, xs, masks))
            merged, rest = merging.exchange(message, channels, peers, where)
            sizes = f"devices (input sizes {[list(x.shape) for x in xs]})"
            agreement.check_count(merged, own, sizes)
            backward = agreement.backward_of(merged, word, peers, where)
            bias_dtype = None if bias is None else bias.dtype
            ctx.step = Step(state, options, peers, where.backward(), backward, bias_dtype)
            if segment is not None:
                words = merging.trimmed(message, merged, rest, message_words(xs[lead], masks[lead]))
                message, merged, rest = segment.keep(ctx.step, words)
        results = [
            ops.normalize(
                x,
                *_on(x.device, message, merged, rest, weight, bias),
                like(z, x) if z is not None else None,
                options.eps,
                ctx.step.ranks,
                options.activation_kind,
                options.negative_slope,
                m,
            )
            for x, z, m in zip(xs, residuals or [None] * devices, masks)
        ]
        ys, means, variances, rstds, infos, bits = zip(*results)
        again = options.activation != "none" and not residuals
        ctx.save_for_backward(
            weight, bias if again else None, *xs, *means, *rstds, *infos, *bits, *masks
        )
        ctx.mark_non_differentiable(means[0], variances[0], infos[0])
        ctx.set_materialize_grads(False)
        ctx.devices = devices
        ctx.lead = lead
        return *ys, means[0], variances[0], infos[0]

    @staticmethod
    @once_differentiable
    @recorded(lambda ctx, *_: ctx.step.state.name, " backward")
    def backward(ctx, *gradients):
        devices, step, options = ctx.devices, ctx.step, ctx.step.options
        agreement.check_present(step.backward, step.peers, step.call)
        weight, bias, *saved = ctx.saved_tensors
        per_device = (saved[i * devices :][:devices] for i in range(6))
        xs, means, rstds, infos, bits, masks = per_device
        dys = [torch.zeros_like(x) if dy is None else like(dy, x) for x, dy in zip(xs, gradients)]
        needs_weight, needs_bias = ctx.needs_input_grad[:2]
        needs_x = ctx.needs_input_grad[8 : 8 + devices]
        needs_residual = ctx.needs_input_grad[8 + devices :]
        dtype, channels = xs[ctx.lead].dtype, xs[0].shape[1]
        frame = frames.frame_words(step.peers, xs[0].device)
        activation = (options.activation_kind, options.negative_slope)
        masked = any(mask is not None for mask in masks)
        keep = any(needs_residual) and (options.activation != "none" or masked)
        messages, us = zip(
            *(
                ops.local_gradients(
                    dy.to(dtype),
                    x.to(dtype),
                    mean,
                    rstd,
                    info,
                    *_on(x.device, weight, bias, b),
                    *activation,
                    keep,
                    frame,
                    m,
                )
                for dy, x, mean, rstd, info, b, m in zip(dys, xs, means, rstds, infos, bits, masks)
            )
        )
        if keep:  # what comes back is there already
            dys, bits = [u.to(x.dtype) for u, x in zip(us, xs)], [None] * devices
            activation, bias = (0, 0.0), None
        message = _sum(messages, ctx.lead)
        dtypes = (weight.dtype if needs_weight else None, step.bias_dtype if needs_bias else None)
        shares = options.affine_grad == "share"
        dxs = [None] * devices
        dweight = dbias = None
        if shares and (needs_weight or needs_bias):
            # The process's share, from the exact sums of its devices.
            empty = xs[0].new_empty((0, channels), dtype=dtype)
            dweight, dbias = ops.affine_gradient_shares(message, empty, means[0], rstds[0], *dtypes)
        if step.exchanges:
            merged, rest = merging.exchange(message, channels, step.peers, step.call)
            for k, (dy, x) in enumerate(zip(dys, xs)):
                wanted = (None, None) if shares or k > 0 else dtypes
                dxs[k], *sums = ops.input_gradient(
                    dy,
                    x,
                    *_on(x.device, merged, rest),
                    means[k],
                    rstds[k],
                    infos[k],
                    *_on(x.device, weight, bias, bits[k]),
                    *activation,
                    *wanted,
                    step.ranks,
                    masks[k],
                )
                if not shares and k == 0:
                    dweight, dbias = sums
        return (
            dweight if needs_weight else None,
            dbias if needs_bias else None,
            *(None,) * 6,
            *(dx if needed else None for dx, needed in zip(dxs, needs_x)),
            *(dy if needed else None for dy, needed in zip(dys, needs_residual)),
        )


def _has_samples(x: Tensor, mask: Tensor | None) -> bool:
    return x.numel() > 0 and (mask is None or bool(mask.any()))


def _check_list(name: str, tensors, xs: Sequence[Tensor]) -> None:
    if not isinstance(tensors, (list, tuple)) or len(tensors) != len(xs):
        given = len(tensors) if isinstance(tensors, (list, tuple)) else type(tensors).__name__
        raise ValueError(f"{name}: got {given}, expected a list of {len(xs)}, one per input")


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
            own = _on(x.device, *tensors)
            check_arguments(x, *own, residuals[k])  # type: ignore[arg-type, call-arg]  # own: four
            if masks[k] is not None:
                check_mask(masks[k], x)
        except ValueError as error:
            raise ValueError(f"inputs[{k}], of device {k}: {error}") from None
        if x.shape[1] != xs[0].shape[1]:
            raise ValueError(
                f"inputs[{k}]: got {x.shape[1]} channels, expected {xs[0].shape[1]}, those of "
                "inputs[0]"
            )
    filled = [k for k, x in enumerate(xs) if _has_samples(x, masks[k])]
    for k in filled:
        if xs[k].dtype != xs[filled[0]].dtype:
            raise ValueError(
                f"inputs[{k}]: got {xs[k].dtype}, expected {xs[filled[0]].dtype}, the dtype of "
                f"inputs[{filled[0]}]"
            )


@recorded(lambda module, *_: module.state.name)
def train_step(
    module,
    xs: Sequence[Tensor],
    residuals: Sequence[Tensor | None] | None = None,
    masks: Sequence[Tensor | None] | None = None,
) -> list[Tensor]:
    """One training forward of a SyncBatchNorm for all devices; running statistics change once."""
    options, state = module.options(), module.state
    peers = state.peers(options)
    none = [None] * len(xs)
    masks = none if masks is None else masks
    given = [t for t in (xs, masks) if isinstance(t, (list, tuple))]  # else refused below
    segment = recomputation.segment(state, options, residuals is not None, *itertools.chain(*given))
    again = segment is not None and segment.kept is not None
    try:
        check_options(options)
        statistics = module._tracked()
        check_counter(options.momentum, *statistics)
        if options.statistics != "reproducible":
            raise ValueError(
                f"statistics: got {options.statistics!r} for a list of inputs, expected "
                "'reproducible', which does not depend on the number of devices"
            )
        if options.writes_over_input:
            raise ValueError("inplace: got True for a list of inputs, expected False")
        ranks = 1 if peers is None else peers.ranks
        _check_inputs(module, xs, none if residuals is None else residuals, masks, ranks)
        tensors: dict[str, Tensor | None] = {f"inputs[{k}]": x for k, x in enumerate(xs)}
        tensors |= {f"residual[{k}]": z for k, z in enumerate(residuals or ())}
        check_transforms(state, weight=module.weight, bias=module.bias, **tensors)
        state.move(xs[0].device)
    except Exception as error:
        if not again:
            with outside_transforms():
                _reject(peers, module, error, xs[0] if xs else None)
        raise
    masks = tuple(None if mask is None else mask.contiguous() for mask in masks)
    parameters = (module.weight, module.bias)
    word = takes_part(xs, parameters, residuals or (), options, segment)
    *ys, mean, var, info = _BatchNormDevices.apply(
        module.weight,
        module.bias,
        options,
        state,
        peers,
        word,
        segment,
        masks,
        *xs,
        *(residuals or ()),
    )
    if again:
        return ys
    ops.update_running_statistics(
        *statistics,
        state.call,
        mean,
        var,
        info,
        options.momentum,
    )
    state.note(info)
    _called_with_lists.add(module)
    return ys


def forward(
    module,
    xs: Sequence[Tensor],
    residuals: Sequence[Tensor | None] | None = None,
    masks: Sequence[Tensor | None] | None = None,
) -> list[Tensor]:
    """The list form of a SyncBatchNorm."""
    if not module.training:
        _check_some(xs)
        none = [None] * len(xs)
        residuals, masks = (none if t is None else t for t in (residuals, masks))
        _check_list("residual", residuals, xs)
        _check_list("mask", masks, xs)
        return [module(*each) for each in zip(xs, residuals, masks)]
    if baton.inside():
        raise RuntimeError(
            f"{module.state.name}: got a list of inputs inside SelfDataParallel, expected the one "
            "tensor of this device"
        )
    return train_step(module, xs, residuals, masks)


def check_alone(module) -> None:
    """Refuses a training call for one device's samples where the statistics are meant for all."""
    if getattr(module, "_is_replica", False):
        raise RuntimeError(
            f"{module.state.name}: got a call of one replica alone, as torch.nn.DataParallel "
            "makes, whose replicas cannot exchange statistics; expected "
            "syncbn.parallel.SelfDataParallel"
        )
    if module in _called_with_lists:
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                f"{module.state.name}: got one device's samples during a backward pass, expected "
                "those of all devices; activation checkpointing around a synchronized layer does "
                "not work inside syncbn.parallel.SelfDataParallel"
            )
        _called_with_lists.discard(module)


def _reject(peers, module, error: BaseException, x: object) -> None:
    parameter = module.weight if module.running_mean is None else module.running_mean
    state = module.state
    peers = paths.way(state, peers)
    call = state.call_of(state.call, module.options())
    agreement.reject(peers, call, error, x=x, parameter=parameter, counter=state.call)


def give_up(calls: Iterable[tuple], error: BaseException) -> None:
    """Tells the other processes, once per group, that this one does not come to the exchange.

    calls: layers at which devices of this process wait, each with such a device's input.
    """
    # The error of the device is the one to raise, whatever becomes of this.
    with contextlib.suppress(Exception):
        groups = {module.state.peers(module.options()): (module, x) for module, x in calls}
        for peers, (module, x) in groups.items():
            _reject(peers, module, error, x)
