# SPDX-License-Identifier: Apache-2.0
"""Batch normalization as one operator, for graphs: training and inference are two operators that
share their variables (docs/forked_graph.md)."""

import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function

from ..errors import DivergenceError
from ..exchange import after_fork, attempt, callers, engines, groups, transports
from ..exchange.call import Call
from ..operators import ops
from ..step.as_operator import operator
from ..step.options import check_strided, check_written, is_number
from ..step.training import like
from ..step.transforms import refuse_tracing
from . import cuda_step

_Tensors = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor]
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


@torch.library.register_fake("syncbn::batch_norm")
def _(x: Tensor, estimated_mean: Tensor, estimated_var: Tensor, *_: Any) -> tuple[Tensor, ...]:
    """BatchNormOutputs, then float64 [2 C]: mean and rstd that normalized; int64 [2]: count and
    fingerprint."""
    channels = x.shape[1]

    def new(size: int, dtype: torch.dtype) -> Tensor:
        return x.new_empty((size,), dtype=dtype)

    return (
        torch.empty_like(x),
        new(channels, torch.float64),
        new(channels, torch.float64),
        new(channels, estimated_mean.dtype),
        new(channels, estimated_var.dtype),
        new(1, torch.int64),
        new(2 * channels, torch.float64),
        new(2, torch.int64),
    )


@torch.library.register_fake("syncbn::batch_norm_backward")
def _(
    dy: Tensor,
    x: Tensor,
    scale: Tensor | None,
    mean_rstd: Tensor,
    info: Tensor,
    constant: bool,
    needs_x: bool,
    scale_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
    group: str | None = None,
    ranks: int = 1,
    frame: int = 0,
) -> tuple[Tensor, ...]:
    """dx like x, or empty; dscale and dbias [C] of this rank's samples, or empty."""
    return (
        torch.empty_like(x) if needs_x else x.new_empty((0,)),
        *(
            x.new_empty((0 if dtype is None else x.shape[1],), dtype=dtype or torch.float32)
            for dtype in (scale_dtype, bias_dtype)
        ),
    )


@torch.compiler.assume_constant_result
def _layer_number(name: str) -> int:
    """A layer's name as the number that ranks compare."""
    return zlib.crc32(name.encode())


#: Of this thread: why an exchange failed inside the operator.
_failure = threading.local()


@operator("sum_over_group", "(Tensor words, str group) -> Tensor")
def _sum_over_group(words: Tensor, group: str) -> Tensor:
    """The exchange of the operators on the CPU, which call it from C++."""
    try:
        attempt.end_refusals(group)
        merged = torch.ops._c10d_functional.all_reduce(words, "sum", group)
        return torch.ops._c10d_functional.wait_tensor(merged)
    except Exception as error:
        _failure.error = error
        raise


@contextmanager
def _translated(layer_name: str, peers: groups.Peers | None) -> Iterator[None]:
    """The operator's error as the class that its text begins with."""
    if peers is not None:
        after_fork.check()
    _failure.error = None
    try:
        yield
    except RuntimeError as error:
        kind, _, text = str(error).partition(": ")
        cause, _failure.error = _failure.error, None
        if kind == "ValueError":
            raise ValueError(text) from None
        if kind == "DivergenceError":
            raise DivergenceError(f"{layer_name}, {peers}: {text}") from None
        raise error from cause


class _BatchNorm(torch.autograd.Function):
    """The operator with its gradient; the last two inputs are whom to exchange with and a name."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scale: Tensor | None,
        bias: Tensor | None,
        estimated_mean: Tensor,
        estimated_var: Tensor,
        batches: Tensor,
        is_infer: bool,
        use_global_est: bool,
        epsilon: float,
        momentum: float,
        layer: int,
        peers: groups.Peers | None,
        layer_name: str,
    ) -> tuple[Tensor, ...]:
        ctx.exchange = (None, 1, 0)
        if peers is not None:
            ctx.exchange = (peers.group_name, peers.ranks, engines.FRAME_WORDS)
        arguments = (
            x,
            estimated_mean,
            estimated_var,
            scale,
            bias,
            batches,
            is_infer,
            use_global_est,
            epsilon,
            momentum,
            layer,
            *ctx.exchange,
        )
        if torch.compiler.is_compiling():
            *outputs, mean_rstd, info = ops.batch_norm(*arguments)
        else:
            with _translated(layer_name, peers):
                *outputs, mean_rstd, info = ops.batch_norm(*arguments)
        ctx.save_for_backward(x, scale, mean_rstd, info)
        ctx.mark_non_differentiable(*outputs[1:])
        ctx.constant = is_infer or use_global_est
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.peers, ctx.layer_name = peers, layer_name
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Any, ...]:
        x, scale, mean_rstd, info = ctx.saved_tensors
        needs_x, needs_scale, needs_bias = ctx.needs_input_grad[:3]
        dy = like(dy, x)
        arguments = (
            dy,
            x,
            scale,
            mean_rstd,
            info,
            ctx.constant,
            needs_x,
            scale.dtype if needs_scale else None,
            ctx.bias_dtype if needs_bias else None,
            *ctx.exchange,
        )
        if torch.compiler.is_compiling():
            dx, dscale, dbias = ops.batch_norm_backward(*arguments)
        else:
            with _translated(ctx.layer_name, ctx.peers):
                dx, dscale, dbias = ops.batch_norm_backward(*arguments)
        return (
            dx if needs_x else None,
            dscale if needs_scale else None,
            dbias if needs_bias else None,
            *(None,) * 10,
        )


def _check_kinds(
    tensors: _Tensors, is_infer: bool, use_global_est: bool, epsilon: float, momentum: float
) -> None:
    """What the operator's schema would refuse without naming the argument."""
    for name, tensor in zip(_TENSORS, tensors, strict=True):
        if not (tensor is None and name in ("scale", "bias")):
            check_strided(name, tensor)
    for name, value in (("is_infer", is_infer), ("use_global_est", use_global_est)):
        if not isinstance(value, bool):
            raise ValueError(f"{name}: got {value!r}, expected True or False")
    if not is_number(epsilon):
        raise ValueError(f"epsilon: got {epsilon!r}, expected a finite number of at least 0")
    if not is_number(momentum):
        raise ValueError(f"momentum: got {momentum!r}, expected a number in [0, 1]")


