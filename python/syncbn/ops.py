# SPDX-License-Identifier: Apache-2.0
"""Batch normalization as one operator, for graphs: training and inference are two operators that
share their variables (docs/forked_graph.md). This module has no promise of compatibility between
versions."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function

from . import baton
from .exchange import callers, groups
from .exchange.call import Call
from .exchange.turn import refuse
from .operators import ops
from .step import graph_operators  # noqa: F401 (registers them)
from .step.options import (
    check_input,
    check_per_channel,
    check_plain,
    check_strided,
    check_written,
    is_number,
)
from .step.surroundings import is_traced, like, refuse_tracing

_Tensors = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor]
_OPTIONS = ("is_infer", "use_global_est", "epsilon", "momentum", "group", "layer_name")
_TENSORS = ("x", "estimated_mean", "estimated_var", "scale", "bias", "batches")


class BatchNormOutputs(NamedTuple):
    """The results of batch_norm. Only y has a gradient.

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


class _BatchNorm(torch.autograd.Function):
    """The operator with its gradient."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        *outputs, saved = ops.batch_norm(*inputs)
        x, _, _, scale, bias, _, is_infer, use_global_est, *ctx.others = inputs
        ctx.save_for_backward(x, scale, saved)
        ctx.mark_non_differentiable(*outputs[1:])
        ctx.constant = is_infer or use_global_est
        ctx.trains, ctx.turns = not is_infer, baton.turns() if baton.running else None
        ctx.bias_dtype = None if bias is None else bias.dtype
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Any, ...]:
        if baton.running and ctx.trains:
            if baton.inside() or (ctx.turns is not None and not ctx.turns.over):
                baton.refuse_backward(lambda: ctx.others[2])
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
    biased everywhere. The inputs are not changed; batch_norm_ updates them in place. In training
    the devices of a SelfDataParallel make one call, on the first of them.

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
    if baton.running and is_infer is not True and baton.inside():
        if not (turns := baton.turns()) or not turns.operators:
            raise RuntimeError(
                f"{layer_name}: got a training operator in Shares, expected a syncbn.SyncBatchNorm"
            )
        others = is_infer, use_global_est, epsilon, momentum, group, layer_name, written

        def run(x: Tensor) -> BatchNormOutputs:
            return _run((x, *tensors[1:]), *others)

        if isinstance(tensors[0], Tensor) and tensors[0].dim() > 1:  # else it is refused below
            call = baton.OperatorCall(layer_name, others, sharing, tensors[1], run)
            return baton.wait(call, tensors[0], None, None)
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
