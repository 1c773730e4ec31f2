# SPDX-License-Identifier: Apache-2.0
"""Batch normalization as one operator, for graphs: training and inference are two operators that
share their variables (docs/forked_graph.md). A training operator is a step of a layer, with rules
of its own for what it saves. This module has no promise of compatibility between versions."""

import math
import struct
import zlib
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function

from .exchange import callers, groups
from .exchange.call import Backward, Call, Peers
from .exchange.turn import refuse
from .operators import info_of, ops, saved_of
from .step import training
from .step.as_operator import operator
from .step.options import (
    Form,
    Options,
    check_input,
    check_per_channel,
    check_plain,
    check_strided,
    check_written,
    form_of,
    is_number,
)
from .step.surroundings import is_traced, like, refuse_tracing

_Tensors = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor]
_OPTIONS = ("is_infer", "use_global_est", "epsilon", "momentum", "group", "layer_name")
_TENSORS = ("x", "estimated_mean", "estimated_var", "scale", "bias", "batches")


class BatchNormOutputs(NamedTuple):
    """What batch_norm returns. Only y has a gradient.

    y is like x. batch_mean and batch_var are (C,) in float64: the mean and biased variance of the
    batch over all ranks; in inference, the estimates. saved_mean and saved_var are the updated
    estimates, and saved_batches (1,) in int64 is the updated counter.
    """

    y: Tensor
    batch_mean: Tensor
    batch_var: Tensor
    saved_mean: Tensor
    saved_var: Tensor
    saved_batches: Tensor


class _Operator:
    """A training operator, as a step takes its layer: state and options. group: a name; None for
    this rank alone."""

    statistics, negative_slope = "reproducible", 0.0

    def __init__(
        self,
        eps: float,
        momentum: float,
        name: str,
        group: str | None,
        use_global_est: bool,
    ) -> None:
        self.eps, self.momentum, self.use_global_est = eps, momentum, use_global_est
        self.name, self.group = name, group or ""  # no paths are compared
        self.counters: Tensor | None = None
        self.peers = None if group is None else groups.named(group)
        # What ranks must have in common besides epsilon; the momentum's bits, without arithmetic.
        own = struct.pack("<d?", momentum, use_global_est)
        self.number = zlib.crc32(own, zlib.crc32(name.encode()))

    def shared(self) -> dict[str, object]:
        return {
            "epsilon": self.eps,
            "momentum": self.momentum,
            "use_global_est": self.use_global_est,
        }

    def form(self, _: Any) -> Form:
        return form_of(self.number, *_PLAIN._replace(eps=self.eps))

    def reached(self, peers: Peers | None) -> Peers | None:
        return peers

    def call_of(self, x: Tensor, _: Any = None, parts: Sequence[object] = (None,) * 3) -> Call:
        given = sum((part is not None) << bit for bit, part in enumerate(parts))
        names = ("residual", "scale", "bias")
        return Call(self.name, None, "forward", x.shape[1], x.dtype, self, given, names)


#: Of a step with neither an activation nor a residual.
_PLAIN = Options()


def _copy(name: str, estimate: Tensor) -> Tensor:
    """Gives a copy, which PyTorch makes of memory that is not there, too."""
    last = estimate.storage_offset() + (estimate.shape[0] - 1) * estimate.stride(0)
    given, needed = estimate.untyped_storage().nbytes(), (last + 1) * estimate.element_size()
    if given < needed and estimate.shape[0] > 0:
        raise ValueError(f"{name}: got a storage of {given} bytes, expected at least {needed}")
    return estimate.clone(memory_format=torch.contiguous_format)


def _evaluated(x, mean, var, scale, bias, epsilon: float) -> tuple[Tensor, Tensor]:
    """Gives y of given statistics, and these as a forward saves its own, of no elements."""
    y, saved = ops.evaluate(x, mean, var, scale, bias, eps=epsilon)
    info_of(saved).zero_()
    return y, saved


def _updated(averages, batches, saved, momentum: float) -> list[Tensor]:
    """Gives the estimates with the batch in them, which are written over; as they were if it is
    empty or the ranks disagreed. Which is so, and whether the batch is the first, the device
    knows."""
    saved = saved.clone()
    info_of(saved)[:1].clamp_(max=1)  # of a count of 1 the variance is taken as it is, biased
    assigned = [torch.zeros_like(e) for e in averages]
    share = float(1 - Fraction(momentum))  # in whatever mode the process rounds
    ops.update_running_statistics(*averages, None, saved, share)
    ops.update_running_statistics(*assigned, None, saved, 1.0)
    first = (batches.view(()) == 0) & (info_of(saved)[0] > 0)
    return [torch.where(first, a, b) for a, b in zip(assigned, averages)]


