# SPDX-License-Identifier: Apache-2.0
"""The gradient of a training step as a function that can itself be differentiated, any number of
times, in PyTorch's own operators and float64. u is the gradient that comes back through the
activation, S the sum over the samples of all ranks, N their number, and xc = x - mean:

    dx = weight * rstd * (u - S(u) / N - xc * rstd**2 * S(u * xc) / N)

dweight = rstd * sum(u * xc) and dbias = sum(u), over this rank's samples or all ranks'."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..exchange.call import Call, Peers, tag_of
from ..exchange.host import transport_of
from ..exchange.turn import Turn
from ..operators import OWN, WANTS_U, info_of, ops
from .options import activation_of, form_of
from .surroundings import check_not_batched, recorded

_DIRECTION = "second backward"


class _Exchange(NamedTuple):
    """Describes an exchange of second derivatives: with whom, of which call, and which of its
    sums."""

    peers: Peers | None
    call: Call
    number: int  # the layer's
    what: str

    def tag(self, x: Tensor) -> int:
        """Gives the tag of a sum of x. Not of the input's dtype: an empty rank may have another
        one, and sums are float64 everywhere."""
        return tag_of(self.number, self.call.number, self.what, tuple(x.shape))

    def sum(self, x: Tensor) -> Tensor:
        return x if self.peers is None else _SumOfRanks.apply(x, self)


class _SumOfRanks(torch.autograd.Function):
    """The sum over the group on every rank, whose gradient is the sum of the gradients."""

    @staticmethod
    def forward(ctx, x, exchange):
        ctx.exchange = exchange
        call = exchange.call._replace(direction=f"{exchange.call.direction} ({exchange.what})")
        own = x.clone(memory_format=torch.contiguous_format)
        return transport_of(exchange.peers, x.device).sum(own, exchange.tag(x), call)

    @staticmethod
    def backward(ctx, gradient):
        exchange = ctx.exchange._replace(what=f"gradient of {ctx.exchange.what}")
        return exchange.sum(gradient), None


def _channels(values: Tensor, x: Tensor) -> Tensor:
    """Gives one value per channel the shape that broadcasts over x."""
    return values.view(1, -1, *(1,) * (x.dim() - 2))


class _Statistics(torch.autograd.Function):
    """Makes mean and rstd, which forward has found exactly, functions of the x of all ranks."""

    @staticmethod
    def forward(ctx, x, mean, rstd, count, exchange):
        mean, rstd = mean.clone(), rstd.clone()
        ctx.save_for_backward(x, mean, rstd, count)
        ctx.exchange = exchange
        return mean, rstd

    @staticmethod
    def backward(ctx, dmean, drstd):
        x, mean, rstd, count = ctx.saved_tensors
        dmean, drstd = ctx.exchange.sum(torch.stack((dmean, drstd))) / count
        # rstd = (var + eps)^(-1/2), and the gradient of var is 2 (x - mean) / count.
        centered = x - _channels(mean, x)
        dx = _channels(dmean, x) - centered * _channels(drstd * rstd**3, x)
        return dx, None, None, None, None


def _gradients(step, dy, x, weight, mean, rstd, count, positive, counting):
    """Gives the gradients of x (None if not wanted), weight, bias and residual, in float64.

    step: the training step. positive: where the activation passes dy, None for
    everywhere. counting: the elements that a mask lets count, None for all. The exchanges depend on
    nothing that may differ between ranks.
    """
    options, shares = step.options, step.options.affine_grad == "share"
    call = step.call(_DIRECTION)
    needs_x = step.needs[0] or (step.peers is not None and step.backward.x)

    if counting is not None:  # the others add nothing to any sum
        dy = torch.where(counting, dy, 0)
        x = torch.where(counting, x, _channels(mean, x))

    def exchange(what):
        return _Exchange(step.peers, call, step.state.number, what)

    if needs_x:
        mean, rstd = _Statistics.apply(x, mean, rstd, count, exchange("statistics"))
    if weight is not None and not shares:
        weight = weight.clone()  # whose gradient is the sum over the ranks
        weight.register_hook(exchange("weight").sum)
    u = dy
    if positive is not None:
        slope = activation_of(options.activation).slope
        u = torch.where(positive, dy, (options.negative_slope if slope is None else slope) * dy)
    axes = [0, *range(2, x.dim())]
    centered = x - _channels(mean, x)
    own = torch.stack((u.sum(axes), (u * centered).sum(axes)))
    whole = exchange("sums").sum(own) if step.exchanges else own
    dx = None
    if needs_x:
        du, dcentered = whole / count
        scale = rstd if weight is None else weight * rstd
        dx = u - _channels(du, x) - centered * _channels(dcentered * rstd**2, x)
        dx = dx * _channels(scale, x)
        if counting is not None:
            dx = torch.where(counting, dx, 0)
    dbias, dcentered = own if shares else whole
    return dx, dcentered * rstd, dbias, u


def _check_kept(dy: Tensor, x: Tensor, weight: Tensor | None, saved: Tensor, call: Call) -> None:
    channels = (saved.numel() - 2) // 3
    for name, tensor, shape in (("input", x, dy.shape), ("weight", weight, (channels,))):
        if tensor is not None and tensor.shape != shape:
            raise ValueError(
                f"{call}: {name}: got shape {tuple(tensor.shape)}, expected {tuple(shape)} still"
            )


class _Differentiable(torch.autograd.Function):
    """Gives what `gradient` gives, for a backward that builds a graph.

    step: the training step; gradient(step, dy, *saved) gives the gradients of x, weight, bias
    and residual.
    """

    @staticmethod
    def forward(ctx, step, gradient, dy, *saved):
        ctx.save_for_backward(dy, *saved)
        ctx.step = step
        return gradient(step, dy, *saved)

    @staticmethod
    @recorded(lambda ctx, *_: ctx.step.state.name, " second backward")
    def backward(ctx, *cotangents):
        dy, weight, bias, x, saved, activation_mask, mask = ctx.saved_tensors
        mean, _, rstd = saved[:-2].view(3, -1)
        step, again = ctx.step, torch.is_grad_enabled()
        # What was replaced since the first derivative is told before anything is exchanged.
        now = (dy, x, weight, saved)
        turn = Turn(step.peers, partial(step.call, _DIRECTION), x, step.state)
        with turn:
            _check_kept(*now, turn.call)
        call = turn.call
        given = [c for c in cotangents if c is not None]
        for cotangent in given:
            check_not_batched(call, cotangent)
        positive = None
        if step.options.activation != "none":
            with torch.no_grad():  # the gradient of ones with slope 0, by the very bits of forward
                none = step.options._replace(negative_slope=0.0, inplace=False)
                constants = form_of(0, *none).constants
                ones = torch.ones_like(x)
                through = (ones, x, saved, weight, bias, activation_mask, mask, constants)
                kept = ops.backward_begin(*through, WANTS_U, None, None, OWN)[3]
                positive = kept != 0
        with torch.enable_grad():
            # Aliases, so that a dy which depends on x is not differentiated through. All of them
            # take part whatever this rank needs: other ranks may need more, and exchange.
            sources = [
                t.view_as(t) if again and t.requires_grad else t.detach().requires_grad_()
                for t in (dy, x, weight)
                if t is not None
            ]
            values = [t.double() for t in sources]
            through_layer = values[0], values[1], None if weight is None else values[2]
            count = info_of(saved)[0].clamp(min=1).double()
            counting = None if mask is None else mask.to(torch.bool).unsqueeze(1)
            outputs = _gradients(step, *through_layer, mean, rstd, count, positive, counting)
            # Where the step gave no gradient there is no cotangent.
            results = torch.autograd.grad(
                [o for o, c in zip(outputs, cotangents) if c is not None],
                sources,
                [c.double() for c in given],
                create_graph=again,
                allow_unused=True,
            )
        ddy, dx, dweight = results if weight is not None else (*results, None)
        return None, None, ddy, dweight, None, dx, *(None,) * 3


def differentiable(step, gradient: Callable, dy: Tensor, *saved: Any) -> tuple:
    """Gives what gradient(step, dy, *saved) gives, with a graph behind it."""
    check_not_batched(step.call("backward"), dy)
    return _Differentiable.apply(step, gradient, dy, *saved)


def refuse(text: str, gradients: tuple) -> tuple:
    """Gives the gradients, whose differentiation raises `text`."""

    def fail(_: Tensor) -> None:
        raise NotImplementedError(text)

    refused = [None if t is None else t.detach().requires_grad_().view_as(t) for t in gradients]
    for gradient in refused:
        if gradient is not None:
            gradient.register_hook(fail)
    return tuple(refused)
