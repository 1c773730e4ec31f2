"""Synchronized batch normalization as a function."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import _exchange
from ._ops import ops

AFFINE_GRADS = ("share", "global")


class _BatchNormTraining(torch.autograd.Function):
    """y, mean, var (float64, biased) and info (count, fingerprint) of a training step.

    An autograd function and not an operator with autograd: a compiled checkpoint then exchanges
    once, where a differentiable operator's exchange would be recomputed.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, call, layer, eps, group, affine_grad, layer_name):
        channels = x.shape[1]
        message = ops.local_moments(x, layer, call, eps, _exchange.frame_words(group))
        merged, rest, count = _exchange.exchange(message, channels, group, layer_name)
        if count == 1:
            raise ValueError(
                "Expected more than 1 value per channel when training, got 1 over all ranks "
                f"(input size {list(x.shape)} on this one)"
            )
        ranks = 1 if group is None else group.ranks
        y, mean, var, rstd, info = ops.normalize(x, message, merged, rest, weight, bias, eps, ranks)
        ctx.save_for_backward(x, weight, mean, rstd, info)
        ctx.mark_non_differentiable(mean, var, info)
        ctx.group = group
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.affine_grad = affine_grad
        ctx.layer_name = layer_name
        return y, mean, var, info

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, *_):
        x, weight, mean, rstd, info = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        group, ranks = ctx.group, 1 if ctx.group is None else ctx.group.ranks
        dtypes = (
            weight.dtype if needs_weight else None,
            ctx.bias_dtype if needs_bias else None,
        )
        if dy.stride() != x.stride():
            dy = torch.empty_like(x).copy_(dy)
        message = ops.local_gradients(dy, x, info, _exchange.frame_words(group))
        dx = dweight = dbias = None
        # One rank's share is the whole, and comes with dx.
        shares = ctx.affine_grad == "share" and not (group is None and needs_x)
        if shares and (needs_weight or needs_bias):
            dweight, dbias = ops.affine_gradient_shares(message, x, mean, rstd, *dtypes)
        if needs_x or not shares:
            merged, rest, _ = _exchange.exchange(message, x.shape[1], group, ctx.layer_name)
            dx, *sums = ops.input_gradient(
                dy,
                x,
                merged,
                rest,
                mean,
                rstd,
                info,
                weight,
                *((None, None) if shares else dtypes),
                ranks,
            )
            if not shares:
                dweight, dbias = sums
        return (
            dx if needs_x else None,
            dweight if needs_weight else None,
            dbias if needs_bias else None,
            *(None,) * 6,
        )


def _check_arguments(x, running_mean, running_var, weight, bias, eps):
    """One error that names the argument, what was given and what is allowed."""
    if x.dim() < 2:
        raise ValueError(f"input: got {x.dim()}D input, expected at least 2D (N, C, ...)")
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(f"input: got {x.dtype}, expected float16, bfloat16, float32 or float64")
    if not eps >= 0:
        raise ValueError(f"eps: got {eps}, expected a number of at least 0")
    for name, tensor in (
        ("running_mean", running_mean),
        ("running_var", running_var),
        ("weight", weight),
        ("bias", bias),
    ):
        if tensor is None:
            continue
        if tensor.shape != (x.shape[1],):
            raise ValueError(
                f"{name}: got shape {tuple(tensor.shape)}, expected ({x.shape[1]},), one entry per "
                f"channel of the input {tuple(x.shape)}"
            )
        if tensor.device != x.device:
            raise ValueError(
                f"{name}: got a tensor on {tensor.device}, expected {x.device}, the input's device"
            )


def train_step(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    num_batches_tracked: Tensor | None,
    call: Tensor | None,
    momentum: float | None,
    eps: float,
    group: str | None,
    affine_grad: str,
    layer_name: str,
    layer_number: int,
) -> Tensor:
    """One training forward: exchange, normalize, update the running statistics in place.

    group: a process group's name, None for the world. momentum None: cumulative averaging by
    num_batches_tracked. call: int64 [1], the number of this call, advanced by one. layer_number
    goes into the fingerprint, layer_name into errors.
    """
    if x.device.type != "cpu":
        raise ValueError(f"input: got a tensor on {x.device}, expected the CPU (CUDA is to come)")
    peers = _exchange.peers(group)
    try:
        _check_arguments(x, running_mean, running_var, weight, bias, eps)
    except ValueError:
        _exchange.reject(x, peers)
        raise
    y, mean, var, info = _BatchNormTraining.apply(
        x,
        weight,
        bias,
        call,
        layer_number,
        eps,
        peers,
        affine_grad,
        layer_name,
    )
    if running_mean is not None or num_batches_tracked is not None or call is not None:
        ops.update_running_statistics(
            running_mean, running_var, num_batches_tracked, call, mean, var, info, momentum
        )
    return y


# torch.fx cannot follow an exchange: a traced sync_batch_norm is one call of train_step.
torch.fx.wrap("train_step")


def sync_batch_norm(
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    group: "_exchange.Group" = None,
) -> Tensor:
    """Batch normalization with the statistics of all ranks of a process group.

    Args:
        x: (N, C, *spatial), float16, bfloat16, float32 or float64, any strides. N may differ
            between ranks and may be 0.
        running_mean, running_var: (C,), updated in place when training; needed when not.
        weight, bias: (C,) or None (1 and 0).
        training: False is torch.nn.functional.batch_norm, without an exchange.
        momentum: share of the batch in the running statistics.
        eps: added to the variance.
        group: a process group or its name. None: the default group; without
            torch.distributed, this process alone.

    Returns:
        y like x. The gradients of weight and bias are this rank's own share, as in PyTorch: DDP
        averages them.

    Raises:
        ValueError: an argument is refused, or all ranks together have one value per channel.
        DivergenceError: the ranks did not make the same call.
    """
    if not training:
        return F.batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps)
    return train_step(
        x,
        running_mean,
        running_var,
        weight,
        bias,
        num_batches_tracked=None,
        call=None,
        momentum=momentum,
        eps=eps,
        group=_exchange.group_name(group),
        affine_grad="share",
        layer_name="sync_batch_norm",
        layer_number=0,
    )
