"""One training step of a layer: the passes, the exchange between them, and their gradient."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor

from . import _collective, _exchange, _paths, _recomputation, _second, _state, _step_operators
from ._exchange import COMES, WANTS_SUMS, WANTS_X, Backward
from ._groups import Peers
from ._mask import check_mask
from ._modes import (
    check_not_batched,
    check_transforms,
    outside_transforms,
    recorded,
    refuse_tracing,
)
from ._ops import HEADER_WORDS, message_words, ops
from ._options import (
    Options,
    check_arguments,
    check_counter,
    check_in_place,
    check_options,
    values_per_channel,
)
from ._recomputation import Segment
from ._state import Identity, LayerState
from ._where import Call


class Step(NamedTuple):
    """What backward knows of a training step besides tensors.

    call: as errors in backward name it. backward: who takes part in it. bias_dtype: None without a
    bias. needs: whether this rank wants the gradients of x, weight, bias and residual.
    """

    state: LayerState
    options: Options
    peers: Peers | None
    call: Call
    backward: Backward
    bias_dtype: torch.dtype | None
    needs: tuple[bool, ...] = (False,) * 4

    @property
    def ranks(self) -> int:
        return 1 if self.peers is None else self.peers.ranks

    @property
    def exchanges(self) -> bool:
        """Whether backward takes an exchange."""
        alone = self.peers is None and self.needs[0]
        return alone or self.backward.x or self.backward.sums


class Inputs(NamedTuple):
    """What forward is given. takes_part: this rank's word about backward.
    segment: the checkpointed segments around the call, if any."""

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    residual: Tensor | None
    mask: Tensor | None
    options: Options
    state: LayerState
    peers: Peers | None
    takes_part: int
    segment: Segment | None = None


def _exchanged(given: Inputs) -> tuple[Step, tuple]:
    """What backward will know; and (message, merged, rest or records), this rank's part and what
    all ranks share. In a checkpointed segment the header alone of this rank's part, and no more
    than is needed."""
    x, _, bias, residual, mask, options, state, peers, word, segment = given
    if segment is not None and segment.kept is not None:
        return segment.kept.step, segment.kept.words
    if peers is not None and peers.group_name != state.group:
        _paths.compare(state, peers, x, options)
    call = state.call_of(x, options)
    number, channels = options.identity(state.number, residual is not None), x.shape[1]
    own = values_per_channel(x, mask)
    if options.statistics == "welford":
        sums = (x, number, state.call, options.eps, mask, word)
        message = _exchange.refusing(ops.local_welford, sums, x, peers, call)
        merged = _exchange.gather(message, channels, peers, call)
    else:
        sums = (x, number, state.call, options.eps)
        message, *merged = _exchange.moments(sums, mask, word, peers, call)
    if own <= 1:  # or unknown
        sizes = f"ranks (input size {list(x.shape)} on this one)"
        _exchange.check_count(merged[0], own, sizes)
    backward = _exchange.backward_of(merged[0], word, peers, call)
    bias_dtype = None if bias is None else bias.dtype
    step = Step(state, options, peers, call.backward(), backward, bias_dtype)
    if segment is None:
        return step, (message, *merged)
    needed = HEADER_WORDS if options.statistics == "welford" else message_words(x, mask)
    return step, segment.keep(step, _exchange.trimmed(message, *merged, needed))


def like(tensor: Tensor, x: Tensor) -> Tensor:
    """The tensor in x's layout."""
    return tensor if tensor.stride() == x.stride() else torch.empty_like(x).copy_(tensor)


def _waiting(peers: Peers | None, x: Tensor) -> Peers | None:
    """Those who wait for this rank's host."""
    return None if peers is not None and peers.cuda and x.is_cuda else peers


def _leave(error: BaseException, given: Inputs) -> None:
    x, peers = given.x, _waiting(given.peers, given.x)
    if given.segment is not None and given.segment.kept is not None:
        peers = None
    _collective.leave(error, peers, given.state.call_of(x, given.options))


def forward(given: Inputs, updates: tuple = ()) -> tuple[Step, tuple, tuple]:
    """What backward will know; y, mean, var (float64, biased) and info (count, fingerprint); and
    the tensors that backward takes.

    updates: what normalize_and_update takes besides, if it is to update the running statistics.
    """
    try:
        return _forward(given, updates)
    except BaseException as error:
        _leave(error, given)
        raise


