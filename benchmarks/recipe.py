# SPDX-License-Identifier: Apache-2.0
"""Synchronized batch norm as it is usually written by hand: means of x and x * x, and one
differentiable all-reduce of both. What this library is measured against.

It needs equal numbers of samples on all ranks, computes the variance as E[x^2] - E[x]^2 in float32,
and autograd keeps x and x * scale for backward.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values: Tensor) -> Tensor:
        values = values.clone()
        dist.all_reduce(values)
        return values

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient)
        return gradient


class RecipeSyncBatchNorm(_BatchNorm):
    """For training; 16-bit input is computed in float32."""

    def _check_input_dim(self, input: Tensor) -> None:
        pass

    def forward(self, input: Tensor) -> Tensor:
        x = input if input.dtype == torch.float64 else input.float()
        axes = [0, *range(2, x.dim())]
        ranks = dist.get_world_size()
        sums = SumOverRanks.apply(torch.cat([x.mean(axes), (x * x).mean(axes)]))
        mean, mean_square = (sums / ranks).chunk(2)
        var = mean_square - mean * mean
        scale = self.weight * torch.rsqrt(var + self.eps)
        shift = self.bias - mean * scale
        with torch.no_grad():
            count = ranks * x.numel() // x.shape[1]
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * (count / (count - 1)), self.momentum)
            self.num_batches_tracked += 1
        shape = [1, -1, *[1] * (x.dim() - 2)]
        return (x * scale.reshape(shape) + shift.reshape(shape)).to(input.dtype)


def check() -> None:
    """All ranks' samples give what torch.nn.BatchNorm2d gives for the whole batch, in float64."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(0)
    whole_x, whole_dy = torch.randn(2, ranks, 4, 8, 5, 5, generator=generator, dtype=torch.float64)
    recipe, plain = RecipeSyncBatchNorm(8).double(), nn.BatchNorm2d(8).double()
    x = whole_x[rank].clone().requires_grad_()
    y = recipe(x)
    dx, dweight, dbias = torch.autograd.grad(y, [x, recipe.weight, recipe.bias], whole_dy[rank])
    for share in (dweight, dbias):
        dist.all_reduce(share)
    x = whole_x.flatten(0, 1).requires_grad_()
    expected = plain(x)
    gradients = torch.autograd.grad(expected, [x, plain.weight, plain.bias], whole_dy.flatten(0, 1))
    own = slice(4 * rank, 4 * rank + 4)
    running = (recipe.running_mean, recipe.running_var)
    pairs = [(y, expected[own]), (dx, gradients[0][own]), (dweight, gradients[1])]
    pairs += [(dbias, gradients[2]), *zip(running, (plain.running_mean, plain.running_var))]
    for a, b in pairs:
        # A sum of n = 100 ranks numbers of size 1 is off by at most n^2 eps / 2. Ten times that for
        # two implementations and the steps after the sums, of which none cancels a digit.
        torch.testing.assert_close(a, b, rtol=0, atol=1e5 * ranks**2 * 2.0**-53)


def convert(model: nn.Module) -> nn.Module:
    """The model with this recipe in place of its batch norms, sharing their parameters."""
    for name, child in model.named_children():
        if isinstance(child, _BatchNorm):
            layer = RecipeSyncBatchNorm(child.num_features, child.eps, child.momentum)
            layer.weight, layer.bias = child.weight, child.bias
            setattr(model, name, layer)
        else:
            convert(child)
    return model
