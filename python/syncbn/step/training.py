# SPDX-License-Identifier: Apache-2.0
"""One training step of a layer: begin, the exchange, finish, for each direction. It has K inputs,
one for each device of this process; mostly K is 1. The order of a direction is told here, and for
the passes in src/step/step.cpp."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..exchange import agreement
from ..exchange.call import (
    COMES,
    WANTS_SUMS,
    WANTS_X,
    Backward,
    Call,
    Peers,
    Refused,
    explained,
    ranged,
)
from ..exchange.host import engine_of, transport_of
from ..exchange.transport import Transport
from ..operators import (
    IN_PLACE,
    MESSAGE,
    NOTED,
    OWN,
    activation_mask_of,
    info_of,
    ops,
    without_modes,
)
from . import layer_state
from .layer_state import LayerState
from .options import Form, Options, values_per_channel
from .recomputation import Segment
from .surroundings import check_not_batched, fits, fitting, like, recorded

# Without OpOverload.__call__, which hands all arguments on.
_forward_begin = ops.forward_begin.default._op
_forward_finish = ops.forward_finish.default._op
_backward_begin = ops.backward_begin.default._op
_backward_finish = ops.backward_finish.default._op


class Step(NamedTuple):
    """What backward knows of a training step besides tensors.

    made: the call's number (None where it is not known), channels and dtype. backward: who takes
    part in it. bias_dtype: None without a bias. needs: whether this rank wants the gradients of any
    x, of weight, of bias and of any residual. lead: the input that speaks for all in headers.
    """

    state: LayerState
    options: Options
    form: Form
    peers: Peers | None
    made: tuple[int | None, int, torch.dtype]
    backward: Backward
    bias_dtype: torch.dtype | None
    needs: Sequence[bool]
    lead: int = 0

    @property
    def ranks(self) -> int:
        return 1 if self.peers is None else self.peers.ranks

    @property
    def exchanges(self) -> bool:
        """Whether backward takes an exchange."""
        return self.needs[0] if self.peers is None else self.backward.x or self.backward.sums

    def transport(self, x: Tensor) -> Transport:
        """Gives the transport of backward's exchange."""
        return transport_of(self.peers if self.exchanges else None, x.device)

    def call(self, direction: str) -> Call:
        """That direction of the call, as errors name it."""
        state, (number, channels, dtype) = self.state, self.made
        return Call(state.name, number, direction, channels, dtype, self.options)


class Given(NamedTuple):
    """What forward is given besides samples and parameters.

    running: mean, variance and number of batches, each may be None; they lie where the first x
    does. takes_part: this rank's word about backward. segment: the checkpointed segments around the
    call, if any. checked: that the arguments were; else what the operators refuse is Refused, and
    nothing has happened.
    """

    running: tuple[Tensor | None, Tensor | None, Tensor | None]
    options: Options
    form: Form
    state: LayerState
    peers: Peers | None
    takes_part: int
    segment: Segment | None = None
    checked: bool = True


def transport_in(segment: Segment | None, peers: Peers | None, x: Tensor) -> Transport:
    """Gives a forward's transport; the second run of a checkpointed segment exchanges nothing."""
    again = segment is not None and segment.kept is not None
    return transport_of(None if again else peers, x.device)


def has_samples(x: Tensor, mask: Tensor | None) -> bool:
    return x.numel() > 0 and (mask is None or bool(mask.any()))


def _beside(x: Tensor, *tensors: Tensor | None) -> Sequence[Tensor | None]:
    """Gives the tensors on x's device."""
    return [None if t is None else t.to(x.device) for t in tensors]


def _placed(xs: Sequence[Tensor], *tensors: Tensor | None) -> Iterable[Sequence[Tensor | None]]:
    """Gives the tensors, for each x on its device."""
    return (tensors,) if len(xs) == 1 else (_beside(x, *tensors) for x in xs)


def leave(
    error: BaseException,
    state: LayerState,
    options: Options,
    peers: Peers | None,
    x: Tensor,
    segment: Segment | None = None,
) -> None:
    """Tells the others after an error in a forward what they cannot see."""
    if isinstance(error, Refused):
        return
    with without_modes():
        call = state.call_of(x, options)
    transport_in(segment, peers, x).leave(error, call)


