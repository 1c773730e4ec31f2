# SPDX-License-Identifier: Apache-2.0
"""One training step of a layer: the passes, the exchange between them, and their gradient. It has K
inputs, one for each device of this process; mostly K is 1."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..exchange import agreement
from ..exchange.agreement import COMES, WANTS_SUMS, WANTS_X, Backward
from ..exchange.call import Call
from ..exchange.groups import Peers
from ..exchange.times import timed
from ..exchange.transport import Transport
from ..exchange.transports import Alone, transport_of
from ..operators import HEADER_WORDS, message_words, ops
from . import layer_paths
from .layer_state import LayerState
from .options import Options, check_plain, check_strided, values_per_channel
from .profiling import recorded
from .recomputation import Segment
from .transforms import check_not_batched


class Step(NamedTuple):
    """What backward knows of a training step besides tensors.

    call: as errors in backward name it. backward: who takes part in it. bias_dtype: None without a
    bias. needs: whether this rank wants the gradients of any x, of weight, of bias and of any
    residual. lead: the input that speaks for all in headers.
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
        alone = self.peers is None and self.needs[0]
        return alone or self.backward.x or self.backward.sums

    def transport(self, x: Tensor) -> Transport:
        """Of backward's exchange."""
        return transport_of(self.peers if self.exchanges else None, x.device)


class Inputs(NamedTuple):
    """What forward is given. xs, residuals, masks: K each. takes_part: this rank's word about
    backward. segment: the checkpointed segments around the call, if any."""

    xs: Sequence[Tensor]
    weight: Tensor | None
    bias: Tensor | None
    residuals: Sequence[Tensor | None]
    masks: Sequence[Tensor | None]
    options: Options
    state: LayerState
    peers: Peers | None
    takes_part: int
    segment: Segment | None = None


def has_samples(x: Tensor, mask: Tensor | None) -> bool:
    return x.numel() > 0 and (mask is None or bool(mask.any()))


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def _lead(xs: Sequence[Tensor], masks: Sequence[Tensor | None]) -> int:
    """The first input with samples: autocast may have given one without another dtype."""
    if len(xs) == 1:
        return 0
    return next((k for k, (x, m) in enumerate(zip(xs, masks)) if has_samples(x, m)), 0)


def _placed(xs: Sequence[Tensor], *tensors: Tensor | None) -> Iterable[Sequence[Tensor | None]]:
    """The tensors, for each x on its device."""
    if len(xs) == 1:
        return (tensors,)
    return ([None if t is None else t.to(x.device) for t in tensors] for x in xs)


def shared_sums(
    given: Inputs, exchanged: tuple | None = None, makes_room: bool = True
) -> tuple[Step, tuple, list]:
    """What backward will know; (message, merged, rest or records), this rank's part and what all
    ranks share; and of each x what _room() gives, made before the exchange, if there was one.
    In a checkpointed segment the header alone of this rank's part, and no more than is needed.
    exchanged: the second, where it is there already. makes_room: there are outputs beside x."""
    rooms: list = [None] * len(given.xs)
    xs, _, bias, residuals, masks, options, state, peers, word, segment = given
    if segment is not None and segment.kept is not None:
        return segment.kept.step, segment.kept.words, rooms
    lead = _lead(xs, masks)
    x = xs[lead]
    if peers is not None and peers.group_name != state.group:
        layer_paths.compare(state, peers, x, options)
    call, transport = state.call_of(x, options), transport_of(peers, xs[0].device)
    own = sum(map(values_per_channel, xs, masks))
    number, channels = options.identity(state.number, residuals[0] is not None), x.shape[1]
    merged: Sequence[Tensor | None]
    if exchanged is None and makes_room:
        for k, (z, residual) in enumerate(zip(xs, residuals)):
            rooms[k] = transport.refusing(_room, (z, residual, options), z, call)
    if exchanged is not None:
        message, *merged = exchanged
    elif options.statistics == "welford":
        sums = (x, number, state.call, options.eps, masks[0], word)
        message = transport.refusing(ops.local_welford, sums, x, call)
        merged = transport.gather(message, channels, call)
    else:
        passes = [
            ((_cast(z, x.dtype), number, counter, options.eps), (mask, word))
            for z, mask, (counter,) in zip(xs, masks, _placed(xs, state.call))
        ]
        message, _, *merged = transport.sums_of("moments", passes, lead, channels, call)
    if own <= 1:  # or unknown
        sizes = [list(z.shape) for z in xs]
        where = f"ranks (input size {sizes[0]} on this one)"
        if len(xs) > 1:
            where = f"devices (input sizes {sizes})"
        agreement.check_count(merged[0], own, where)
    backward = transport.backward_of(merged[0], word, call)
    bias_dtype = None if bias is None else bias.dtype
    step = Step(state, options, peers, call.backward(), backward, bias_dtype, lead=lead)
    if segment is None:
        return step, (message, *merged), rooms
    needed = HEADER_WORDS if options.statistics == "welford" else message_words(x, masks[lead])
    with _disable_current_modes():  # as in _forward()
        return step, segment.keep(step, (message, *merged), needed), rooms


