# SPDX-License-Identifier: Apache-2.0
"""A layer with the inputs of several devices of one process: a list of them."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import baton
from .exchange import agreement
from .exchange.host import engine_of, transport_of
from .exchange.transport import of_devices, with_places, with_record
from .operators import MAX_RANKS, MESSAGE, OWN, WANTS_SHARE, without_modes
from .step import layer_state, recomputation, second_derivatives, training
from .step.masks import check_mask
from .step.node import apply_step, of_layers, recovered
from .step.options import (
    RUNNING,
    check_arguments,
    check_counter,
    check_in_place,
    check_options,
    check_plain,
    values_per_channel,
)
from .step.surroundings import (
    Streams,
    check_transforms,
    fits,
    is_fake,
    like,
    like_operators,
    plain,
    recorded,
    refuse_tracing,
)
from .step.training import turn_of


def _check_list(name: str, tensors, xs: Sequence[Tensor]) -> None:
    if not isinstance(tensors, (list, tuple)) or len(tensors) != len(xs):
        given = len(tensors) if isinstance(tensors, (list, tuple)) else type(tensors).__name__
        raise ValueError(f"{name}: got {given}, expected a list of {len(xs)}, one per input")


def _plain(tensors):
    return [plain(t) for t in tensors] if isinstance(tensors, (list, tuple)) else tensors


def _has_samples(x: Tensor, mask: Tensor | None) -> bool:
    return x.numel() > 0 and (mask is None or bool(mask.any()))


def _check_some(xs: Sequence[Tensor]) -> None:
    if not xs:
        raise ValueError("inputs: got an empty list, expected one tensor per device")


def _check_inputs(layer, options, xs: Sequence[Tensor], residuals, masks, ranks: int) -> None:
    _check_some(xs)
    if len(xs) * ranks > MAX_RANKS:
        raise ValueError(
            f"inputs: got {len(xs)} devices in each of {ranks} processes, expected at most "
            f"{MAX_RANKS} devices in all"
        )
    _check_list("residual", residuals, xs)
    _check_list("mask", masks, xs)
    of_layer = layer.running_mean, layer.running_var, layer.weight, layer.bias
    compared: set[tuple] = set()  # devices and channels that those were compared with
    for k, x in enumerate(xs):
        if not isinstance(x, Tensor):
            raise ValueError(f"inputs[{k}]: got {type(x).__name__}, expected a tensor")
        if x.device.type != xs[0].device.type:
            raise ValueError(
                f"inputs[{k}]: got a tensor on {x.device}, expected {xs[0].device.type}, as "
                "inputs[0]"
            )
        place = x.device, x.shape[1:2]
        # The parameters lie on the first device and are copied to the others.
        mean, var, weight, bias = [None] * 4 if place in compared else _beside(x, *of_layer)
        compared.add(place)
        try:
            check_arguments(x, mean, var, weight, bias, residuals[k])
            if masks[k] is not None:
                check_mask(masks[k], x, options.writes_over_input)
            check_plain(ranks == 1, input=x, residual=residuals[k], mask=masks[k])
            if options.writes_over_input:
                weight, bias = _beside(x, layer.weight, layer.bias)
                check_in_place(x, weight, bias, residuals[k], options.negative_slope)
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
    memory = {xs[k].untyped_storage().data_ptr() for k in filled}
    if options.writes_over_input and len(memory) < len(filled):
        raise ValueError(
            "inputs: got two in one memory with inplace=True, expected memory of its own for each"
        )


@of_layers
class _BatchNormTrainingOfMany(torch.autograd.Function):
    """Makes one step of K inputs. tensors: K xs, weight, bias, K residuals, K masks. One node for
    all: nodes that wait for each other would deadlock, because one backward() visits the nodes of
    CPU tensors in one thread."""

    @staticmethod
    def forward(ctx, turn, given, *tensors):
        k = len(tensors) // 3
        xs, (weight, bias), others = tensors[:k], tensors[k : k + 2], tensors[k + 2 :]
        residuals, masks = others[:k], others[k:]
        wanted = (any(training.needs_of(*some)) for some in (xs, (weight,), (bias,), residuals))
        inputs = list(map(_Input, xs, residuals, masks))
        ctx.step, ctx.lead, ys, saved = _begin(turn, given, tuple(wanted), inputs, weight, bias)
        if ctx.step.form.in_place:
            ctx.mark_dirty(*ys)
        ctx.save_for_backward(*saved)
        ctx.streams, ctx.turns = Streams(xs), baton.turns()
        ctx.set_materialize_grads(False)
        return tuple(ys)

    @staticmethod
    def backward(ctx, *dys):
        # Before saved tensors are asked for, which may run a checkpointed segment again.
        if baton.inside() or (ctx.turns is not None and not ctx.turns.over):
            baton.refuse_backward(ctx.step.state.find_path)
        saved = ctx.saved_tensors  # once: as checkpointing gives
        ctx.streams.enter((*dys, *saved))
        if ctx.step.form.in_place:
            saved = _recovered(ctx.step, *saved)
        with torch.no_grad():
            results = gradients_of(ctx.step, ctx.lead, dys, *saved)
        ctx.streams.leave(results)
        if torch.is_grad_enabled():  # create_graph=True
            text = "got a second derivative of a list of inputs, expected one input"
            results = second_derivatives.refuse(f"{ctx.step.state.name}: {text}", results)
        return None, None, *results, *(None,) * len(dys)


class _Input(NamedTuple):
    """The tensors that one device brings."""

    x: Tensor
    residual: Tensor | None
    mask: Tensor | None


def _beside(x: Tensor, *tensors: Tensor | None) -> list[Tensor | None]:
    """Gives the tensors on x's device."""
    device = x.device
    return [t if t is None or t.device == device else t.to(device) for t in tensors]


