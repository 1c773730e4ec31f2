# SPDX-License-Identifier: Apache-2.0
"""The training step as a node of autograd, which backward() visits."""

from typing import Any

import torch

from ..operators import ops
from . import second_derivatives, training
from .training import Given, needs_of, takes_part


class _BatchNormTraining(torch.autograd.Function):
    """Makes one step of one input. tensors: x, weight, bias, residual, mask."""

    @staticmethod
    def forward(ctx, turn, given, *tensors):
        ctx.step, y, saved = training.forward(turn, given, ctx.needs_input_grad[2:6], *tensors)
        if y is tensors[0]:
            ctx.mark_dirty(y)
        ctx.save_for_backward(*saved)
        return y

    @staticmethod
    def backward(ctx, dy):
        saved, step = ctx.saved_tensors, ctx.step  # once: as checkpointing gives
        if step.form.in_place:
            saved = recovered(step, *saved)
        if not torch.is_grad_enabled():
            return None, None, *training.backward(step, dy, *saved), None
        return None, None, *_again(step, dy, *saved), None  # create_graph=True


def _again(step, dy, *saved) -> tuple:
    """Gives the gradients, where they will be differentiated themselves."""
    if not step.form.in_place:
        return second_derivatives.differentiable(step, training.backward, dy, *saved)
    with torch.no_grad():
        results = training.backward(step, dy, *saved)
    return second_derivatives.refuse(
        f"{step.state.name}: got a second derivative with inplace=True, which keeps no input to "
        "differentiate by; expected inplace=False",
        results,
    )


def recovered(step, weight, bias, y, saved, _, mask) -> tuple:
    """Gives what is saved, with the input that a forward in place wrote over, and its signs:
    computed again from x they could differ next to 0."""
    with torch.no_grad(), step.turn(y) as turn:
        try:
            x, bits = ops.recover_input(y, saved, weight, bias, step.form.constants)
        except Exception as error:
            turn.refused(error)
    return weight, None, x, saved, bits, mask


#: Function.apply without its look for transforms of torch.func, of which there are none.
_apply = super(torch.autograd.Function, _BatchNormTraining).apply


def apply_step(turn, x, weight, bias, residual, mask, running, options, state, segment=None) -> Any:
    """Gives y of a step whose transforms were looked for; the arguments are those of
    training.forward()."""
    word, peers = 0, turn.peers
    if peers is not None or segment is not None:
        word = takes_part(needs_of(x, weight, bias, residual), options, segment)
    given = Given(running, options, state, peers, word, segment)
    return _apply(turn, given, x, weight, bias, residual, mask)


def is_layer(node: object) -> bool:
    """Tells whether a node of a graph is that of a layer's step."""
    return getattr(type(node), "_forward_cls", None) in _classes


#: Of the nodes of layers; devices.py adds its own.
_classes: set[type] = {_BatchNormTraining}


def of_layers(cls: type) -> type:
    """Makes a class of nodes known to is_layer()."""
    _classes.add(cls)
    return cls