def like(tensor: Tensor, x: Tensor) -> Tensor:
    """The tensor in x's layout."""
    if tensor.stride() == x.stride():
        return tensor
    check_strided("gradient", tensor)
    if tensor.shape != x.shape:  # x.data is another since forward
        raise ValueError(f"input: got shape {tuple(x.shape)}, expected {tuple(tensor.shape)} still")
    return torch.empty_like(x).copy_(tensor)


def _fitting(dy: Tensor, x: Tensor, alone: bool) -> Tensor:
    check_plain(alone, gradient=dy)
    return like(dy, x)


def _room(x: Tensor, residual: Tensor | None, options: Options) -> tuple:
    """What a forward of x writes to, and the residual in x's layout."""
    keeps_signs = residual is not None and options.activation != "none"
    room = ops.forward_outputs(x, keeps_signs)
    return room, None if residual is None else like(residual, x)


def leave(error: BaseException, given: Inputs) -> None:
    again = given.segment is not None and given.segment.kept is not None
    transport = Alone() if again else transport_of(given.peers, given.xs[0].device)
    with _disable_current_modes():
        call = given.state.call_of(given.xs[0], given.options)
    transport.leave(error, call)


def forward(
    given: Inputs, updates: tuple = (), exchanged: tuple | None = None
) -> tuple[Step, tuple, tuple]:
    """What backward will know; K y, mean, var (float64, biased) and info (count, fingerprint); and
    the tensors that backward takes: weight, bias, and of each input x, mean, rstd, info, activation
    mask and mask.

    updates: what normalize_and_update takes besides, if it is to update the running statistics;
    with one x alone. exchanged: as in shared_sums().
    """
    try:
        return _forward(given, updates, exchanged)
    except BaseException as error:
        leave(error, given)
        raise


def ended(run: Callable, state: LayerState, *arguments):
    """run(*arguments), which makes the updates after an exchange. The other ranks make them, so if
    a mode of the caller's raises in its place, it runs without the mode before the error goes on.
    The layer's call number tells whether it has run."""

    def number():
        with _disable_current_modes():
            return None if state.call is None or state.call.is_cuda else int(state.call)

    before = number() if torch._C._len_torch_dispatch_stack() > 0 else None
    try:
        return run(*arguments)
    except BaseException:
        if before is not None and before == number():
            with _disable_current_modes():
                run(*arguments)
        raise


def _without_modes(run: Callable, _: LayerState, *arguments):
    with _disable_current_modes():
        return run(*arguments)


def _forward(given: Inputs, updates: tuple, exchanged: tuple | None) -> tuple[Step, tuple, tuple]:
    xs, weight, bias, residuals, masks, options, *_ = given
    step, exchanged, rooms = shared_sums(given, exchanged)
    if updates:
        normalize = ops.normalize_and_update
    elif options.statistics == "welford":
        normalize = ops.normalize_gathered
    else:
        normalize = ops.normalize
    run = timed(normalize, step.state.times, "normalized")
    # What comes before the updates must not fail on this rank alone.
    run = functools.partial(ended if updates else _without_modes, run, step.state)
    # Without an activation mask, the activation's sign is computed again, which takes the bias.
    again = options.activation != "none" and residuals[0] is None
    ys: list[Tensor] = []
    statistics: tuple[Tensor, ...] = ()
    saved = [weight, bias if again else None]
    for k, placed in enumerate(_placed(xs, *exchanged, weight, bias)):
        x, residual, mask = xs[k], residuals[k], masks[k]
        if rooms[k] is None:  # after an exchange, or without one
            room, residual = None, None if residual is None else like(residual, x)
        else:
            room, residual = rooms[k]
        y, mean, var, rstd, info, activation_mask = run(
            x,
            *placed,
            residual,
            options.eps,
            step.ranks,
            options.activation_kind,
            options.negative_slope,
            mask,
            *updates,
            room,
        )
        ys.append(y)
        saved += (x, mean, rstd, info, activation_mask, mask)
        statistics = statistics or (mean, var, info)
    return step, (*ys, *statistics), tuple(saved)