def _on_cuda(tensors: _Tensors) -> bool:
    """Whether all tensors are on CUDA, and not on the CPU."""
    x = tensors[0]
    for name, tensor in zip(_TENSORS, tensors, strict=True):
        if tensor is None:
            continue
        if tensor.device.type not in ("cpu", "cuda"):
            raise ValueError(f"{name}: got a tensor on {tensor.device}, expected the CPU or CUDA")
        if tensor.device != x.device:
            raise ValueError(
                f"{name}: got a tensor on {tensor.device}, expected {x.device}, the device of x"
            )
    return x.is_cuda


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
    options: dict[str, Any] = {
        "is_infer": is_infer,
        "use_global_est": use_global_est,
        "epsilon": epsilon,
        "momentum": momentum,
        "group": group,
        "layer_name": layer_name,
    }
    if has_torch_function(tensors):  # a tracer's stand-ins: one node of the graph
        return handle_torch_function(batch_norm, tensors, *tensors, **options)
    return _run(tensors, **options)


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
    """batch_norm. written: the estimates will be updated in place."""
    x, estimated_mean, estimated_var, scale, bias, batches = tensors
    if not isinstance(layer_name, str):
        raise ValueError(f"layer_name: got {layer_name!r}, expected a string")
    sharing = callers.sharing(group, None, "process_group")
    if is_infer is not True:
        refuse_tracing(layer_name, sharing)
    peers = None if is_infer is True else groups.peers_of(*sharing)
    try:
        _check_kinds(tensors, is_infer, use_global_est, epsilon, momentum)
        if written:
            check_written("estimated_mean", estimated_mean)
            check_written("estimated_var", estimated_var)
        on_cuda = _on_cuda(tensors)
        if on_cuda:
            cuda_step.check(*tensors, epsilon, momentum)
    except Exception as error:
        estimates = (t for t in (estimated_mean, estimated_var) if isinstance(t, Tensor))
        parameter = next(estimates, None)
        # On the CPU the others exchange inside their operator, which compares no texts.
        compare = getattr(x if parameter is None else parameter, "is_cuda", False)
        transports.reject(peers, Call(layer_name), error, compare, x=x, parameter=parameter)
        raise
    function = cuda_step.BatchNormOnCuda if on_cuda else _BatchNorm
    outputs = function.apply(
        x,
        scale,
        bias,
        estimated_mean,
        estimated_var,
        batches,
        is_infer,
        use_global_est,
        epsilon,
        momentum,
        _layer_number(layer_name),
        peers,
        layer_name,
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
    options: dict[str, Any] = {
        "is_infer": is_infer,
        "use_global_est": use_global_est,
        "epsilon": epsilon,
        "momentum": momentum,
        "group": group,
        "layer_name": layer_name,
    }
    if has_torch_function(tensors):
        return handle_torch_function(batch_norm_, tensors, *tensors, **options)
    variables = (estimated_mean, estimated_var, batches)
    outputs = _run(tensors, **options, written=not is_infer)
    if not is_infer:
        saved = [s.view(v.shape) for v, s in zip(variables, outputs[3:], strict=True)]
        with torch.no_grad():
            if torch.compiler.is_compiling():
                for variable, value in zip(variables, saved, strict=True):
                    variable.copy_(value)
            else:  # one call, which no interrupt divides
                torch._foreach_copy_(variables, saved)
    return BatchNormOutputs(*outputs[:3], *variables)
