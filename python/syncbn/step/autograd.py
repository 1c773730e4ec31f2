# SPDX-License-Identifier: Apache-2.0
"""The training step as PyTorch calls it: checked, in eager mode or in a graph."""

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad, profiler
from torch.overrides import handle_torch_function, has_torch_function, has_torch_function_variadic

from ..exchange.call import Refused
from ..operators import info_of, ops
from . import as_operator, layer_state, masks, recomputation, surroundings
from .layer_state import Identity, LayerState
from .node import apply_step, tell
from .options import (
    RUNNING,
    Options,
    check_arguments,
    check_counter,
    check_in_place,
    check_like_input,
    check_options,
    check_plain,
    form_of,
)
from .surroundings import (
    check_transforms,
    in_transform,
    plain,
    recorded,
    refuse_tracing,
    tracer,
)


def _is_fake(x: object, parameter: Tensor | None) -> bool:
    """Tells whether x has a shape and no values: a tensor of a mode that traces, or a meta tensor,
    if the layer is on meta, too. parameter: of the layer, if it has any."""
    if not isinstance(x, Tensor):
        return False
    if x.is_meta:
        return parameter is None or parameter.is_meta
    if isinstance(x, FakeTensor):
        return True
    if torch._C._len_torch_dispatch_stack() == 0:
        return False
    proxies = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)  # of make_fx
    return proxies is not None or detect_fake_mode() is not None


def _plain_step(x, running: tuple, weight, bias, residual, mask, options) -> Tensor:
    """Makes the step of one rank in PyTorch's own operators, as nn.BatchNorm makes it."""
    check_options(options)
    mean, var, tracked = running
    momentum = options.momentum
    if tracked is not None:
        tracked.add_(1)
    if momentum is None:
        momentum = 0.0 if tracked is None else 1.0 / float(tracked)
    return masks.plain(x, mean, var, weight, bias, residual, mask, options, momentum, True)


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
    y = _usual(*given)
    if y is not None:
        return y
    if torch._C._is_torch_function_enabled():
        return _recorded_step(*given)
    # Inside that of a tensor's class, whose range of a profile is there already.
    if not options.writes_over_input:  # an alias would be a view
        x = plain(x)
    running = (plain(running_mean), plain(running_var), num_batches_tracked)
    weight, bias, residual, mask = map(plain, (weight, bias, residual, mask))
    y = _step(x, running, weight, bias, residual, mask, options, state)
    return y.clone() if torch.compiler.is_compiling() else y


@recorded(lambda *arguments: arguments[-1].name)
def _recorded_step(x, running, weight, bias, residual, mask, options, state) -> Tensor:
    """Makes the step in a profile; classes with a __torch_function__ see it as one call."""
    if has_torch_function_variadic(x, *running, weight, bias, residual, mask):
        running = *running[:2], plain(running[2])
    named = {"weight": weight, "bias": bias, "residual": residual, "mask": mask}
    relevant = tuple(t for t in (x, *running[:2], *named.values()) if t is not None)
    if not has_torch_function(relevant):
        return _step(x, running, weight, bias, residual, mask, options, state)
    others = {"options": options, "state": state, "num_batches_tracked": running[2]}
    try:  # by position and by name as F.batch_norm has them
        return handle_torch_function(train_step, relevant, x, *running[:2], **named, **others)
    except TypeError as error:
        # Of classes that do not take each other, before the step has begun.
        if str(error).startswith(f"no implementation found for '{__name__}.train_step'"):
            live = layer_state.named(state)
            with torch._C.DisableTorchFunctionSubclass():
                tell(error, live, x, weight, options)
        raise


_takes_functions, _modes = torch._C._is_torch_function_enabled, torch._C._len_torch_dispatch_stack
_tracing = torch._C._get_tracing_state


def _usual(x, running: tuple, weight, bias, residual, mask, options, state) -> Tensor | None:
    """Makes the usual step: of a batch in plain eager mode, in no checkpointed segment, whose
    arguments the operators alone check. None, and nothing has happened, where it is another one, or
    they refuse: the checks of _step() have the words."""
    if (
        torch.compiler.is_compiling()
        or type(x) is not Tensor
        or type(state) is not LayerState
        or not (x.is_cpu or x.is_cuda)
        or recomputation.around() is not None
        or profiler._is_profiler_enabled
        or not _takes_functions()
        or _modes() > 0
        or _tracing() is not None
        or in_transform()
        or forward_ad._current_level >= 0
        or has_torch_function_variadic(*running, weight, bias, residual, mask)
    ):
        return None
    try:
        in_place = form_of(*options).in_place
        if residual is not None:
            check_like_input("residual", residual, x)
    except (TypeError, ValueError):
        return None
    tracked = running[2]
    counts = tracked is None or (type(tracked) is Tensor and tracked.dtype is torch.int64)
    if in_place or not counts or (state.call is not None and state.call.device != x.device):
        return None
    peers = state.peers(options)
    if peers is not None and peers.group_name != state.group:
        return None  # paths are compared after the checks
    given = running, options, state, peers, None, False
    try:
        return apply_step((x,), weight, bias, (residual,), (mask,), *given)
    except Refused:
        return None


