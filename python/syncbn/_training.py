"""One training step of a layer: the passes, the exchange between them, and their gradient."""

import torch
from torch import Tensor

from . import _exchange, _exported, _recomputation, _second
from ._layer import (
    Layer,
    check_arguments,
    check_counter,
    check_in_place,
    check_options,
    values_per_channel,
)
from ._mask import check_mask
from ._modes import (
    check_not_batched,
    check_transforms,
    exchanges,
    outside_transforms,
    recorded,
    refuse_tracing,
)
from ._ops import HEADER_WORDS, message_words, ops


def _exchanged(ctx, x, residual, mask, counter, layer, peers, segment):
    """(message, merged, rest or records): this rank's part and what all ranks share. In a
    checkpointed segment the header alone of this rank's part, and no more than is needed."""
    if segment is not None and segment.kept is not None:
        ctx.call = segment.kept.call.backward()
        return segment.kept.words
    call = layer.call_of(x, counter)
    ctx.call = call.backward()
    number, channels = layer.call_number(residual is not None), x.shape[1]
    own = values_per_channel(x, mask)
    if layer.statistics == "welford":
        message = ops.local_welford(x, number, counter, layer.eps, mask)
        merged = _exchange.gather(message, channels, peers, call, own)
    else:
        sums = (x, number, counter, layer.eps)
        message, *merged = _exchange.moments(sums, mask, peers, call, own)
    if own <= 1:  # or unknown
        sizes = f"ranks (input size {list(x.shape)} on this one)"
        _exchange.check_count(merged[0], own, peers, sizes)
    if segment is None:
        return message, *merged
    needed = HEADER_WORDS if layer.statistics == "welford" else message_words(x, mask)
    return segment.keep(call, _exchange.trimmed(message, *merged, needed))


def like(tensor: Tensor, x: Tensor) -> Tensor:
    """The tensor in x's layout."""
    return tensor if tensor.stride() == x.stride() else torch.empty_like(x).copy_(tensor)


class _BatchNormTraining(torch.autograd.Function):
    """y, mean, var (float64, biased) and info (count, fingerprint) of a training step; y alone if
    there are updates, what normalize_and_update takes besides: nothing is left to do then.

    An autograd function and not an operator with autograd: a compiled checkpoint then exchanges
    once, where a differentiable operator's exchange would be recomputed.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, residual, mask, counter, layer, peers, segment, updates):
        exchanged = _exchanged(ctx, x, residual, mask, counter, layer, peers, segment)
        if updates is not None:
            normalize = ops.normalize_and_update
        else:
            normalize, updates = ops.normalize, ()
            if layer.statistics == "welford":
                normalize = ops.normalize_gathered
        y, mean, var, rstd, info, activation_mask = normalize(
            x,
            *exchanged,
            weight,
            bias,
            None if residual is None else like(residual, x),
            layer.eps,
            1 if peers is None else peers.ranks,
            layer.activation_kind,
            layer.negative_slope,
            mask,
            *updates,
        )
        # Without an activation mask, the activation's sign is computed again, which takes the bias.
        again = layer.activation != "none" and residual is None
        ctx.save_for_backward(
            x, weight, bias if again else None, mean, rstd, info, activation_mask, mask
        )
        ctx.peers = peers
        ctx.layer = layer
        ctx.bias_dtype = None if bias is None else bias.dtype
        if updates:
            return y
        ctx.mark_non_differentiable(mean, var, info)
        return y, mean, var, info

    @staticmethod
    def backward(ctx, dy, *_):
        if _creates_graph():
            gradients = _second.differentiable(ctx, _backward, dy, *ctx.saved_tensors)
        else:
            gradients = _backward(ctx, dy, *ctx.saved_tensors)
        return *gradients, *(None,) * 6


class _BatchNormInPlace(torch.autograd.Function):
    """As _BatchNormTraining with leaky_relu, written over x; backward recovers x from y."""

    @staticmethod
    def forward(ctx, x, weight, bias, residual, mask, counter, layer, peers, segment, updates):
        mean, var, rstd, info = ops.normalize_in_place(
            x,
            *_exchanged(ctx, x, None, None, counter, layer, peers, segment),
            weight,
            bias,
            layer.eps,
            1 if peers is None else peers.ranks,
            layer.negative_slope,
        )
        ctx.mark_dirty(x)
        ctx.save_for_backward(x, weight, bias, mean, rstd, info)
        ctx.mark_non_differentiable(mean, var, info)
        ctx.peers = peers
        ctx.layer = layer
        ctx.bias_dtype = None if bias is None else bias.dtype
        return x, mean, var, info

    @staticmethod
    def backward(ctx, dy, *_):
        y, weight, bias, mean, rstd, info = ctx.saved_tensors
        with torch.no_grad():
            x, bits = ops.recover_input(y, mean, rstd, weight, bias, ctx.layer.negative_slope)
            # The sign is y's: computed again from x it could differ next to 0.
            gradients = _backward(ctx, dy, x, weight, None, mean, rstd, info, bits, None)
        if _creates_graph():
            gradients = _second.refuse(
                f"{ctx.layer.name}: got a second derivative with inplace=True, which keeps no "
                "input to differentiate by; expected inplace=False",
                gradients,
            )
        return *gradients, *(None,) * 6


def _creates_graph() -> bool:
    """Whether a backward runs with create_graph=True; a compiled one never does."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


