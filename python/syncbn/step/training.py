# SPDX-License-Identifier: Apache-2.0
"""One training step of a layer: begin, the exchange, finish, for each direction. The order of a
direction is told here for one input, in devices.py for several, and for the passes in
src/step/step.cpp."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import profiler

from ..exchange import agreement
from ..exchange.call import Backward, Call, Peers
from ..exchange.host import engine_of, transport_of
from ..exchange.transport import with_places
from ..exchange.turn import Turn, ranged
from ..operators import (
    COMES,
    DONE,
    MESSAGE,
    OWN,
    WANTS_SHARE,
    WANTS_SUMS,
    WANTS_U,
    WANTS_X,
    activation_mask_of,
    info_of,
    ops,
    without_modes,
)
from . import layer_state
from .layer_state import LayerState
from .options import Form, Options, values_per_channel
from .recomputation import Kept, Segment
from .surroundings import check_not_batched, fits, fitting, like, recorded

# Without OpOverload.__call__, which hands all arguments on.
forward_begin = ops.forward_begin.default._op
forward_finish = ops.forward_finish.default._op
backward_begin = ops.backward_begin.default._op
backward_finish = ops.backward_finish.default._op


class Step(NamedTuple):
    """The facts that backward knows of a training step besides tensors.

    made: the call's number (None where it is not known), channels and dtype. backward: who takes
    part in it. bias_dtype: None without a bias. needs: whether this rank wants the gradients of any
    x, of weight, of bias and of any residual.
    """

    state: LayerState
    options: Options
    form: Form
    peers: Peers | None
    made: tuple[int | None, int, torch.dtype]
    backward: Backward
    bias_dtype: torch.dtype | None
    needs: Sequence[bool]

    @property
    def ranks(self) -> int:
        return 1 if self.peers is None else self.peers.ranks

    @property
    def exchanges(self) -> bool:
        """Tells whether backward takes an exchange."""
        return self.needs[0] if self.peers is None else self.backward.x or self.backward.sums

    def call(self, direction: str) -> Call:
        """Gives that direction of the call, as errors name it."""
        number, channels, dtype = self.made
        return Call(self.state.name, number, direction, channels, dtype, self.options)

    def turn(self, x: Tensor, direction: str = "backward") -> Turn:
        """Surrounds that direction on this rank."""
        peers = self.peers if self.exchanges else None
        return Turn(peers, partial(self.call, direction), x, self.state)


class Given(NamedTuple):
    """The arguments of a forward besides samples and parameters.

    running: mean, variance and number of batches, each may be None; they lie where the first x
    does. takes_part: this rank's word about backward. segment: the checkpointed segments around the
    call, if any.
    """

    running: tuple[Tensor | None, Tensor | None, Tensor | None]
    options: Options
    state: LayerState
    peers: Peers | None
    takes_part: int
    segment: Segment | None = None


def turn_of(
    state: LayerState,
    options: Options,
    peers: Peers | None,
    x: Any,
    parts: Sequence[object] = (None, None, None),
    words: Callable[[], None] | None = None,
    parameter: object = None,
) -> Turn:
    """Surrounds a forward on this rank, from its checks on. parts: the residual, the weight and the
    bias, of which ranks must have the same. words, parameter: as Turn has them."""
    return Turn(peers, partial(state.call_of, x, options, parts), x, state, words, parameter)


def forward(
    turn: Turn,
    given: Given,
    needs: Sequence[bool],
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    mask: Tensor | None,
) -> tuple[Step, Tensor, Any]:
    """Gives what backward will know; y; and the tensors that backward takes: weight, bias, x, what
    operators.saved_of() describes, activation mask and mask. Running statistics and the layer's
    counters are updated. turn: around the call. needs: as Step has it."""
    (mean, var, tracked), options, state, peers, word, segment = given
    if residual is not None and residual.stride() != x.stride():
        residual = like(residual, x)
    own = x, weight, bias, residual, mask
    if segment is not None and segment.kept is not None:
        return _again(segment.kept, needs, own)
    if peers is not None and peers.group_name != state.group:
        layer_state.compare(state, engine_of(peers), x, options)
    averaged = None
    if tracked is not None and tracked.dtype is not torch.int64:
        options = averaging(options, tracked)
        averaged, tracked = tracked, None
    form, transport = state.form(options), transport_of(peers, x.device)
    running = mean, var, tracked, state.counters
    stops = form.in_place or form.gathers or (profiler._is_profiler_enabled and peers is not None)
    way = transport.message_way if stops else transport.way
    way = MESSAGE if form.gathers else way  # with_places makes the frame, for all ranks' records
    given_to = form.constants, word
    begin = ranged(transport.begin, turn, "sums")
    begun = begin(turn, forward_begin, (*own, *running, *given_to), way)
    y, saved, bits, wanted, number, message, merged, status = begun
    if status != DONE:
        rest = None
        if message is not None:
            records = transport.ranks if form.gathers else 0
            if records > 0:
                message = with_places(message, transport)
            exchange = ranged(transport.exchange, turn, "exchange")
            merged, rest = exchange(turn, message, merged, x.size(1), records)
        _check_count(merged, x, mask)
        y = x if form.in_place else y
        with without_modes():  # the other ranks finish, whatever a mode would do
            total = merged, rest
            finish = ranged(forward_finish, turn, "map")
            finish(*own, y, saved, bits, running, total, form.constants, transport.ranks)
    if averaged is not None:
        count_batch(averaged, saved)
    shared = transport.backward_of(wanted, merged, word, turn)
    made = None if number < 0 else number, x.size(1), x.dtype
    bias_dtype = None if bias is None else bias.dtype
    step = Step(state, given.options, form, peers, made, shared, bias_dtype, needs)
    if segment is not None:
        segment.keep(step, saved)
    return step, y, _kept(form, own, y, saved, bits)


def _again(kept: Kept, needs: Sequence[bool], own: tuple) -> tuple:
    """Makes the second run of a checkpointed segment, which exchanges nothing."""
    step, saved, x = kept.step._replace(needs=needs), kept.saved, own[0]
    y, bits = room(step.form, x, own[3] is not None)
    with without_modes():  # of checkpointing, which has not seen these operators before
        nothing = (None,) * 4
        total, constants = (None, None), step.form.constants
        forward_finish(*own, y, saved, bits, nothing, total, constants, step.ranks)
    return step, y, _kept(step.form, own, y, saved, bits)


def _kept(form: Form, own: tuple, y: Tensor, saved: Tensor, bits: Tensor | None) -> tuple:
    """Gives what backward takes. Without an activation mask it computes the activation's sign
    again, which takes the bias. In place it takes y for x."""
    x, weight, bias, _, mask = own
    signs = bias if form.acts and bits is None else None
    return weight, signs, y if form.in_place else x, saved, bits, mask


def room(form: Form, x: Tensor, has_residual: bool) -> tuple[Tensor, Tensor | None]:
    """Gives what a forward writes to: y and the activation mask, if there is one."""
    with without_modes():
        bits = activation_mask_of(x).zero_() if form.acts and has_residual else None
        return x if form.in_place else torch.empty_like(x), bits


def averaging(options: Options, tracked: Tensor) -> Options:
    """Gives the options with the factor that a number of batches has which is an average itself, as
    averaged checkpoints have it."""
    if options.momentum is not None:
        return options
    return options._replace(momentum=ops.cumulative_factor(tracked.item()))


def count_batch(averaged: Tensor, saved: Tensor) -> None:
    """Adds a batch to such a number, unless it is empty."""
    with without_modes():
        averaged.add_(info_of(saved)[0] > 0)


def _check_count(merged: Tensor | None, x: Tensor, mask: Tensor | None) -> None:
    """Refuses one value per channel. merged: None where it is known that there is one."""
    where = f"ranks (input size {list(x.shape)} on this one)"
    agreement.check_count(merged, values_per_channel(x, mask), where)


@recorded(lambda step, *_: step.state.name, " backward")
def backward(
    step: Step,
    dy: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    x: Tensor,
    saved: Tensor,
    bits: Tensor | None,
    mask: Tensor | None,
) -> tuple[Any, Any, Any, Any]:
    """Gives the gradients of x, weight, bias and residual. The tensors after dy are those that
    forward() gave for it."""
    with step.turn(x) as turn:
        form, exchanges = step.form, step.exchanges
        transport = transport_of(turn.peers, x.device)
        if step.backward.absent:
            agreement.check_present(step.backward, step.peers, turn.call)
        if not fits(dy, x):
            dy = gradient_like(turn, dy, x, step.peers is None)
        wanted, dtypes = asked(step, weight, mask is not None)
        own = dy, x, saved, weight, bias, bits, mask
        way = transport.way if exchanges else OWN
        if exchanges and profiler._is_profiler_enabled and turn.peers is not None:
            way = transport.message_way  # its parts are ranges
        begin = ranged(transport.begin, turn, "sums")
        begun = begin(turn, backward_begin, (*own, form.constants, wanted, *dtypes), way)
        dx, dweight, dbias, u, coefficients, message, merged, status = begun
        kept = u is not None
        if status != DONE and (exchanges or wanted & WANTS_SHARE):
            rest = None
            if exchanges:
                exchange = ranged(transport.exchange, turn, "exchange")
                merged, rest = exchange(turn, message, merged, x.size(1))
            sums = message if wanted & WANTS_SHARE else None, merged, rest
            gradients = dx, dweight, dbias, coefficients
            with without_modes():  # as in forward
                after = (u, *own[1:]) if kept else own
                finish = ranged(backward_finish, turn, "map")
                finish(*after, form.constants, kept, gradients, sums, step.ranks)
        if not step.needs[3]:
            return dx if step.needs[0] else None, dweight, dbias, None
        return dx if step.needs[0] else None, dweight, dbias, u if kept else dy


def gradient_like(turn: Turn, dy: Tensor | None, x: Tensor, alone: bool) -> Tensor:
    """Gives an output's gradient as the operators take it. alone: there is one rank."""
    dy = torch.zeros_like(x) if dy is None else dy
    check_not_batched(turn.call, dy)
    try:
        return fitting(dy, x, alone)
    except Exception as error:
        turn.refused(error)


