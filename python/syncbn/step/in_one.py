# SPDX-License-Identifier: Apache-2.0
"""The usual training step in eager mode: one operator for each direction, with the exchange inside.
What this does not know, and what the operators refuse, goes the general way of adapters.py, whose
errors have words."""

import functools
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import forward_ad

from ..exchange import agreement
from ..exchange.attempt import Refused
from ..exchange.transports import transport_of
from ..operators import ops
from . import second_derivatives
from .layer_state import LayerState
from .options import Options, check_like_input, check_options, is_strided
from .profiling import recorded
from .recomputation import outside
from .training import Inputs, Step, backward, forward, like, takes_part

_forward = ops.forward_step.default
_backward = ops.backward_step.default
_in_transform = torch._C._are_functorch_transforms_active


@functools.lru_cache(maxsize=1024, typed=True)
def _activation_of(*options: Any) -> int | None:
    """The number of the activation, if the operators know these options."""
    checked = Options(*options)
    check_options(checked)
    usual = checked.statistics == "reproducible" and not checked.writes_over_input
    return checked.activation_kind if usual else None


def _is_usual(x: object) -> bool:
    """Whether it is a batch on the CPU in plain eager mode, in no checkpointed segment."""
    return (
        type(x) is Tensor
        and x.is_cpu
        and is_strided(x)
        and x.dim() > 1
        and outside()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._get_tracing_state() is None
        and not _in_transform()
        and forward_ad._current_level < 0
    )


def train_step(
    x: Tensor,
    running: tuple[Tensor | None, Tensor | None, Tensor | None],
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    mask: Tensor | None,
    options: Options,
    state: object,
) -> Tensor | None:
    """As adapters.train_step(); None, and nothing has happened, where it does not take the call."""
    if not (_is_usual(x) and type(state) is LayerState):
        return None
    try:
        kind = _activation_of(*options)
        if residual is not None:
            check_like_input("residual", residual, x)
    except (TypeError, ValueError):
        return None
    peers = state.peers(options)
    if kind is None or (peers is not None and peers.group_name != state.group):
        return None  # the operators do not know the options, or the paths were not compared yet
    try:
        return _step(x, running, weight, bias, residual, mask, options, state, peers, kind)
    except Refused:
        return None
    except BaseException as error:
        transport_of(peers, x.device).leave(error, state.call_of(x, options))
        raise


def _step(x, running, weight, bias, residual, mask, options, state, peers, kind) -> Tensor | None:
    transport = transport_of(peers, x.device)
    if not transport.takes_steps:
        return None
    if residual is not None and residual.stride() != x.stride():
        residual = transport.refusing(like, (residual, x), x, state.call_of(x, options))
    word = 0 if peers is None else takes_part((x,), (weight, bias), (residual,), options)
    given = options, state, peers, transport, word, kind, running
    return _apply(given, x, weight, bias, residual, mask)


class _BatchNormTraining(torch.autograd.Function):
    @staticmethod
    def forward(ctx, given, x, weight, bias, residual, mask):
        options, state, peers, transport, word, kind, running = given
        call = state.call_of(x, options)
        identity = options.identity(state.number, residual is not None)
        arguments = (
            *(x, *running, weight, bias, residual, mask, state.call, state.count, identity),
            *(options.eps, options.momentum, kind, options.negative_slope, word),
        )
        outputs, exchanged = transport.step(_forward, arguments, call)
        y, statistics, activation_mask, count, tag, merged_word = outputs
        if exchanged is None:
            if peers is None:
                back = agreement.Backward(True, True)
            else:
                back = agreement.backward_of(merged_word, word, peers, call)
            bias_dtype = None if bias is None else bias.dtype
            ctx.step = state, options, peers, call.backward(), back, bias_dtype
            ctx.made = kind, transport, count, tag
            again = bias if kind != 0 and residual is None else None
            saved: tuple = (weight, again, x, statistics, activation_mask, mask)
        else:  # it has something to say that the operator does not know
            inputs = Inputs((x,), weight, bias, (residual,), (mask,), options, state, peers, word)
            updates = (*running, state.call, state.count, options.momentum)
            step, (y, *_), saved = forward(inputs, updates, exchanged)
            ctx.step = step[:6]
            weight, again, x, mean, rstd, info, activation_mask, mask = saved
            ctx.made = kind, transport, *info.tolist()
            saved = (weight, again, x, torch.cat([mean, rstd]), activation_mask, mask)
        ctx.save_for_backward(*saved)
        return y

    @staticmethod
    def backward(ctx, dy):
        saved = ctx.saved_tensors
        step = Step._make((*ctx.step, ctx.needs_input_grad[1:5], 0))
        results: Any = None
        exchanged = None
        if torch.is_grad_enabled():  # create_graph=True
            apart = _apart(saved, ctx.made)
            results = second_derivatives.differentiable(step, backward, dy, *apart)
        else:
            if step.needs[0] and not step.backward.absent and _is_plain(dy):
                results, exchanged = _back(step, ctx.made, dy, saved)
            if results is None:
                results = backward(step, (dy,), *_apart(saved, ctx.made), exchanged=exchanged)
        return None, *results, None


#: Function.apply without its look for transforms of torch.func, of which there are none.
_apply = super(torch.autograd.Function, _BatchNormTraining).apply


@recorded(lambda step, *_: step.state.name, " backward")
def _back(step: Step, made: tuple, dy: Tensor, saved: tuple) -> tuple[tuple | None, tuple | None]:
    """(Gradients of x, weight, bias and the residual, None), or (None, what sums_of() gives) after
    an exchange, or (None, None) where nothing has happened."""
    weight, bias, x, statistics, activation_mask, mask = saved
    (kind, transport, count, tag), options = made, step.options
    try:
        _, needs_weight, needs_bias, needs_residual = step.needs
        keep = needs_residual and (kind != 0 or mask is not None)
        if not is_strided(dy) or dy.stride() != x.stride():
            dy = transport.refusing(like, (dy, x), x, step.call)
        arguments = (
            *(dy, x, statistics, weight, bias, activation_mask, mask, count, tag, kind),
            *(options.negative_slope, keep, weight.dtype if needs_weight else None),
            *(step.bias_dtype if needs_bias else None, options.affine_grad == "share"),
        )
        (dx, dweight, dbias, u), exchanged = transport.step(_backward, arguments, step.call)
    except Refused:
        return None, None
    except BaseException as error:
        transport.leave(error, step.call)
        raise
    if exchanged is not None:
        message, merged, rest = exchanged
        return None, (message, [u] * keep, merged, rest)
    return (dx, dweight, dbias, (u if keep else dy) if needs_residual else None), None


def _apart(saved: tuple, made: tuple) -> tuple:
    """What is saved, as training.backward() takes it."""
    weight, bias, x, statistics, activation_mask, mask = saved
    mean, rstd = statistics.chunk(2)
    info = torch.tensor(made[2:], dtype=torch.int64, device="cpu")
    return weight, bias, x, mean, rstd, info, activation_mask, mask


def _is_plain(dy: object) -> bool:
    """Whether it is a tensor outside of transforms."""
    return type(dy) is Tensor and not is_legacy_batchedtensor(dy) and not _in_transform()