@operator(
    "batch_norm",
    "(Tensor x, Tensor estimated_mean, Tensor estimated_var, Tensor? scale, Tensor? bias, "
    "Tensor batches, bool is_infer, bool use_global_est, float epsilon, float momentum, str layer, "
    "str? group) -> (Tensor y, Tensor batch_mean, Tensor batch_var, Tensor saved_mean, "
    "Tensor saved_var, Tensor saved_batches, Tensor saved)",
)
def _batch_norm(
    x, mean, var, scale, bias, batches, is_infer, use_global_est, epsilon, momentum, layer, group
):
    batches = batches.view(1)
    variables = (("estimated_mean", mean), ("estimated_var", var), ("batches", batches))
    if is_infer:
        y, saved = _evaluated(x, mean, var, scale, bias, epsilon)
        wide = (t.clone() for t in saved[:-2].view(3, -1)[:2])
        return y, *wide, *(_copy(*named) for named in variables), saved
    own: Any = _Operator(epsilon, momentum, layer, group, use_global_est)
    with training.turn_of(own, own, own.peers, x, (None, scale, bias)) as turn:
        try:
            *estimates, batches = [_copy(*named) for named in variables]
        except ValueError as error:
            turn.refused(error)
        own.counters = torch.cat((batches, batches))  # the call's number, and room for the count
        given = training.Given((None,) * 3, own, own, own.peers, 0)
        tensors = (x, scale, bias, None, None)
        _, y, (*_, saved, _, _) = training.forward(turn, given, (False,) * 4, *tensors)
        estimates = _updated(estimates, batches, saved, momentum)
        batch_mean, batch_var, _ = (t.clone() for t in saved[:-2].view(3, -1))
        info = info_of(saved)
        if use_global_est:
            # NaN where the ranks disagreed
            mean, var = (torch.where(info[0] < 0, math.nan, e) for e in estimates)
            y, saved = _evaluated(x, mean, var, scale, bias, epsilon)
    return y, batch_mean, batch_var, *estimates, batches + (info[:1] > 0), saved


@_batch_norm.register_fake
def _(x, mean, var, *_):
    """Gives BatchNormOutputs, and what operators.saved_of() describes, of what normalized."""
    batch = x.new_empty((x.shape[1],), dtype=torch.float64)
    estimates = (x.new_empty((x.shape[1],), dtype=t.dtype) for t in (mean, var))
    counter = x.new_empty((1,), dtype=torch.int64)
    return torch.empty_like(x), batch, batch.clone(), *estimates, counter, saved_of(x)


@operator(
    "batch_norm_backward",
    "(Tensor dy, Tensor x, Tensor? scale, Tensor saved, bool constant, bool needs_x, "
    "ScalarType? scale_dtype, ScalarType? bias_dtype, float epsilon, float momentum, str layer, "
    "str? group) -> (Tensor dx, Tensor dscale, Tensor dbias)",
)
def _batch_norm_backward(
    dy, x, scale, saved, constant, needs_x, scale_dtype, bias_dtype, epsilon, momentum, layer, group
):
    exchanges = needs_x and not constant
    own: Any = _Operator(epsilon, momentum, layer, group if exchanges else None, constant)
    needs = exchanges, scale_dtype is not None, bias_dtype is not None, False
    made, awaited = (None, x.shape[1], x.dtype), Backward(exchanges, False)
    step = training.Step(own, own, own.form(own), own.peers, made, awaited, bias_dtype, needs)
    dx, dscale, dbias, _ = training.backward(step, dy, scale, None, x, saved, None, None)
    if constant and needs_x:
        dx = torch.empty_like(x)
        given = (dy, x, saved, scale, None, None, None, step.form.constants, False)
        ops.backward_finish(*given, (dx, None, None, None), (None,) * 3, 1)
    return tuple(x.new_empty(0) if g is None else g for g in (dx, dscale, dbias))


@_batch_norm_backward.register_fake
def _(dy, x, scale, saved, constant, needs_x, *dtypes_and_others):
    """Gives dx like x; dscale and dbias [C] of this rank's samples; each empty if nobody asks."""
    return (
        torch.empty_like(x) if needs_x else x.new_empty((0,)),
        *(
            x.new_empty((0 if dtype is None else x.shape[1],), dtype=dtype)
            for dtype in dtypes_and_others[:2]
        ),
    )