def asked(step: Step, weight: Tensor | None, masked: bool) -> tuple[int, tuple]:
    """Tells an operator what backward is to give besides dx, and the dtypes of the gradients of
    weight and bias."""
    needs_x, needs_weight, needs_bias, needs_residual = step.needs
    # One rank's share is the whole, which comes with dx.
    of_share = not needs_x if step.peers is None else step.form.shares
    share = (needs_weight or needs_bias) and of_share
    keep = needs_residual and (step.form.acts or masked)
    dtypes = (
        weight.dtype if needs_weight and weight is not None else None,
        step.bias_dtype if needs_bias else None,
    )
    return keep * WANTS_U | share * WANTS_SHARE, dtypes


def takes_part(needs: Sequence[bool], options: Options, segment: Segment | None = None) -> int:
    """This rank's word of the header about backward. needs: as Step has it."""
    if not torch.is_grad_enabled():
        # The first run of a reentrant checkpoint: the second will tell.
        return 0 if segment is None else WANTS_X + COMES
    x, weight, bias, residual = needs
    sums = (weight or bias) and options.affine_grad == "global"
    return x * WANTS_X + sums * WANTS_SUMS + (x or weight or bias or residual) * COMES


def needs_of(*tensors: Tensor | None) -> tuple[bool, ...]:
    """Tells of each whether its gradient is wanted."""
    return tuple([t is not None and t.requires_grad for t in tensors])