def forward(
    given: Given,
    needs: Sequence[bool],
    xs: Sequence[Tensor],
    weight: Tensor | None,
    bias: Tensor | None,
    residuals: Sequence[Tensor | None],
    masks: Sequence[Tensor | None],
) -> tuple[Step, Sequence[Tensor], list]:
    """Gives what backward will know; K y; and the tensors that backward takes: weight, bias, and of
    each input x, what operators.saved_of() describes, activation mask and mask. Running statistics
    and the layer's counters are updated. needs: as Step has it. After an error the caller calls
    leave()."""
    (mean, var, tracked), options, form, state, peers, word, segment, checked = given
    kind, mode, in_place, _, tag = form
    kept = None if segment is None else segment.kept
    transport = transport_in(segment, peers, xs[0])
    several, has_residual = len(xs) > 1, residuals[0] is not None
    lead = 0
    if several:  # the first with samples: autocast may have given one without another dtype
        lead = next((k for k, own in enumerate(zip(xs, masks)) if has_samples(*own)), 0)
    x = xs[lead]
    if kept is None and peers is not None and peers.group_name != state.group:
        layer_state.compare(state, engine_of(peers), x, options)
    # Of one rank, a call that is refused comes again, checked.
    named = checked or peers is not None
    parts = has_residual | (weight is not None) << 1 | (bias is not None) << 2
    call: Any = state.call_of(x, options, parts) if named else None
    momentum = options.momentum
    averaged: Tensor | None = None  # a number of batches as averaged checkpoints have it
    if tracked is not None and tracked.dtype != torch.int64:
        averaged, tracked = tracked, None
        momentum = ops.cumulative_factor(averaged.item()) if momentum is None else momentum
    numbers = (options.eps, momentum, kind, options.negative_slope, mode)
    own = (xs[0], weight, bias, residuals[0], masks[0], mean, var, tracked, state.call, state.count)
    passes = [(*own, state.number ^ tag, *numbers, word)]
    if several:
        for z, residual, mask in zip(xs[1:], residuals[1:], masks[1:]):
            w, b, counter = _beside(z, weight, bias, state.call)
            own = (z, w, b, residual, mask, None, None, None, counter, None)
            passes.append((*own, *passes[0][10:]))
    if has_residual:
        passes = [_with_fitting_residual(own, transport, call, checked) for own in passes]
    keeps_signs = kind != 0 and has_residual
    if kept is not None:
        outputs = [_room(z, in_place, keeps_signs, kept.saved) for z in xs]
        exchanged: tuple | None = (None, None, None)
        step = kept.step._replace(needs=needs)
    else:
        # An input of another dtype has no samples, and its outputs are replaced below.
        alike = [_as(own, x.dtype) for own in passes] if several else passes
        note = None if mode else state.record
        way = _way(note, peers, mode or several)
        if in_place:
            way = IN_PLACE
        outputs, exchanged = transport.begin(
            _forward_begin, alike, lead, way, call, mode > 0, checked
        )
        if note is not None:
            _tell(note, "forward", peers, x, outputs[lead], exchanged)
        count, shared, number = outputs[0][3:6]
        merged = None if exchanged is None else exchanged[1]
        if merged is not None or count == 1:
            if merged is None and not checked:
                raise Refused
            _check_count(merged, xs, masks)
        backward = transport.backward_of(shared, merged, word, call)
        bias_dtype = None if bias is None else bias.dtype
        made = None if number < 0 else number, x.size(1), x.dtype
        step = Step(state, options, form, peers, made, backward, bias_dtype, needs, lead)
    if exchanged is not None:
        _, merged, beyond = exchanged
        finish = ranged(_forward_finish, call, "map")
        for k, placed in enumerate(_placed(xs, merged, beyond)):
            y, saved, bits = outputs[k][:3]
            if kept is None and xs[k].dtype != x.dtype:
                y, _, bits = _room(xs[k], in_place, keeps_signs, saved)
            y = xs[k] if in_place else y
            outputs[k] = y, saved, bits
            changed = passes[k][:10]
            if kept is not None or k > 0:
                changed = (*changed[:5], *(None,) * 5)
            with without_modes():  # the other ranks finish, whatever a mode would do
                finish(*changed, y, saved, bits, *placed, *numbers, step.ranks)
    if averaged is not None and kept is None:
        with without_modes():
            averaged.add_(info_of(outputs[0][1])[0] > 0)
    if segment is not None and kept is None:
        segment.keep(step, outputs[0][1])
    # Without an activation mask, the activation's sign is computed again, which takes the bias. In
    # place it is y's.
    tensors = [weight, bias if kind != 0 and not has_residual else None]
    ys = []
    for z, (y, saved, bits, *_), mask in zip(xs, outputs, masks):
        ys.append(y)
        tensors += (y if in_place else z, saved, bits, mask)
    return step, ys, tensors