def _recovered(step, weight, bias, *saved) -> list[Tensor | None]:
    """Does for each device what node.recovered() does."""
    tensors = [weight, None]
    for k in range(0, len(saved), 4):
        own = saved[k : k + 4]
        tensors += recovered(step, *_beside(own[0], weight, bias), *own)[2:]
    return tensors


def _given_to(own: _Input, weight, bias, running: tuple, first: bool) -> tuple:
    """Gives what begin takes of a device. What is updated lies where the first x does."""
    x, residual, mask = own
    if residual is not None and residual.stride() != x.stride():
        residual = like(residual, x)
    weight, bias, counters = _beside(x, weight, bias, running[3])
    return x, weight, bias, residual, mask, *(running if first else (None, None, None, counters))


def _begin(turn, given, needs, inputs, weight, bias) -> tuple:
    """Does what training.forward() does: begin K times, one exchange, finish K times. Gives the
    step, the input that speaks for all, K y, and what backward takes: weight, bias, and of each
    input x, what was saved, activation mask and mask."""
    (mean, var, tracked), options, state, peers, word, segment = given
    kept = None if segment is None else segment.kept
    filled = [k for k, own in enumerate(inputs) if _has_samples(own.x, own.mask)]
    # The first with samples: autocast may have given one without another dtype.
    lead = filled[0] if filled else 0
    x = inputs[lead].x
    if kept is None and peers is not None and peers.group_name != state.group:
        layer_state.compare(state, engine_of(peers), x, options)
    averaged = None
    if tracked is not None and tracked.dtype is not torch.int64:
        options = training.averaging(options, tracked)
        averaged, tracked = tracked, None
    form, transport = state.form(options), transport_of(None if kept else peers, x.device)
    running = mean, var, tracked, state.counters
    given_to = [_given_to(own, weight, bias, running, k == 0) for k, own in enumerate(inputs)]
    if kept is None:
        begun = []
        for z, w, b, residual, mask, *others in given_to:
            if z.dtype != x.dtype:  # no samples; its outputs are made below
                z, residual = z.to(x.dtype), None
            own = z, w, b, residual, mask, *others, form.constants, word
            way = MESSAGE if form.gathers else transport.message_way
            begun.append(transport.begin(turn, training.forward_begin, own, way))
        total, records = of_devices([own[5] for own in begun], lead), 0
        if form.gathers:
            if filled:
                total = with_record(total, [begun[k][5] for k in filled], x.dtype)
            total, records = with_places(total, transport), transport.ranks
        merged, rest = transport.exchange(turn, total, None, x.size(1), records)
        where = f"devices (input sizes {[list(own.x.shape) for own in inputs]})"
        own_count = sum(values_per_channel(own.x, own.mask) for own in inputs)
        agreement.check_count(merged, own_count, where)
        outputs, (wanted, number) = [own[:3] for own in begun], begun[0][3:5]
        shared = transport.backward_of(wanted, merged, word, turn)
        made = None if number < 0 else number, x.size(1), x.dtype
        dtype = None if bias is None else bias.dtype
        step = training.Step(state, given.options, form, peers, made, shared, dtype, needs)
    else:
        step, merged, rest = kept.step._replace(needs=needs), None, None
        outputs = [(None, kept.saved.to(own.x.device), None) for own in inputs]
    ys, tensors = [], [weight, bias if form.acts and inputs[0].residual is None else None]
    for k, own in enumerate(given_to):
        z, mask, (y, saved, bits) = own[0], own[4], outputs[k]
        if y is None or z.dtype != x.dtype:
            y, bits = training.room(form, z, own[3] is not None)
        changed = running if k == 0 and kept is None else (None,) * 4
        sums = _beside(z, merged, rest)
        with without_modes():  # the other ranks finish, whatever a mode would do
            written = y, saved, bits, changed, sums, form.constants
            training.forward_finish(*own[:5], *written, step.ranks)
        ys.append(y)
        tensors += (z, saved, bits, mask)
    if kept is None:
        if averaged is not None:
            training.count_batch(averaged, outputs[0][1])
        if segment is not None:
            segment.keep(step, outputs[0][1])
    return step, lead, ys, tensors