@recorded(lambda ctx, *_: ctx.layer, " backward")
def _backward(ctx, dy, x, weight, bias, mean, rstd, info, activation_mask, mask):
    """Gradients of x, weight, bias and residual."""
    needs_x, needs_weight, needs_bias, needs_residual = ctx.needs_input_grad[:4]
    layer, peers = ctx.layer, ctx.peers
    ranks = 1 if peers is None else peers.ranks
    check_not_batched(ctx, ctx.call, dy, x)
    dtypes = (
        weight.dtype if needs_weight else None,
        ctx.bias_dtype if needs_bias else None,
    )
    dy = like(dy, x)
    through = (weight, bias, activation_mask, layer.activation_kind, layer.negative_slope)
    keep = needs_residual and (layer.activation != "none" or mask is not None)
    arguments = (dy, x, mean, rstd, info, *through, keep)
    if exchanges(ctx):
        message, u, merged, rest = _exchange.gradients(arguments, mask, peers, ctx.call)
    else:
        message, u = ops.local_gradients(*arguments, 0, mask)
    if keep:  # what comes back is there already
        dy, through = u, (weight, None, None, 0, 0.0)
    dx = dweight = dbias = None
    # One rank's share is the whole, and comes with dx.
    shares = layer.affine_grad == "share" and not (peers is None and needs_x)
    shares = shares and (needs_weight or needs_bias)
    if exchanges(ctx):
        own = message if shares else None
        dx, dweight, dbias = ops.input_gradient(
            dy, x, merged, rest, mean, rstd, info, *through, *dtypes, ranks, mask, own
        )
    elif shares:
        dweight, dbias = ops.affine_gradient_shares(message, x, mean, rstd, *dtypes)
    return (
        dx if needs_x else None,
        dweight if needs_weight else None,
        dbias if needs_bias else None,
        dy if needs_residual else None,
    )


@recorded(lambda *arguments: arguments[6])
def train_step(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    layer: Layer,
    *,
    num_batches_tracked: Tensor | None = None,
    call: Tensor | None = None,
    mask: Tensor | None = None,
    last_count: Tensor | None = None,
) -> Tensor:
    """One training forward: exchange, normalize, update the running statistics in place.

    momentum None: cumulative averaging by num_batches_tracked. call: int64 [1], the number of this
    call, advanced by one. last_count: int64 [1], becomes the global count.
    """
    if torch.jit.is_tracing():
        refuse_tracing(layer, x, call)
    peers = layer.peers()
    # A compiler plans memory by itself, and cannot trace this.
    inplace = layer.writes_over_input and not torch.compiler.is_compiling()
    segment = _recomputation.segment(layer, residual is not None, x, mask)
    again = segment is not None and segment.kept is not None
    try:
        check_transforms(layer.name, input=x, weight=weight, bias=bias, residual=residual)
        check_options(layer)
        check_arguments(x, running_mean, running_var, weight, bias, residual)
        check_counter(layer.momentum, running_mean, running_var, num_batches_tracked)
        if call is not None and call.device != x.device:
            raise ValueError(
                f"input: got a tensor on {x.device}, expected {call.device}, where the layer lies"
            )
        if inplace:
            check_in_place(x, weight, bias, residual, layer.negative_slope)
            if segment is not None:
                segment.check_in_place(x)
        if mask is not None:
            check_mask(mask, x)
            if layer.writes_over_input:
                raise ValueError("mask: got one with inplace=True, expected None")
    except Exception as error:
        if not again:
            with outside_transforms():
                per_channel = (t for t in (running_mean, weight, bias) if t is not None)
                tensors = {"x": x, "parameter": next(per_channel, None), "counter": call}
                _exchange.reject(peers, layer.call_of(x, call), error, **tensors)
        raise
    if mask is not None:
        mask = mask.contiguous()
    if _exported.exporting():
        function = _exported.training_step
    else:
        function = (_BatchNormInPlace if inplace else _BatchNormTraining).apply
    updates = None
    # Both runs of a checkpointed segment take the same operators.
    apart = inplace or segment is not None or layer.statistics == "welford"
    if not (apart or torch.compiler.is_compiling()):
        updates = (running_mean, running_var, num_batches_tracked, call, last_count, layer.momentum)
    arguments = (x, weight, bias, residual, mask, call, layer, peers, segment, updates)
    if updates is not None:
        return function(*arguments)
    y, mean, var, info = function(*arguments)
    if again:
        return y
    if running_mean is not None or num_batches_tracked is not None or call is not None:
        ops.update_running_statistics(
            running_mean, running_var, num_batches_tracked, call, mean, var, info, layer.momentum
        )
    if last_count is not None:
        last_count.copy_(info[:1])
    return y
