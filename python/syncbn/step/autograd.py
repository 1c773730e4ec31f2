# SPDX-License-Identifier: Apache-2.0
"""The training step as PyTorch calls it: in eager mode, in a graph, of a tensor's class, in parts,
or written down by a tracer."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler
from torch.overrides import handle_torch_function, has_torch_function_variadic

from ..operators import info_of, ops
from . import as_operator, layer_state, masks, recomputation, surroundings
from .layer_state import Identity, LayerState
from .node import apply_step
from .options import (
    RUNNING,
    Options,
    check_arguments,
    check_counter,
    check_in_place,
    check_options,
    check_plain,
)
from .surroundings import (
    check_transforms,
    in_transform,
    is_fake,
    plain,
    recorded,
    refuse_tracing,
    tracer,
)
from .training import averaging, turn_of

_takes_functions, _modes = torch._C._is_torch_function_enabled, torch._C._len_torch_dispatch_stack
_tracing = torch._C._get_tracing_state


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
    """Makes one training forward: exchange, normalize, update running statistics in place.

    options.momentum None: cumulative averaging by num_batches_tracked. state: its call number is
    advanced by one, and its count becomes the global one.
    """
    running = (running_mean, running_var, num_batches_tracked)
    given = (x, running, weight, bias, residual, mask, options, state)
    return _plan_of(*given)(*given)


def _plan_of(x, running, weight, bias, residual, mask, options, state) -> Callable[..., Tensor]:
    """Decides, once, how the step is made."""
    if (
        not torch.compiler.is_compiling()
        and type(x) is Tensor
        and type(state) is LayerState
        and (x.is_cpu or x.is_cuda)
        and not profiler._is_profiler_enabled
        and _takes_functions()
        and _modes() == 0
        and _tracing() is None
        and not in_transform()
        and forward_ad._current_level < 0
        and not has_torch_function_variadic(*running, weight, bias, residual, mask)
    ):
        return _quick if recomputation.around() is None else _eager
    if not _takes_functions():
        return _inside_a_class
    if _has_class(x, running, weight, bias, residual, mask):
        return _by_class
    return _way_of(x, running, weight, bias, residual, mask, options, state)


def _has_class(x, running, weight, bias, residual, mask) -> bool:
    """Tells whether a class with a __torch_function__ is to see the step as one call. The number of
    batches is taken as it is."""
    return has_torch_function_variadic(x, *running[:2], weight, bias, residual, mask)


def _way_of(x, running, weight, bias, residual, mask, options, state) -> Callable[..., Tensor]:
    """Decides for tensors that are taken as they are."""
    if surroundings.has_dtensor((x, weight, bias, residual, mask, *running)):
        return _of_parts
    if tracer() is not None:
        return _in_operators
    parameter = next((t for t in (*running[:2], weight, bias) if isinstance(t, Tensor)), None)
    return _in_graph if torch.compiler.is_compiling() or is_fake(x, parameter) else _eager


def _by_class(x, running, weight, bias, residual, mask, options, state) -> Tensor:
    """Has the classes of tensors make the step as one call."""
    running = *running[:2], plain(running[2])
    named = {"weight": weight, "bias": bias, "residual": residual, "mask": mask}
    relevant = tuple(t for t in (x, *running[:2], *named.values()) if t is not None)
    others = {"options": options, "state": state, "num_batches_tracked": running[2]}
    try:  # by position and by name as F.batch_norm has them
        return handle_torch_function(train_step, relevant, x, *running[:2], **named, **others)
    except TypeError as error:
        # Of classes that do not take each other, before the step has begun.
        if str(error).startswith(f"no implementation found for '{__name__}.train_step'"):
            live = layer_state.named(state)
            with torch._C.DisableTorchFunctionSubclass():
                with turn_of(live, options, live.peers(options), x, parameter=weight):
                    raise
        raise


def _inside_a_class(x, running, weight, bias, residual, mask, options, state) -> Tensor:
    """Makes the step inside the __torch_function__ of a tensor's class."""
    if not options.writes_over_input:  # an alias would be a view
        x = plain(x)
    running = (plain(running[0]), plain(running[1]), running[2])
    weight, bias, residual, mask = map(plain, (weight, bias, residual, mask))
    given = (x, running, weight, bias, residual, mask, options, state)
    y = _way_of(*given)(*given)
    return y.clone() if torch.compiler.is_compiling() else y


def _quick(x, running, weight, bias, residual, mask, options, state) -> Tensor:
    """Makes the usual step in eager mode, whose arguments the operators alone check. What they
    refuse gets the words of _check()."""
    batches = running[2]
    if not (
        type(weight) in _PLAIN
        and type(bias) in _PLAIN
        and type(running[0]) in _PLAIN
        and type(running[1]) in _PLAIN
        and (batches is None or (type(batches) is Tensor and batches.dtype is torch.int64))
        and (x.is_cpu if state.call is None else state.call.device == x.device)
        and (residual is None or _is_like(residual, x))
        and (mask is None or (type(mask) is Tensor and _is_there(mask) and mask.is_contiguous()))
        and not (options.inplace or x.is_neg())
        and not (weight is not None and weight.is_neg() or bias is not None and bias.is_neg())
    ):
        return _eager(x, running, weight, bias, residual, mask, options, state)
    peers, tensors = state.peers(options), (x, running, weight, bias, residual, mask)
    words = partial(_check, *tensors, options, peers is None)
    parts, parameter = (residual, weight, bias), running[0] if weight is None else weight
    with turn_of(state, options, peers, x, parts, words, parameter) as turn:
        return apply_step(turn, x, weight, bias, residual, mask, running, options, state)


