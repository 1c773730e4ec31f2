"""The training step as PyTorch calls it: checked, in autograd, in place or in a graph."""

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor

from ..exchange import agreement
from ..operators import ops
from . import as_operator, layer_state, paths, recomputation, second_derivatives
from .layer_state import Identity, LayerState
from .masks import check_mask
from .modes import check_transforms, outside_transforms, recorded, refuse_tracing
from .options import Options, check_arguments, check_counter, check_in_place, check_options
from .training import Inputs, backward, forward, leave, shared_sums, takes_part


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
            gradients = second_derivatives.differentiable(step, backward, dy, *ctx.saved_tensors)
        else:
            gradients = backward(step, dy, *ctx.saved_tensors)
        return None, None, *gradients, None


class _BatchNormInPlace(torch.autograd.Function):
    """As _BatchNormTraining with leaky_relu, written over x; backward recovers x from y."""

    @staticmethod
    def forward(ctx, given, _updates, *tensors):
        x, weight, bias, _, _, options, *_ = inputs = Inputs(*tensors, *given)
        try:
            ctx.step, exchanged = shared_sums(inputs)
            mean, var, rstd, info = ops.normalize_in_place(
                x, *exchanged, weight, bias, options.eps, ctx.step.ranks, options.negative_slope
            )
        except BaseException as error:
            leave(error, inputs)
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
            gradients = second_derivatives.refuse(
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
    live = None  # a graph finds the state when it runs
    if not traced:
        state = live = layer_state.named(state) if isinstance(state, Identity) else state
    if torch.jit.is_tracing():
        refuse_tracing(state, options, x)
    # A compiler plans memory by itself, and cannot trace this.
    inplace = options.writes_over_input and not traced
    peers = segment = None
    if live is not None:
        peers = live.peers(options)
        segment = recomputation.segment(live, options, residual is not None, x, mask)
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
        if live is not None:
            live.move(x.device)
    except Exception as error:
        if live is not None and not again:
            with outside_transforms():
                peers, call = paths.way(live, peers), live.call_of(x, options)
                agreement.reject(peers, call, error, x=x, parameter=parameter, counter=live.call)
        raise
    if mask is not None:
        mask = mask.contiguous()
    if not traced and any(t is not None and t.is_neg() for t in (x, weight, bias, residual)):
        # An operator that writes to some arguments takes none with the negative bit.
        x = x.resolve_neg()
        weight, bias, residual = (
            None if t is None else t.resolve_neg() for t in (weight, bias, residual)
        )
    tensors = (x, weight, bias, residual, mask)
    tracked, averaged, momentum = num_batches_tracked, None, options.momentum
    if tracked is not None and tracked.is_floating_point():
        # Of a checkpoint; the core counts in integers.
        momentum = 1.0 / (tracked.item() + 1.0) if momentum is None else momentum
        tracked, averaged = None, tracked
    statistics = (running_mean, running_var, tracked)
    counter = None
    if live is None:
        y, mean, var, info = as_operator.training_step(*tensors, options, state)
    else:
        function = _BatchNormInPlace if inplace else _BatchNormTraining
        word = takes_part((x,), (weight, bias), (residual,), options, segment)
        given, counter = (options, live, peers, word, segment), live.call
        # Both runs of a checkpointed segment take the same operators.
        apart = (
            inplace
            or averaged is not None
            or segment is not None
            or options.statistics == "welford"
        )
        if not apart:
            return function.apply(given, (*statistics, counter, live.count, momentum), *tensors)
        y, mean, var, info = function.apply(given, (), *tensors)
        if again:
            return y
        live.note(info)
    if any(t is not None for t in (*statistics, counter)):
        ops.update_running_statistics(*statistics, counter, mean, var, info, momentum)
    if averaged is not None:
        averaged.add_(info[0] > 0)
    return y
