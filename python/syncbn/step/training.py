# SPDX-License-Identifier: Apache-2.0
"""One training step of a layer: begin, the exchange, finish, for each direction. It has K inputs,
one for each device of this process; mostly K is 1. The order of a direction is told here, and for
the passes in src/step/step.cpp."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.utils._python_dispatch import _disable_current_modes

from ..exchange import agreement
from ..exchange.agreement import COMES, WANTS_SUMS, WANTS_X, Backward
from ..exchange.attempt import Refused
from ..exchange.call import Call
from ..exchange.groups import Peers
from ..exchange.times import timed
from ..exchange.transport import Transport
from ..exchange.transports import transport_of
from ..operators import IN_PLACE, MESSAGE, OWN, activation_mask_of, info_of, ops
from . import layer_paths
from .layer_state import LayerState
from .options import Options, check_plain, check_strided, is_strided, numbers_of, values_per_channel
from .profiling import recorded
from .recomputation import Segment
from .transforms import check_not_batched, in_transform

_forward_begin = ops.forward_begin.default
_forward_finish = ops.forward_finish.default
_backward_begin = ops.backward_begin.default
_backward_finish = ops.backward_finish.default


class Step(NamedTuple):
    """What backward knows of a training step besides tensors.

    call: of the forward, as errors name it. backward: who takes part in it. bias_dtype: None
    without a bias. needs: whether this rank wants the gradients of any x, of weight, of bias and of
    any residual. lead: the input that speaks for all in headers.
    """

    state: LayerState
    options: Options
    peers: Peers | None
    call: Call
    backward: Backward
    bias_dtype: torch.dtype | None
    needs: tuple[bool, ...] = (False,) * 4
    lead: int = 0

    @property
    def ranks(self) -> int:
        return 1 if self.peers is None else self.peers.ranks

    @property
    def exchanges(self) -> bool:
        """Whether backward takes an exchange."""
        return self.needs[0] if self.peers is None else self.backward.x or self.backward.sums

    def transport(self, x: Tensor) -> Transport:
        """Of backward's exchange."""
        return transport_of(self.peers if self.exchanges else None, x.device)


class Inputs(NamedTuple):
    """What forward is given.

    xs, residuals, masks: K each. running: mean, variance and number of batches, each may be None;
    they lie where the first x does. takes_part: this rank's word about backward. segment: the
    checkpointed segments around the call, if any. checked: that the arguments were; else what the
    operators refuse is Refused, and nothing has happened.
    """

    xs: Sequence[Tensor]
    weight: Tensor | None
    bias: Tensor | None
    residuals: Sequence[Tensor | None]
    masks: Sequence[Tensor | None]
    running: tuple[Tensor | None, Tensor | None, Tensor | None]
    options: Options
    state: LayerState
    peers: Peers | None
    takes_part: int
    segment: Segment | None = None
    checked: bool = True

    def transport(self) -> Transport:
        return transport_in(self.segment, self.peers, self.xs[0])


def transport_in(segment: Segment | None, peers: Peers | None, x: Tensor) -> Transport:
    """Of a forward's exchange. The second run of a checkpointed segment has none."""
    again = segment is not None and segment.kept is not None
    return transport_of(None if again else peers, x.device)


def has_samples(x: Tensor, mask: Tensor | None) -> bool:
    return x.numel() > 0 and (mask is None or bool(mask.any()))


def _lead(xs: Sequence[Tensor], masks: Sequence[Tensor | None]) -> int:
    """The first input with samples: autocast may have given one without another dtype."""
    return next((k for k, (x, m) in enumerate(zip(xs, masks)) if has_samples(x, m)), 0)


def _placed(xs: Sequence[Tensor], *tensors: Tensor | None) -> Iterable[Sequence[Tensor | None]]:
    """The tensors, for each x on its device."""
    if len(xs) == 1:
        return (tensors,)
    return ([None if t is None else t.to(x.device) for t in tensors] for x in xs)


def like(tensor: Tensor, x: Tensor) -> Tensor:
    """The tensor in x's layout."""
    check_strided("gradient", tensor)
    if tensor.stride() == x.stride() and tensor.dtype == x.dtype:
        return tensor
    if tensor.shape != x.shape or tensor.dtype != x.dtype:  # x.data is another since forward
        raise ValueError(
            f"input: got {x.dtype} of shape {tuple(x.shape)}, expected {tensor.dtype} of shape "
            f"{tuple(tensor.shape)} still"
        )
    return torch.empty_like(x).copy_(tensor)


def leave(error: BaseException, state: LayerState, options: Options, transport, x: Tensor) -> None:
    """After an error in a forward: tells the others what they cannot see. transport: makes it."""
    if isinstance(error, Refused):
        return
    with _disable_current_modes():
        call = state.call_of(x, options)
    transport().leave(error, call)