#: Classes of parameters whose operators nobody else sees.
_PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None)))


def _is_there(tensor: Tensor) -> bool:
    """Tells whether its entries lie in memory as they are."""
    return tensor.layout is torch.strided and not tensor.is_neg()


def _is_like(residual: Any, x: Tensor) -> bool:
    return (
        type(residual) is Tensor
        and _is_there(residual)
        and residual.shape == x.shape
        and residual.dtype is x.dtype
        and residual.device == x.device
    )


@recorded(lambda *arguments: arguments[-1].name)
def _eager(x, running, weight, bias, residual, mask, options, state) -> Tensor:
    """Makes the step of any eager call, after the checks of its arguments."""
    live = layer_state.named(state)
    _check_transforms(x, weight, bias, residual, live)
    peers = live.peers(options)
    segment = recomputation.segment(live, options, residual is not None, x, mask)
    if segment is not None and segment.kept is not None:
        peers = None  # the others are elsewhere
    parts, parameter = (residual, weight, bias), running[0] if weight is None else weight
    with turn_of(live, options, peers, x, parts, parameter=parameter) as turn:
        _check(x, running, weight, bias, residual, mask, options, peers is None)
        if options.writes_over_input:
            check_in_place(x, weight, bias, residual, options.negative_slope)
            if segment is not None:
                segment.check_in_place(x)
        live.move(x.device)
        mask = None if mask is None else mask.contiguous()
        x, weight, bias, residual, mask = (
            t if t is None or not t.is_neg() else t.resolve_neg()
            for t in (x, weight, bias, residual, mask)
        )
        return apply_step(turn, x, weight, bias, residual, mask, running, options, live, segment)


def _check_transforms(x, weight, bias, residual, state) -> None:
    named = ("input", x), ("weight", weight), ("bias", bias), ("residual", residual)
    check_transforms(state, named)


def _check(x, running: Any, weight, bias, residual, mask, options, alone: Any = None) -> None:
    """Raises an error that names the argument, what was given and what is allowed. alone: there is
    one rank; None: tensors may have no values."""
    traced = alone is None
    check_options(options)
    if not traced:
        given = {"input": x, "weight": weight, "bias": bias, "residual": residual, "mask": mask}
        check_plain(alone, **given, **dict(zip(RUNNING, running)))
    mean, var, batches = running
    check_arguments(x, mean, var, weight, bias, residual, traced)
    check_counter(options.momentum, mean, var, batches, traced)
    if mask is not None:
        masks.check_mask(mask, x, options.writes_over_input)


def _in_graph(x, running, weight, bias, residual, mask, options, state) -> Tensor:
    """Makes the step as one operator of a graph, which finds the layer's state when it runs."""
    _check_transforms(x, weight, bias, residual, state)
    _check(x, running, weight, bias, residual, mask, options)
    mask = None if mask is None else mask.contiguous()
    y, saved = as_operator.training_step(x, weight, bias, residual, mask, options, state)
    _update(running, saved, options)
    return y


def _update(running: tuple, saved: Tensor, options: Options) -> None:
    """Updates the running statistics of a step in a graph."""
    *averages, tracked = running
    averaged = tracked is not None and tracked.is_floating_point()
    momentum = averaging(options, tracked).momentum if averaged else options.momentum
    counter = None if averaged else tracked
    if any(t is not None for t in (*averages, counter)):
        ops.update_running_statistics(*averages, counter, saved, momentum)
    if averaged:
        tracked.add_(info_of(saved)[0] > 0)


def _in_operators(x, running, weight, bias, residual, mask, options, state) -> Tensor:
    """Makes the step of one rank in PyTorch's own operators, as nn.BatchNorm makes it."""
    live = layer_state.named(state)
    _check_transforms(x, weight, bias, residual, live)
    refuse_tracing(live, live.sharing if options.sync else None)
    check_options(options)
    mean, var, tracked = running
    momentum = options.momentum
    if tracked is not None:
        tracked.add_(1)
    if momentum is None:
        momentum = 0.0 if tracked is None else 1.0 / float(tracked)
    return masks.plain(x, mean, var, weight, bias, residual, mask, options, momentum, True)


def _of_parts(x, running, weight, bias, residual, mask, options, state) -> Tensor:
    """Makes the step where some of the tensors are DTensors, of this rank's parts."""
    live = layer_state.named(state)
    samples = {"input": x, "residual": residual, "mask": mask}
    shared = {"weight": weight, "bias": bias, **dict(zip(RUNNING, running))}
    peers, shares = live.peers(options), options.affine_grad == "share"
    with turn_of(live, options, peers, None):
        given = surroundings.parts(samples, shared, peers, shares)
    own, w, b, z, m = (given[n] for n in ("input", "weight", "bias", "residual", "mask"))
    parts: Any = (own, tuple(given[name] for name in RUNNING), w, b, z, m, options, state)
    return surroundings.as_dtensor(_way_of(*parts)(*parts), x)