def _way(note: layer_state.Note | None, peers: Peers | None, stops: bool | int) -> int | None:
    """Tells how far a direction with an exchange goes by itself. stops: at the message."""
    if stops:
        return MESSAGE
    return NOTED if note is not None and peers is None else None


def _tell(
    note: layer_state.Note,
    direction: str,
    peers: Peers | None,
    x: Tensor,
    given: Sequence,
    exchanged: tuple | None,
) -> None:
    """Tells syncbn.record the sum over the group, if there is one. given: by begin()."""
    merged, more = (given[-2], None) if exchanged is None else exchanged[1:]
    if merged is not None:
        note(direction, 1 if peers is None else peers.ranks, x.size(1), merged, more)


def _with_fitting_residual(arguments: tuple, transport: Transport, call: Call, checked: bool):
    x, w, b, residual, *others = arguments
    if residual.stride() != x.stride():
        residual = transport.refusing(like, (residual, x), x, call, checked)
    return x, w, b, residual, *others


def _as(arguments: tuple, dtype: torch.dtype) -> tuple:
    """Gives the arguments for an input in that dtype; from another one it has no samples."""
    x, w, b, _, *others = arguments
    return arguments if x.dtype == dtype else (x.to(dtype), w, b, None, *others)


def _room(z: Tensor, in_place: bool, keeps_signs: bool, saved: Tensor) -> tuple:
    """Gives what a forward writes to, and what it saved, on the input's device."""
    with without_modes():  # of checkpointing, which has not seen these operators before
        bits = activation_mask_of(z).zero_() if keeps_signs else None
        return None if in_place else torch.empty_like(z), saved.to(z.device), bits


def _check_count(merged: Tensor | None, xs: Sequence[Tensor], masks) -> None:
    """Refuses one value per channel. merged: None where it is known that there is one."""
    own = sum(map(values_per_channel, xs, masks))
    sizes = [list(z.shape) for z in xs]
    where = f"ranks (input size {sizes[0]} on this one)"
    if len(xs) > 1:
        where = f"devices (input sizes {sizes})"
    agreement.check_count(merged, own, where)


@recorded(lambda step, *_: step.state.name, " backward")
def backward(step: Step, dys: Sequence[Tensor | None], *saved) -> tuple:
    """Gradients of K x, weight, bias and K residuals. saved: what forward() gave for it."""
    try:
        return _backward(step, dys, *saved)
    except BaseException as error:
        call = step.call("backward")
        step.transport(saved[2]).leave(error, call)
        if step.peers is not None or explained(error, call, None) is error:
            raise
        raise explained(error, call, None) from None


