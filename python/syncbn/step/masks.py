# SPDX-License-Identifier: Apache-2.0
"""Masks: which elements of an input count, shared by all channels; and the layer as PyTorch's own
operators."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .options import Options, activation_of, check_like_input, check_strided


def check_mask(mask: Tensor, x: Tensor, in_place: bool = False) -> None:
    """A mask is bool or uint8, of shape (N, *spatial), on the input's device. in_place: the output
    is to lie over the input, which takes no mask."""
    check_strided("mask", mask)
    shape = (*x.shape[:1], *x.shape[2:])
    if (
        mask.dtype not in (torch.bool, torch.uint8)
        or mask.shape != shape
        or mask.device != x.device
    ):
        raise ValueError(
            f"mask: got {mask.dtype} of shape {tuple(mask.shape)} on {mask.device}, expected "
            f"torch.bool or torch.uint8, {tuple(shape)} (the input's shape without its channels) "
            f"and {x.device}"
        )
    if in_place:
        raise ValueError("mask: got one with inplace=True, expected None")


def counting(x: Tensor, mask: Tensor) -> Tensor:
    """Gives x, and 0 where an element does not count."""
    return torch.where(mask.to(torch.bool).unsqueeze(1), x, 0)


def _finish(y: Tensor, residual: Tensor | None, options: Options) -> Tensor:
    """Gives what follows PyTorch's batch norm: its own addition and activation."""
    if residual is not None:
        check_like_input("residual", residual, y)
        y = y + residual
    activation = activation_of(options.activation)
    return activation.function(y, *[options.negative_slope] if activation.slope is None else [])


def plain(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    mask: Tensor | None,
    options: Options,
    momentum: float,
    local_batch: bool = False,
) -> Tensor:
    """Calls PyTorch's operators: batch norm of the elements that count, addition and activation.
    local_batch: statistics are those of x, so batch norm is given those elements alone."""
    parameters = running_mean, running_var, weight, bias

    def normalize(x: Tensor) -> Tensor:
        return F.batch_norm(x, *parameters, local_batch, momentum, options.eps)

    if mask is None:
        return _finish(normalize(x), residual, options)
    check_mask(mask, x)
    if local_batch:
        rows, counts = x.movedim(1, -1), mask.to(torch.bool)
        packed = rows[counts]
        if torch.compiler.is_compiling():  # where how many they are is not known
            torch._check(packed.shape[0] > 1)
        packed = normalize(packed)
        y = torch.zeros_like(rows).index_put((counts,), packed).movedim(-1, 1)
    else:  # Zeros go in too: a NaN that does not count would reach the weight's gradient.
        y = counting(normalize(counting(x, mask)), mask)
    return counting(_finish(y, residual, options), mask)
