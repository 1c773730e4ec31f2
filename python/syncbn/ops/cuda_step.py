# SPDX-License-Identifier: Apache-2.0
"""syncbn.ops.batch_norm on CUDA: the layer's operators around an exchange that is this package's,
where the operator for the CPU exchanges inside of itself. Its bits are the same."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..exchange import agreement, groups, transports
from ..exchange.call import Call
from ..operators import ops
from ..step.as_operator import operator
from ..step.options import Options, check_input, check_per_channel, values_per_channel
from ..step.training import like


@torch.library.register_fake("syncbn::evaluate")
def _(x, mean, var, weight, bias, eps):
    """y like x, of the given statistics (C,); mean and rstd as float64 (C,)."""
    channel = x.new_empty((x.shape[1],), dtype=torch.float64)
    return torch.empty_like(x), channel, channel.clone()


@torch.library.register_fake("syncbn::evaluation_input_gradient")
def _(dy, rstd, weight):
    """dx like dy, where the statistics are constants."""
    return torch.empty_like(dy)


@operator(
    "all_reduce_message",
    "(Tensor message, int channels, SymInt own, str group, str layer, str direction, "
    "ScalarType dtype, float eps) -> Tensor",
)
def _all_reduce_message(message, channels, own, group, layer, direction, dtype, eps):
    call = Call(layer, None, direction, channels, dtype, Options(eps=eps))
    return _merged(message, channels, own, groups.named(group), call)


@_all_reduce_message.register_fake
def _(message, *_):
    """int64 like message: its sum over the group of that name."""
    return torch.empty_like(message)


def _merged(message: Tensor, channels: int, own: int, peers: Any, call: Any) -> Tensor:
    """What exchange() gives of a message on CUDA. own: as for check_count()."""
    if torch.compiler.is_compiling() and peers is not None:
        options = (peers.group_name, call.layer, call.direction, call.dtype, call.options.eps)
        merged = ops.all_reduce_message(message, channels, own, *options)
        # Keeps it in the graph, as in as_operator.
        return torch.ops._c10d_functional.wait_tensor(merged)
    merged, rest = transports.transport_of(peers, message.device).exchange(message, channels, call)
    if not torch.compiler.is_compiling():
        agreement.check_count(merged, own, f"ranks ({call})")
    return merged if rest is None else torch.cat([merged, rest])


def check(x, estimated_mean, estimated_var, scale, bias, batches, epsilon, momentum) -> None:
    """One error that names the argument, what was given and what is allowed."""
    check_input("x", x)
    for name, tensor in (
        ("estimated_mean", estimated_mean),
        ("estimated_var", estimated_var),
        ("scale", scale),
        ("bias", bias),
    ):
        if tensor is not None or name.startswith("estimated"):
            check_per_channel(name, tensor, x)
    if batches.dtype != torch.int64 or batches.numel() != 1 or batches.device != x.device:
        raise ValueError(
            f"batches: got {batches.numel()} entries of {batches.dtype} on {batches.device}, "
            f"expected one int64 on {x.device}"
        )
    if not 0 <= epsilon < math.inf:
        raise ValueError(f"epsilon: got {epsilon}, expected a finite number of at least 0")
    if not 0 <= momentum <= 1:
        raise ValueError(f"momentum: got {momentum}, expected a number in [0, 1]")


def _copy(estimate: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    dtype = dtype or estimate.dtype
    return estimate.to(dtype, copy=True, memory_format=torch.contiguous_format)


def _updated(estimates, batches, mean, var, info, momentum) -> list[Tensor]:
    """The estimates with the batch in them; as they were if it is empty or the ranks disagreed.
    Which is so, and whether the batch is the first, the device knows."""
    info = info.clamp(max=1)  # of a count of 1 the variance is taken as it is, biased
    averages = [_copy(e) for e in estimates]
    assigned = [torch.zeros_like(e) for e in averages]
    ops.update_running_statistics(*averages, None, None, mean, var, info, 1.0 - momentum)
    ops.update_running_statistics(*assigned, None, None, mean, var, info, 1.0)
    first = (batches.view(()) == 0) & (info[0] > 0)
    return [torch.where(first, a, b) for a, b in zip(assigned, averages)]


class BatchNormOnCuda(torch.autograd.Function):
    """BatchNormOutputs as a tuple; arguments checked."""

    @staticmethod
    def forward(
        ctx,
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
        layer,
        peers,
        layer_name,
    ):
        channels = x.shape[1]
        call = Call(layer_name, None, "forward", channels, x.dtype, Options(eps=epsilon))
        if is_infer:
            y, mean, rstd = ops.evaluate(x, estimated_mean, estimated_var, scale, bias, epsilon)
            info = x.new_zeros(2, dtype=torch.int64)
            saved = [_copy(estimated_mean), _copy(estimated_var)]
            outputs = (y, mean.clone(), _copy(estimated_var, torch.float64), *saved)
            saved_batches = batches.view(1).clone()
        else:
            # What ranks must agree on besides; momentum in steps of 2^-29.
            number = layer | use_global_est << 32 | int(momentum * 2**29) << 33
            own = values_per_channel(x, None)
            message = ops.local_moments(x, number, batches, epsilon, 0, None)
            merged = _merged(message, channels, own, peers, call)
            y, mean, var, rstd, info, _ = ops.normalize(
                x[:0] if use_global_est else x,  # without samples the statistics alone
                message,
                merged,
                None,
                scale,
                bias,
                None,
                epsilon,
                1 if peers is None else peers.ranks,
                0,
                0.0,
                None,
            )
            saved = _updated((estimated_mean, estimated_var), batches, mean, var, info, momentum)
            outputs = (mean.clone(), var, *saved)
            if use_global_est:
                # NaN where the ranks disagreed
                used = (torch.where(info[0] < 0, math.nan, s) for s in saved)
                y, mean, rstd = ops.evaluate(x, *used, scale, bias, epsilon)
            outputs = (y, *outputs)
            saved_batches = batches.view(1) + (info[:1] > 0)
        ctx.save_for_backward(x, scale, mean, rstd, info)
        ctx.mark_non_differentiable(*outputs[1:], saved_batches)
        ctx.constant = is_infer or use_global_est
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.peers, ctx.call = peers, call.backward()
        return *outputs, saved_batches

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, *_):
        x, scale, mean, rstd, info = ctx.saved_tensors
        needs_x, needs_scale, needs_bias = ctx.needs_input_grad[:3]
        dtypes = (scale.dtype if needs_scale else None, ctx.bias_dtype if needs_bias else None)
        through = (scale, None, None, 0, 0.0)
        dy = like(dy, x)
        message, _ = ops.local_gradients(dy, x, mean, rstd, info, *through, False, 0, None)
        if needs_x and not ctx.constant:
            merged = _merged(message, x.shape[1], 2, ctx.peers, ctx.call)
            ranks = 1 if ctx.peers is None else ctx.peers.ranks
            dx, dscale, dbias = ops.input_gradient(
                dy, x, merged, None, mean, rstd, info, *through, *dtypes, ranks, None, message
            )
        else:
            dx = ops.evaluation_input_gradient(dy, rstd, scale) if needs_x else None
            dscale, dbias = ops.affine_gradient_shares(message, x, mean, rstd, *dtypes)
        return (
            dx,
            dscale if needs_scale else None,
            dbias if needs_bias else None,
            *(None,) * 10,
        )