def forward(given: Inputs) -> tuple[Step, list[Tensor], list]:
    """What backward will know; K y; and the tensors that backward takes: weight, bias, and of each
    input x, what operators.saved_of() describes, activation mask and mask. Running statistics and
    the layer's counters are updated. After an error the caller calls leave()."""
    xs, weight, bias, residuals, masks, running, options, state, peers, word, *_ = given
    segment, checked = given.segment, given.checked
    transport = transport_in(segment, peers, xs[0])
    kept = None if segment is None else segment.kept
    lead, in_place = 0 if len(xs) == 1 else _lead(xs, masks), options.writes_over_input
    x, (kind, mode) = xs[lead], numbers_of(*options)
    if kept is None and peers is not None and peers.group_name != state.group:
        layer_paths.compare(state, peers, x, options)
    call = state.call_of(x, options)
    mean, var, tracked, momentum = *running, options.momentum
    averaged: Tensor | None = None  # a number of batches as averaged checkpoints have it
    if tracked is not None and tracked.is_floating_point():
        averaged, tracked = tracked, None
        momentum = ops.cumulative_factor(averaged.item()) if momentum is None else momentum
    updates = (mean, var, tracked, state.call, state.count)
    identity = options.identity(state.number, residuals[0] is not None)
    numbers = (options.eps, momentum, kind, options.negative_slope, mode)
    keeps_signs = kind != 0 and residuals[0] is not None
    # What begin and finish take of each input.
    arguments = [(x, weight, bias, residuals[0], masks[0], *updates)]
    if len(xs) > 1:
        none = (None, None, None)
        arguments = [
            (z, w, b, residual, mask, *(updates if k == 0 else (*none, counter, None)))
            for k, (z, (w, b, counter), residual, mask) in enumerate(
                zip(xs, _placed(xs, weight, bias, state.call), residuals, masks)
            )
        ]
    if residuals[0] is not None:
        arguments = [_with_fitting_residual(a, transport, call, checked) for a in arguments]
    exchanged: tuple | None
    if kept is not None:
        exchanged, step = (None, None, None), kept.step
        outputs = [_room(z, in_place, keeps_signs, kept.saved) for z in xs]
    else:
        # An input of another dtype has no samples, and its outputs are replaced below.
        alike = arguments if len(xs) == 1 else [_as(a, x.dtype) for a in arguments]
        passes = [(*a, identity, *numbers, word) for a in alike]
        way = IN_PLACE if in_place else MESSAGE if mode or len(xs) > 1 else None
        outputs, exchanged = transport.begin(
            _forward_begin, passes, lead, way, call, mode > 0, checked
        )
        *_, count, shared = outputs[0]
        merged = None if exchanged is None else exchanged[1]
        if merged is not None or count == 1:
            if merged is None and not checked:
                raise Refused
            _check_count(merged, xs, masks)
        backward = transport.backward_of(shared, merged, word, call)
        bias_dtype = None if bias is None else bias.dtype
        step = Step(state, options, peers, call, backward, bias_dtype, (False,) * 4, lead)
    if exchanged is not None:
        _, merged, more = exchanged
        finish = timed(_forward_finish, state.times, "normalized")
        for k, placed in enumerate(_placed(xs, merged, more)):
            y, saved, bits = outputs[k][:3]
            if kept is None and xs[k].dtype != x.dtype:
                y, _, bits = _room(xs[k], in_place, keeps_signs, saved)
            y = xs[k] if in_place else y
            outputs[k] = y, saved, bits
            changed = arguments[k]
            if kept is not None or k > 0:
                changed = (*changed[:5], *(None,) * 5)
            with _disable_current_modes():  # the other ranks finish, whatever a mode would do
                finish(*changed, y, saved, bits, *placed, *numbers, step.ranks)
    if averaged is not None and kept is None:
        with _disable_current_modes():
            averaged.add_(info_of(outputs[0][1])[0] > 0)
    if segment is not None and kept is None:
        segment.keep(step, outputs[0][1])
    # Without an activation mask, the activation's sign is computed again, which takes the bias. In
    # place it is y's.
    again = kind != 0 and residuals[0] is None
    tensors = [weight, bias if again else None]
    for z, (y, saved, bits, *_), mask in zip(xs, outputs, masks):
        tensors += (y if in_place else z, saved, bits, mask)
    return step, [own[0] for own in outputs], tensors


def _with_fitting_residual(arguments: tuple, transport: Transport, call: Call, checked: bool):
    x, w, b, residual, *others = arguments
    if residual.stride() != x.stride():
        residual = transport.refusing(like, (residual, x), x, call, checked)
    return x, w, b, residual, *others


