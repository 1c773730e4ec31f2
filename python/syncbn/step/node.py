# SPDX-License-Identifier: Apache-2.0
"""The training step as a node of autograd, which backward() visits."""

import torch

from ..exchange import host
from ..operators import ops, without_modes
from . import layer_state, second_derivatives
from .layer_state import LayerState
from .options import Options, form_of
from .surroundings import Streams
from .training import Given, Step, backward, forward, leave, needs_of, takes_part


class _BatchNormTraining(torch.autograd.Function):
    """Makes one step. tensors: K xs, weight, bias, K residuals, K masks. One node for all: nodes
    that wait for each other would deadlock, because one backward() visits the nodes of CPU tensors
    in one thread."""

    @staticmethod
    def forward(ctx, given: Given, *tensors):
        if len(tensors) == 5:
            x, weight, bias, residual, mask = tensors
            parts, needs = ((x,), weight, bias, (residual,), (mask,)), ctx.needs_input_grad[1:5]
            ctx.step, (y,), saved = forward(given, needs, *parts)
            if y is x:
                ctx.mark_dirty(x)
            ctx.save_for_backward(*saved)
            return y
        k = len(tensors) // 3
        (weight, bias), xs, others = tensors[k : k + 2], tensors[:k], tensors[k + 2 :]
        parts = xs, weight, bias, others[:k], others[k:]
        ctx.step, ys, saved = forward(given, needs_of(*parts[:4]), *parts)
        ctx.save_for_backward(*saved)
        ctx.streams = Streams(xs)
        ctx.set_materialize_grads(False)
        return tuple(ys)

    @staticmethod
    def backward(ctx, *dys):
        saved, step, k = ctx.saved_tensors, ctx.step, len(dys)  # once: as checkpointing gives
        if k > 1:
            ctx.streams.enter((*dys, *saved))
        if step.form.in_place:
            saved = _recovered(step, *saved)
        if not torch.is_grad_enabled():
            results = backward(step, dys, *saved)
        else:  # create_graph=True
            results = _again(step, dys, *saved)
        if k > 1:
            ctx.streams.leave(results)
        return None, *results, *(None,) * k


def _again(step: Step, dys, *saved) -> tuple:
    """Gives the gradients, where they will be differentiated themselves."""
    name = step.state.name
    if len(dys) == 1 and not step.form.in_place:
        return second_derivatives.differentiable(step, backward, dys[0], *saved)
    with torch.no_grad():
        results = backward(step, dys, *saved)
    if len(dys) > 1:
        return second_derivatives.refuse(
            f"{name}: got a second derivative of a list of inputs, expected one input", results
        )
    return second_derivatives.refuse(
        f"{name}: got a second derivative with inplace=True, which keeps no input to "
        "differentiate by; expected inplace=False",
        results,
    )


def _recovered(step, weight, bias, y, saved, _, mask) -> tuple:
    """Gives what is saved, with the input that a forward in place wrote over, and its signs:
    computed again from x they could differ next to 0."""
    with torch.no_grad():
        given = (y, saved, weight, bias, step.options.negative_slope)
        x, bits = step.transport(y).refusing(ops.recover_input, given, y, step.call("backward"))
    return weight, None, x, saved, bits, mask


#: Function.apply without its look for transforms of torch.func, of which there are none.
_apply = super(torch.autograd.Function, _BatchNormTraining).apply


def apply_step(
    xs, weight, bias, residuals, masks, running, options, state, peers, segment=None, checked=True
):
    """Gives y, or of several inputs the ys; the arguments are those of training.forward()."""
    try:
        word, form = 0, form_of(*options)
        if peers is not None or segment is not None:
            word = takes_part(needs_of(xs, weight, bias, residuals), options, segment)
        given = Given(running, options, form, state, peers, word, segment, checked)
        apply = _BatchNormTraining.apply if checked else _apply
        return apply(given, *xs, weight, bias, *residuals, *masks)
    except BaseException as error:
        leave(error, state, options, peers, xs[0], segment)
        raise


def tell(error: BaseException, live: LayerState, x: object, parameter, options: Options) -> None:
    """Tells the others that this rank refuses its input."""
    with without_modes():
        peers, call = layer_state.way(live, live.peers(options)), live.call_of(x, options)
        host.reject(peers, call, error, x=x, parameter=parameter, counter=live.call)