@recorded(lambda step, *_: step.state.name, " backward")
def gradients_of(step, lead: int, dys, weight, bias, *saved) -> tuple:
    """Does what training.backward() does: gives K gradients of x, those of weight and bias, and K
    of the residuals."""
    x, form, exchanges, none = saved[4 * lead], step.form, step.exchanges, [None] * len(dys)
    with step.turn(x) as turn:
        transport = transport_of(turn.peers, saved[0].device)
        if step.backward.absent:
            agreement.check_present(step.backward, step.peers, turn.call)
        masked = any(mask is not None for mask in saved[3::4])
        wanted, dtypes = training.asked(step, weight, masked)
        begun, given_to = [], []
        for k, dy in enumerate(dys):
            z, own, bits, mask = saved[4 * k : 4 * k + 4]
            if not fits(dy, z):
                dy = training.gradient_like(turn, dy, z, step.peers is None)
            given_to.append((dy, z, own, *_beside(z, weight, bias), bits, mask))
            # One input alone brings gradients of weight and bias.
            asked = dtypes if k == lead else (None, None)
            alike = dy.to(x.dtype), z.to(x.dtype), *given_to[k][2:], form.constants, wanted, *asked
            way = transport.message_way if exchanges else OWN
            begun.append(transport.begin(turn, training.backward_begin, alike, way))
        _, dweight, dbias, *_ = begun[lead]
        kept = begun[0][3] is not None
        dxs = [own[0] for own in begun]
        gradients = [own[0] for own in given_to]
        if kept:  # what comes back is there already
            gradients = [own[3].to(dy.dtype) for own, dy in zip(begun, gradients)]
        total = of_devices([own[5] for own in begun], lead)
        merged, rest = None, None
        if exchanges:
            merged, rest = transport.exchange(turn, total.clone(), None, x.size(1))
        for k, (_, z, *others) in enumerate(given_to):
            leads = k == lead and wanted & WANTS_SHARE
            if not exchanges and not leads:
                continue
            if exchanges and z.dtype != x.dtype:
                dxs[k] = torch.empty_like(z)
            outputs = dxs[k], *((dweight, dbias) if k == lead else (None, None)), begun[k][4]
            sums = [total if leads else None, *_beside(z, merged, rest)]
            with without_modes():  # as in forward
                after = gradients[k], z, *others, form.constants, kept, outputs, sums
                training.backward_finish(*after, step.ranks)
    if lead > 0:  # parameters lie where the first x does
        dweight, dbias = _beside(saved[0], dweight, dbias)
    needs_x, _, _, needs_residual = step.needs
    return *(dxs if needs_x else none), dweight, dbias, *(gradients if needs_residual else none)


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
    if isinstance(xs, (list, tuple)) and xs and is_fake(xs[0], module.weight):
        raise NotImplementedError(
            f"{state.find_path()}: got a list of inputs without values (on meta, or fake), "
            "expected one tensor"
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
    statistics = tuple(map(plain, module._tracked()))
    weight, bias = map(plain, module._affine())
    x = xs[0] if xs else None
    parts = residuals[0] if zs else None, weight, bias
    parameter = weight if statistics[0] is None else statistics[0]
    with turn_of(state, options, None if again else peers, x, parts, parameter=parameter) as turn:
        check_options(options)
        shared = dict(zip((*RUNNING, "weight", "bias"), (*statistics, weight, bias)))
        check_plain(peers is None, **shared)
        check_counter(options.momentum, *statistics)
        _check_inputs(module, options, xs, residuals, masks, 1 if peers is None else peers.ranks)
        if options.writes_over_input and segment is not None:
            segment.check_in_place(*xs)
        state.move(xs[0].device)
        masks = [None if mask is None else mask.contiguous() for mask in masks]
        if len(xs) == 1:
            tensors = xs[0], weight, bias, residuals[0], masks[0]
            ys = [apply_step(turn, *tensors, statistics, options, state, segment)]
        else:
            needs = training.needs_of(*xs, weight, bias, *residuals)
            wanted = (
                any(needs[: len(xs)]),
                *needs[len(xs) : len(xs) + 2],
                any(needs[len(xs) + 2 :]),
            )
            word = training.takes_part(wanted, options, segment)
            step = training.Given(statistics, options, state, peers, word, segment)
            ys = _BatchNormTrainingOfMany.apply(turn, step, *xs, weight, bias, *residuals, *masks)
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
    if baton.inside():
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