def _forward(given: Inputs, updates: tuple) -> tuple[Step, tuple, tuple]:
    x, weight, bias, residual, mask, options, *_ = given
    step, exchanged = _exchanged(given)
    if updates:
        normalize = ops.normalize_and_update
    elif options.statistics == "welford":
        normalize = ops.normalize_gathered
    else:
        normalize = ops.normalize
    y, mean, var, rstd, info, activation_mask = normalize(
        x,
        *exchanged,
        weight,
        bias,
        None if residual is None else like(residual, x),
        options.eps,
        step.ranks,
        options.activation_kind,
        options.negative_slope,
        mask,
        *updates,
    )
    # Without an activation mask, the activation's sign is computed again, which takes the bias.
    again = options.activation != "none" and residual is None
    saved = (x, weight, bias if again else None, mean, rstd, info, activation_mask, mask)
    return step, (y, mean, var, info), saved


@recorded(lambda step, *_: step.state.name, " backward")
def backward(step: Step, dy, x, *saved) -> tuple:
    """Gradients of x, weight, bias and residual. saved: what forward() gave for it, behind x."""
    try:
        return _backward(step, dy, x, *saved)
    except BaseException as error:
        peers = _waiting(step.peers, x) if step.exchanges else None
        _collective.leave(error, peers, step.call)
        raise


def _backward(step: Step, dy, x, weight, bias, mean, rstd, info, activation_mask, mask) -> tuple:
    options, peers = step.options, step.peers
    needs_x, needs_weight, needs_bias, needs_residual = step.needs
    check_not_batched(step, step.call, dy, x)
    _exchange.check_present(step.backward, peers, step.call)
    dtypes = (
        weight.dtype if needs_weight else None,
        step.bias_dtype if needs_bias else None,
    )
    dy = like(dy, x)
    through = (weight, bias, activation_mask, options.activation_kind, options.negative_slope)
    keep = needs_residual and (options.activation != "none" or mask is not None)
    arguments = (dy, x, mean, rstd, info, *through, keep)
    if step.exchanges:
        message, u, merged, rest = _exchange.gradients(arguments, mask, peers, step.call)
    else:
        message, u = ops.local_gradients(*arguments, 0, mask)
    if keep:  # what comes back is there already
        dy, through = u, (weight, None, None, 0, 0.0)
    dx = dweight = dbias = None
    # One rank's share is the whole, and comes with dx.
    shares = options.affine_grad == "share" and not (peers is None and needs_x)
    shares = shares and (needs_weight or needs_bias)
    if step.exchanges:
        own = message if shares else None
        dx, dweight, dbias = ops.input_gradient(
            dy, x, merged, rest, mean, rstd, info, *through, *dtypes, step.ranks, mask, own
        )
    elif shares:
        dweight, dbias = ops.affine_gradient_shares(message, x, mean, rstd, *dtypes)
    return (
        dx if needs_x else None,
        dweight if needs_weight else None,
        dbias if needs_bias else None,
        dy if needs_residual else None,
    )


class _BatchNormTraining(torch.autograd.Function):
    """What forward() gives besides saved tensors; y alone if it makes the updates."""

    @staticmethod
    def forward(ctx, given, updates, *tensors):
        ctx.step, (y, *statistics), saved = forward(Inputs(*tensors, *given), updates)
        ctx.save_for_backward(*saved)
        if updates:
            return y
        ctx.mark_non_differentiable(*statistics)
        return y, *statistics

    @staticmethod
    def backward(ctx, dy, *_):
        step = ctx.step._replace(needs=ctx.needs_input_grad[2:6])
        if torch.is_grad_enabled():  # create_graph=True
            gradients = _second.differentiable(step, backward, dy, *ctx.saved_tensors)
        else:
            gradients = backward(step, dy, *ctx.saved_tensors)
        return None, None, *gradients, None


class _BatchNormInPlace(torch.autograd.Function):
    """As _BatchNormTraining with leaky_relu, written over x; backward recovers x from y."""

    @staticmethod
    def forward(ctx, given, _updates, *tensors):
        x, weight, bias, _, _, options, *_ = inputs = Inputs(*tensors, *given)
        try:
            ctx.step, exchanged = _exchanged(inputs)
            mean, var, rstd, info = ops.normalize_in_place(
                x, *exchanged, weight, bias, options.eps, ctx.step.ranks, options.negative_slope
            )
        except BaseException as error:
            _leave(error, inputs)
            raise
        ctx.mark_dirty(x)
        ctx.save_for_backward(x, weight, bias, mean, rstd, info)
        ctx.mark_non_differentiable(mean, var, info)
        return x, mean, var, info

    @staticmethod
    def backward(ctx, dy, *_):
        y, weight, bias, mean, rstd, info = ctx.saved_tensors
        step = ctx.step._replace(needs=ctx.needs_input_grad[2:6])
        with torch.no_grad():
            slope = step.options.negative_slope
            x, bits = ops.recover_input(y, mean, rstd, weight, bias, slope)
            # The sign is y's: computed again from x it could differ next to 0.
            gradients = backward(step, dy, x, weight, None, mean, rstd, info, bits, None)
        if torch.is_grad_enabled():
            gradients = _second.refuse(
                f"{step.state.name}: got a second derivative with inplace=True, which keeps no "
                "input to differentiate by; expected inplace=False",
                gradients,
            )
        return None, None, *gradients, None