def _backward(step: Step, dys, weight, bias, *saved) -> tuple:
    state, options, (kind, mode, _, shares, _), peers, _, awaited, bias_dtype, needs, lead = step
    (needs_x, needs_weight, needs_bias, needs_residual), slope = needs, options.negative_slope
    x, exchanges = saved[4 * lead], step.exchanges
    transport = transport_of(peers if exchanges else None, saved[0].device)
    # Of one rank it is named where an error needs it.
    call: Any = None if peers is None else step.call("backward")
    if awaited.absent:
        agreement.check_present(awaited, peers, call)
    keep = needs_residual and (kind != 0 or any(mask is not None for mask in saved[3::4]))
    # One rank's share is the whole, which comes with dx.
    share = (needs_weight or needs_bias) and (not needs_x if peers is None else shares)
    rest = (keep, weight.dtype if needs_weight else None, bias_dtype if needs_bias else None, share)
    passes, after = [], [weight, bias]
    for k, dy in enumerate(dys):
        z, kept, bits, mask = saved[4 * k : 4 * k + 4]
        if not fits(dy, z):
            dy = torch.zeros_like(z) if dy is None else dy
            named = step.call("backward")
            check_not_batched(named, dy)
            dy = transport.refusing(fitting, (dy, z, peers is None), z, named)
        if len(dys) > 1:
            after = [*_beside(z, weight, bias)]
        passes.append((dy, z, kept, *after, bits, mask, kind, slope, *rest))
    note = None if mode or not exchanges else state.record
    way = _way(note, peers, len(dys) > 1) if exchanges else OWN
    alike = passes if len(dys) == 1 else [_shared(own, x.dtype, own[1] is x) for own in passes]
    begun, exchanged = transport.begin(_backward_begin, alike, lead, way, call)
    if note is not None:
        _tell(note, "backward", peers, x, begun[lead], exchanged)
    if exchanged is None and len(dys) == 1:
        dx, dweight, dbias, u, *_ = begun[0]
        if needs_residual:  # without keep it is dy
            u = u.to(x.dtype) if keep else passes[0][0]
        return dx if needs_x else None, dweight, dbias, u
    xs, dxs, (_, dweight, dbias, *_) = saved[::4], [own[0] for own in begun], begun[lead]
    gradients = [own[0] for own in passes]
    if keep:  # what comes back is there already
        gradients = [own[3].to(z.dtype) for own, z in zip(begun, xs)]
    if exchanged is not None:
        own, merged, more = exchanged
        finish = ranged(_backward_finish, call, "map")
        for k, placed in enumerate(_placed(xs, merged, more)):
            if not exchanges:
                if k != lead or not share:
                    continue
                placed = (None, None)
            elif xs[k].dtype != x.dtype:
                dxs[k] = torch.empty_like(xs[k])
            sums = (dweight, dbias) if k == lead else (None, None)
            sent = own if k == lead and share else None
            _, z, kept, w, b, bits, mask = passes[k][:7]
            through = (w, None, None, mask, 0, 0.0) if keep else (w, b, bits, mask, kind, slope)
            with without_modes():  # as in forward
                finish(
                    *(gradients[k], z, kept, *through, dxs[k], *sums, begun[k][4], sent),
                    *(*placed, step.ranks),
                )
    if lead > 0:  # parameters lie where the first x does
        dweight, dbias = _beside(xs[0], dweight, dbias)
    none = [None] * len(xs)
    return (
        *(dxs if needs_x else none),
        *(dweight, dbias),
        *(gradients if needs_residual else none),
    )


def _shared(arguments: tuple, dtype: torch.dtype, leads: bool) -> tuple:
    """Gives the arguments of one of several inputs, in the dtype of that which leads, and which
    alone brings gradients of weight and bias."""
    dy, z, *others, keep, dweight, dbias, share = arguments
    dtypes = (dweight, dbias) if leads else (None, None)
    return dy.to(dtype), z.to(dtype), *others, keep, *dtypes, share


def takes_part(needs: Sequence[bool], options: Options, segment: Segment | None = None) -> int:
    """This rank's word of the header about backward. needs: as Step has it."""
    if not torch.is_grad_enabled():
        # The first run of a reentrant checkpoint: the second will tell.
        return 0 if segment is None else WANTS_X + COMES
    x, weight, bias, residual = needs
    sums = (weight or bias) and options.affine_grad == "global"
    return x * WANTS_X + sums * WANTS_SUMS + (x or weight or bias or residual) * COMES


def needs_of(
    xs: Sequence[Tensor],
    weight: Tensor | None,
    bias: Tensor | None,
    residuals: Sequence[Tensor | None],
) -> tuple[bool, ...]:
    """Tells whether the gradients of any x, of weight, of bias and of any residual are wanted."""
    needs = [False, False, False, False]
    for k, tensors in enumerate((xs, (weight,), (bias,), residuals)):
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                needs[k] = True
    return tuple(needs)