class _BatchNorm(torch.autograd.Function):
    """The operator with its gradient."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        *outputs, saved = ops.batch_norm(*inputs)
        x, _, _, scale, bias, _, is_infer, use_global_est, *ctx.others = inputs
        ctx.save_for_backward(x, scale, saved)
        ctx.mark_non_differentiable(*outputs[1:])
        ctx.constant = is_infer or use_global_est
        ctx.bias_dtype = None if bias is None else bias.dtype
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Any, ...]:
        x, scale, saved = ctx.saved_tensors
        needs_x, _, _, needs_scale, needs_bias, *_ = ctx.needs_input_grad
        if dy.stride() != x.stride():
            dy = like(dy, x)
        dx, dscale, dbias = ops.batch_norm_backward(
            *(dy, x, scale, saved, ctx.constant, needs_x),
            scale.dtype if needs_scale else None,
            ctx.bias_dtype if needs_bias else None,
            *ctx.others,
        )
        return (
            dx if needs_x else None,
            *(None, None),
            dscale if needs_scale else None,
            dbias if needs_bias else None,
            *(None,) * 7,
        )


def _check(
    tensors: _Tensors, is_infer: bool, use_global_est: bool, epsilon: float, momentum: float
) -> None:
    """Raises an error that names the argument, what was given and what is allowed."""
    x, *channels, batches = tensors
    for name, tensor in zip(_TENSORS, tensors, strict=True):
        if not (tensor is None and name in ("scale", "bias")):
            check_strided(name, tensor)
    check_input("x", x, torch.compiler.is_compiling())
    for name, tensor in zip(_TENSORS[1:], channels):
        if tensor is not None:
            check_per_channel(name, tensor, x)
    if batches.dtype != torch.int64 or batches.numel() != 1 or batches.device != x.device:
        raise ValueError(
            f"batches: got {batches.numel()} entries of {batches.dtype} on {batches.device}, "
            f"expected one int64 on {x.device}"
        )
    fake = torch.compiler.is_compiling() or isinstance(batches, FakeTensor)
    if batches.is_cpu and not fake:
        number = batches.item()  # on a GPU nobody waits for it
        if number < 0:
            raise ValueError(f"batches: got {number}, expected a number of at least 0")
        if number == 2**63 - 1:
            raise ValueError("batches: got 2^63 - 1, expected room for one batch more")
    for name, value in (("is_infer", is_infer), ("use_global_est", use_global_est)):
        if not isinstance(value, bool):
            raise ValueError(f"{name}: got {value!r}, expected True or False")
    check_attributes(epsilon, momentum)


def check_attributes(epsilon: float, momentum: float) -> None:
    if not (is_number(epsilon) and 0 <= epsilon < math.inf):
        raise ValueError(f"epsilon: got {epsilon!r}, expected a finite number of at least 0")
    if not (is_number(momentum) and 0 <= momentum <= 1):
        raise ValueError(f"momentum: got {momentum!r}, expected a number in [0, 1]")


def batch_norm(
    x: Tensor,
    estimated_mean: Tensor,
    estimated_var: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    batches: Tensor,
    *,
    is_infer: bool = False,
    use_global_est: bool = False,
    epsilon: float = 1e-6,
    momentum: float = 0.99,
    group: "callers.Group" = None,
    layer_name: str = "batch_norm",
) -> BatchNormOutputs:
    """Normalizes x with the statistics of the batch over all ranks, or with the estimates.

    Training computes estimate <- momentum * estimate + (1 - momentum) * batch value. The first
    batch (batches = 0) is assigned. A batch without elements changes nothing. The variance is
    biased everywhere. The inputs are not changed; batch_norm_ updates them in place.

    Args:
        x: (N, C, *spatial), float16, bfloat16, float32 or float64, any strides. All tensors are on
            the CPU, or all on one CUDA device. N may differ between ranks and may be 0.
        estimated_mean, estimated_var: (C,), any of these dtypes.
        scale, bias: (C,), any of these dtypes; None for 1 and 0.
        batches: int64 with one entry: how many batches the estimates hold. Equal on all ranks.
        is_infer: True normalizes with the given estimates, without an exchange. The outputs other
            than y are then copies of the inputs.
        use_global_est: True normalizes with the updated estimates in training. They are constants
            of the gradient, so backward exchanges nothing.
        epsilon: added to the variance, at least 0.
        momentum: the old estimate's share, in [0, 1]. PyTorch's momentum is 1 minus this one.
        group: a process group or its name. None is the default group, or this process alone
            without torch.distributed.
        layer_name: the name in errors. Ranks that call under different names get DivergenceError.

    Returns:
        BatchNormOutputs. Gradients of scale and bias are this rank's own share, as in PyTorch.

    Raises:
        ValueError: an argument is refused, or all ranks together have one value per channel.
        DivergenceError: the ranks did not make the same call. Over NCCL this raises nothing: y,
            batch_mean and batch_var are NaN, and the estimates do not change.
        RuntimeError: the exchange failed: a rank did not come, or has ended.
    """
    tensors = (x, estimated_mean, estimated_var, scale, bias, batches)
    options = is_infer, use_global_est, epsilon, momentum, group, layer_name
    if has_torch_function(tensors):
        return _through_classes(batch_norm, tensors, options)
    return _run(tensors, *options)


def _through_classes(function: Any, tensors: _Tensors, options: tuple[Any, ...]) -> Any:
    """Gives the function's results where tensors are of classes with a __torch_function__."""
    named = dict(zip(_OPTIONS, options, strict=True))
    if any(isinstance(t, torch.fx.Proxy) for t in tensors):  # one node of the graph
        return handle_torch_function(function, tensors, *tensors, **named)

    def as_tuple(*given: Any, **others: Any) -> tuple[Tensor, ...]:
        return tuple(function(*given, **others))  # which classes make anew, of their own tensors

    return BatchNormOutputs(*handle_torch_function(as_tuple, tensors, *tensors, **named))