def _is_fake(x: object, parameter: Tensor | None) -> bool:
    """Whether x has a shape and no values: a tensor of a mode that traces, or a meta tensor, if the
    layer is on meta, too. parameter: of the layer, if it has any."""
    if not isinstance(x, Tensor):
        return False
    if x.is_meta:
        return parameter is None or parameter.is_meta
    if isinstance(x, FakeTensor):
        return True
    return torch._C._len_torch_dispatch_stack() > 0 and detect_fake_mode() is not None


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


@recorded(lambda *arguments: arguments[7].name)
def train_step(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    options: Options,
    state: LayerState | Identity,
    *,
    num_batches_tracked: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """One training forward: exchange, normalize, update the running statistics in place.

    options.momentum None: cumulative averaging by num_batches_tracked. state: its call number is
    advanced by one, and its count becomes the global one.
    """
    parameter = next((t for t in (running_mean, weight, bias) if t is not None), None)
    traced = torch.compiler.is_compiling() or _is_fake(x, parameter)
    if isinstance(state, Identity) and not traced:
        state = _state.named(state)
    if torch.jit.is_tracing():
        refuse_tracing(state, options, x)
    # A compiler plans memory by itself, and cannot trace this.
    inplace = options.writes_over_input and not traced
    peers = segment = None
    if not traced:
        peers = state.peers(options)
        segment = _recomputation.segment(state, options, residual is not None, x, mask)
    again = segment is not None and segment.kept is not None
    try:
        check_transforms(state, input=x, weight=weight, bias=bias, residual=residual)
        check_options(options)
        check_arguments(x, running_mean, running_var, weight, bias, residual, traced)
        check_counter(options.momentum, running_mean, running_var, num_batches_tracked, traced)
        if inplace:
            check_in_place(x, weight, bias, residual, options.negative_slope)
            if segment is not None:
                segment.check_in_place(x)
        if mask is not None:
            check_mask(mask, x)
            if options.writes_over_input:
                raise ValueError("mask: got one with inplace=True, expected None")
        if not traced:
            state.move(x.device)
    except Exception as error:
        if not (again or traced):
            with outside_transforms():
                tensors = {"x": x, "parameter": parameter, "counter": state.call}
                peers = _paths.way(state, peers)
                _exchange.reject(peers, state.call_of(x, options), error, **tensors)
        raise
    if mask is not None:
        mask = mask.contiguous()
    if not traced and any(t is not None and t.is_neg() for t in (x, weight, bias, residual)):
        # An operator that writes to some arguments takes none with the negative bit.
        x, weight, bias, residual = (
            None if t is None else t.resolve_neg() for t in (x, weight, bias, residual)
        )
    tensors = (x, weight, bias, residual, mask)
    tracked, momentum = num_batches_tracked, options.momentum
    averaged = tracked is not None and tracked.is_floating_point()
    if averaged:  # of a checkpoint; the core counts in integers
        momentum = 1.0 / (tracked.item() + 1.0) if momentum is None else momentum
        tracked = None
    statistics = (running_mean, running_var, tracked)
    if traced:
        y, mean, var, info = _step_operators.training_step(*tensors, options, state)
        call = None
    else:
        function = _BatchNormInPlace if inplace else _BatchNormTraining
        word = takes_part((x,), (weight, bias), (residual,), options, segment)
        given, call = (options, state, peers, word, segment), state.call
        # Both runs of a checkpointed segment take the same operators.
        apart = inplace or averaged or segment is not None or options.statistics == "welford"
        if not apart:
            return function.apply(given, (*statistics, call, state.count, momentum), *tensors)
        y, mean, var, info = function.apply(given, (), *tensors)
        if again:
            return y
        state.note(info)
    if any(t is not None for t in (*statistics, call)):
        ops.update_running_statistics(*statistics, call, mean, var, info, momentum)
    if averaged:
        num_batches_tracked.add_(info[0] > 0)
    return y