def _step(x, running: tuple, weight, bias, residual, mask, options, state) -> Tensor:
    if surroundings.has_dtensor((x, weight, bias, residual, mask, *running)):
        return _of_parts(x, running, weight, bias, residual, mask, options, state)
    running_mean, running_var, tracked = running
    parameter = next((t for t in (running_mean, weight, bias) if isinstance(t, Tensor)), None)
    traced = torch.compiler.is_compiling() or _is_fake(x, parameter)
    live: LayerState | None = None  # a graph finds the state when it runs
    if not traced:
        state = live = layer_state.named(state)
    differentiable = (("input", x), ("weight", weight), ("bias", bias), ("residual", residual))
    check_transforms(state, differentiable)
    if tracer() is not None:
        refuse_tracing(state, state.sharing if options.sync else None)
        return _plain_step(x, running, weight, bias, residual, mask, options)
    # A compiler plans memory by itself, and cannot trace this.
    inplace = options.writes_over_input and not traced
    peers = segment = None
    if live is not None:
        peers = live.peers(options)
        segment = recomputation.segment(live, options, residual is not None, x, mask)
    again = segment is not None and segment.kept is not None
    try:
        check_options(options)
        if not traced:
            check_plain(
                peers is None, **dict(differentiable), mask=mask, **dict(zip(RUNNING, running))
            )
        check_arguments(x, running_mean, running_var, weight, bias, residual, traced)
        check_counter(options.momentum, running_mean, running_var, tracked, traced)
        if inplace:
            check_in_place(x, weight, bias, residual, options.negative_slope)
            if segment is not None:
                segment.check_in_place(x)
        if mask is not None:
            masks.check_mask(mask, x)
            if options.writes_over_input:
                raise ValueError("mask: got one with inplace=True, expected None")
        if live is not None:
            live.move(x.device)
    except Exception as error:
        if live is not None and not again:
            tell(error, live, x, parameter, options)
        raise
    if mask is not None:
        mask = mask.contiguous()
    if not traced and any(t is not None and t.is_neg() for t in (x, weight, bias, residual, mask)):
        # An operator that writes to some arguments takes none with the negative bit.
        x, weight, bias, residual, mask = (
            None if t is None else t.resolve_neg() for t in (x, weight, bias, residual, mask)
        )
    tensors = (x, weight, bias, residual, mask)
    if live is None:
        y, saved = as_operator.training_step(*tensors, options, state)
        _update(running, saved, options.momentum)
        return y
    given = running, options, live, peers, segment
    return apply_step((x,), weight, bias, (residual,), (mask,), *given)


def _of_parts(x, running, weight, bias, residual, mask, options, state) -> Tensor:
    """Does what train_step() does, where some of the tensors are DTensors."""
    live = layer_state.named(state)
    samples = {"input": x, "residual": residual, "mask": mask}
    shared = {"weight": weight, "bias": bias, **dict(zip(RUNNING, running))}
    try:
        peers, shares = live.peers(options), options.affine_grad == "share"
        given = surroundings.parts(samples, shared, peers, shares)
    except ValueError as error:
        tell(error, live, None, None, options)
        raise
    own, w, b, z, m = (given[n] for n in ("input", "weight", "bias", "residual", "mask"))
    running = tuple(given[name] for name in RUNNING)
    return surroundings.as_dtensor(_step(own, running, w, b, z, m, options, state), x)


def _update(running: tuple, saved: Tensor, momentum: float | None) -> None:
    """Updates the running statistics of a step in a graph."""
    *averages, tracked = running
    averaged = tracked is not None and tracked.is_floating_point()
    if averaged and momentum is None:
        momentum = ops.cumulative_factor(tracked.item())
    counter = None if averaged else tracked
    if any(t is not None for t in (*averages, counter)):
        ops.update_running_statistics(*averages, counter, None, saved, momentum)
    if averaged:
        tracked.add_(info_of(saved)[0] > 0)