def _as(arguments: tuple, dtype: torch.dtype) -> tuple:
    """The arguments for an input in that dtype; from another one it has no samples."""
    x, w, b, _, *others = arguments
    return arguments if x.dtype == dtype else (x.to(dtype), w, b, None, *others)


def _room(z: Tensor, in_place: bool, keeps_signs: bool, saved: Tensor) -> tuple:
    """What a forward writes to, and what it saved, on the input's device."""
    with _disable_current_modes():  # of checkpointing, which has not seen these operators before
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
        return _backward(step, step.transport(saved[2]), dys, *saved)
    except BaseException as error:
        step.transport(saved[2]).leave(error, step.call.backward())
        raise


def _backward(step: Step, transport: Transport, dys, weight, bias, *saved) -> tuple:
    options, lead, call = step.options, step.lead, step.call.backward()
    xs, x = saved[::4], saved[4 * lead]
    (kind, _), slope = numbers_of(*options), options.negative_slope
    needs_x, needs_weight, needs_bias, needs_residual = step.needs
    if step.backward.absent:
        agreement.check_present(step.backward, step.peers, call)
    dtypes = (weight.dtype if needs_weight else None, step.bias_dtype if needs_bias else None)
    keep = needs_residual and (kind != 0 or any(mask is not None for mask in saved[3::4]))
    # One rank's share is the whole, which comes with dx.
    share = options.affine_grad == "share" if step.peers is not None else not needs_x
    share = share and (needs_weight or needs_bias)
    gradients, through, passes = [], [], []
    for k, (w, b) in enumerate(_placed(xs, weight, bias)):
        z, kept, bits, mask = saved[4 * k : 4 * k + 4]
        dy = dys[k]
        if not (type(dy) is Tensor and is_strided(dy) and dy.stride() == z.stride()) or (
            dy.dtype != z.dtype or is_legacy_batchedtensor(dy) or in_transform()
        ):
            dy = torch.zeros_like(z) if dy is None else dy
            check_not_batched(call, dy)
            dy = transport.refusing(_fitting, (dy, z, step.peers is None), z, call)
        gradients.append(dy)
        after = (w, b, bits, mask, kind, slope)
        through.append(after)
        if k == lead:
            passes.append((dy, z, kept, *after, keep, *dtypes, share))
        else:
            passes.append((dy.to(x.dtype), z.to(x.dtype), kept, *after, keep, None, None, share))
    way = OWN if not step.exchanges else MESSAGE if len(xs) > 1 else None
    begun, exchanged = transport.begin(_backward_begin, passes, lead, way, call)
    if keep:  # what comes back is there already
        gradients = [own[3].to(z.dtype) for own, z in zip(begun, xs)]
        through = [(w, None, None, mask, 0, 0.0) for w, _, _, mask, *_ in through]
    dxs = [own[0] for own in begun]
    _, dweight, dbias, *_ = begun[lead]
    if exchanged is not None:
        own, merged, more = exchanged
        finish = timed(_backward_finish, step.state.times, "normalized")
        for k, placed in enumerate(_placed(xs, merged, more)):
            if not step.exchanges:
                if k != lead or not share:
                    continue
                placed = (None, None)
            elif xs[k].dtype != x.dtype:
                dxs[k] = torch.empty_like(xs[k])
            sums = (dweight, dbias) if k == lead else (None, None)
            sent = own if k == lead and share else None
            z, kept = xs[k], saved[4 * k + 1]
            with _disable_current_modes():  # as in forward
                finish(
                    *(gradients[k], z, kept, *through[k], dxs[k], *sums, begun[k][4], sent),
                    *(*placed, step.ranks),
                )
    if lead > 0:  # parameters lie where the first x does
        ((dweight, dbias), *_) = _placed(xs, dweight, dbias)
    none = [None] * len(xs)
    residuals = gradients if needs_residual else none
    return (*(dxs if needs_x else none), dweight, dbias, *residuals)


def _fitting(dy: Tensor, x: Tensor, alone: bool) -> Tensor:
    check_plain(alone, gradient=dy)
    return like(dy, x)


def takes_part(
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor | None],
    residuals: Sequence[Tensor | None],
    options: Options,
    segment: Segment | None = None,
) -> int:
    """This rank's word of the header about backward."""
    if not torch.is_grad_enabled():
        # The first run of a reentrant checkpoint: the second will tell.
        return 0 if segment is None else WANTS_X + COMES

    def wanted(tensors: Sequence[Tensor | None]) -> bool:
        return any(t is not None and t.requires_grad for t in tensors)

    x, affine = wanted(inputs), wanted(parameters)
    sums = affine and options.affine_grad == "global"
    return x * WANTS_X + sums * WANTS_SUMS + (x or affine or wanted(residuals)) * COMES