def _run(
    tensors: _Tensors,
    is_infer: bool,
    use_global_est: bool,
    epsilon: float,
    momentum: float,
    group: "callers.Group",
    layer_name: str,
    written: bool = False,
) -> BatchNormOutputs:
    """Does what batch_norm does. written: the estimates will be updated in place."""
    if not isinstance(layer_name, str):
        raise ValueError(f"layer_name: got {layer_name!r}, expected a string")
    sharing = callers.sharing(group, None, "process_group")
    if is_infer is not True:
        refuse_tracing(layer_name, sharing)
    # A graph that is traced holds its group; else what is fake exchanges nothing.
    traced = torch.compiler.is_compiling() or is_traced()
    alone = is_infer is True or (isinstance(tensors[0], FakeTensor) and not traced)
    peers = None if alone else groups.peers_of(*sharing)
    try:
        if not (torch.compiler.is_compiling() or isinstance(tensors[0], FakeTensor)):
            check_plain(peers is None, **dict(zip(_TENSORS, tensors, strict=True)))
        _check(tensors, is_infer, use_global_est, epsilon, momentum)
        if written:
            check_written("estimated_mean", tensors[1])
            check_written("estimated_var", tensors[2])
    except Exception as error:
        parameter = next((t for t in tensors[1:3] if isinstance(t, Tensor)), None)
        refuse(peers, Call(layer_name), error, tensors[0], parameter)
        raise
    name = None if peers is None else peers.group_name
    outputs = _BatchNorm.apply(
        *tensors, is_infer, use_global_est, float(epsilon), float(momentum), layer_name, name
    )
    return BatchNormOutputs(*outputs)


def batch_norm_(
    x: Tensor,
    estimated_mean: Tensor,
    estimated_var: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    batches: Tensor,
    *,
    is_infer: bool = False,
    use_global_est: bool = False,
    epsilon: float = 1e-6,
    momentum: float = 0.99,
    group: "callers.Group" = None,
    layer_name: str = "batch_norm",
) -> BatchNormOutputs:
    """Does what batch_norm does, and updates estimated_mean, estimated_var and batches in place.

    They are returned as saved_mean, saved_var and saved_batches. Arguments and errors are those of
    batch_norm.
    """
    tensors = (x, estimated_mean, estimated_var, scale, bias, batches)
    options = is_infer, use_global_est, epsilon, momentum, group, layer_name
    if has_torch_function(tensors):
        return _through_classes(batch_norm_, tensors, options)
    variables = (estimated_mean, estimated_var, batches)
    outputs = _run(tensors, *options, written=not is_infer)
    if not is_infer:
        saved = [s.view(v.shape) for v, s in zip(variables, outputs[3:], strict=True)]
        with torch.no_grad():
            if torch.compiler.is_compiling():
                for variable, value in zip(variables, saved, strict=True):
                    variable.copy_(value)
            else:  # one call, which no interrupt divides
                torch._foreach_copy_(variables, saved)
    return BatchNormOutputs(*outputs[:3], *variables)