@recorded(lambda step, *_: step.state.name, " backward")
def backward(
    step: Step, dys: Sequence[Tensor | None], *saved, exchanged: tuple | None = None
) -> tuple:
    """Gradients of K x, weight, bias and K residuals. saved: what forward() gave for it. exchanged:
    what sums_of() gives, where it is there already."""
    try:
        return _backward(step, dys, *saved, exchanged=exchanged)
    except BaseException as error:
        step.transport(saved[2]).leave(error, step.call)
        raise


def _backward(step: Step, dys, *saved, exchanged: tuple | None) -> tuple:
    options, (weight, bias), xs = step.options, saved[:2], saved[2::6]
    lead, x = step.lead, xs[step.lead]
    needs_x, needs_weight, needs_bias, needs_residual = step.needs
    agreement.check_present(step.backward, step.peers, step.call)
    dtypes = (
        weight.dtype if needs_weight else None,
        step.bias_dtype if needs_bias else None,
    )
    masked = any(mask is not None for mask in saved[7::6])
    keep = needs_residual and (options.activation != "none" or masked)
    gradients, through, passes = [], [], []
    transport = step.transport(x)
    for k, (w, b) in enumerate(_placed(xs, weight, bias)):
        z, *statistics, activation_mask, mask = saved[2 + 6 * k : 8 + 6 * k]
        dy = torch.zeros_like(z) if dys[k] is None else dys[k]
        check_not_batched(step.call, dy)
        fit = dy, z, step.peers is None
        if exchanged is None:
            dy = transport.refusing(_fitting, fit, z, step.call)
        else:
            dy = _fitting(*fit)
        after = (w, b, activation_mask, options.activation_kind, options.negative_slope)
        arguments = (_cast(dy, x.dtype), _cast(z, x.dtype), *statistics, *after, keep)
        gradients.append(dy)
        through.append(after)
        passes.append((arguments, (mask,)))
    # One rank's share is the whole, and comes with dx.
    shares = options.affine_grad == "share" and not (step.peers is None and needs_x)
    shares = shares and (needs_weight or needs_bias)
    rooms = [None] * len(xs)
    if exchanged is None:
        if step.exchanges:
            for k, z in enumerate(xs):
                asked = (z, *(dtypes if k == lead else (None, None)))
                rooms[k] = transport.refusing(ops.backward_outputs, asked, z, step.call)
        exchanged = transport.sums_of("gradients", passes, lead, x.shape[1], step.call, shares)
    message, us, merged, rest = exchanged
    if keep:  # what comes back is there already
        gradients = [_cast(u, z.dtype) for u, z in zip(us, xs)]
        through = [(w, None, None, 0, 0.0) for w, *_ in through]
    dxs, dweight, dbias = [], None, None
    if step.exchanges:
        input_gradient = timed(ops.input_gradient, step.state.times, "normalized")
        for k, placed in enumerate(_placed(xs, merged, rest)):
            z, mean, rstd, info, _, mask = saved[2 + 6 * k : 8 + 6 * k]
            leads = k == lead
            wanted = dtypes if leads else (None, None)
            own = message if leads and shares else None
            dx, *sums = input_gradient(
                *(gradients[k], z, *placed, mean, rstd, info, *through[k], *wanted),
                *(step.ranks, mask, own, rooms[k]),
            )
            dxs.append(dx)
            if leads:
                dweight, dbias = sums
    elif shares:
        mean, rstd = saved[3 + 6 * lead : 5 + 6 * lead]
        dweight, dbias = ops.affine_gradient_shares(message, x, mean, rstd, *dtypes)
    if lead > 0:  # parameters lie where the first x does
        dweight, dbias = next(iter(_placed(xs, dweight, dbias)))
    none = [None] * len(xs)
    return (
        *(dxs if needs_x else none),
        dweight if needs_weight else None,
        dbias if needs_bias else None,
        *(gradients if needs_residual else none),
    )


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
