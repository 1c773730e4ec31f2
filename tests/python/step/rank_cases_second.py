# SPDX-License-Identifier: Apache-2.0
"""Second derivatives over the ranks of a process group; run by test_distributed.py as rank_cases.py
is. torch.nn.SyncBatchNorm has none ("derivative for aten::batch_norm_backward_reduce is not
implemented"), and takes CUDA tensors alone."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import syncbn
from rank_cases import CountCollectives, diverges, raises, shards
from second_reference import check_second
from support import assert_near


def case_second_derivatives(rank, world):
    for activation, residual, affine_grad, kind in (
        ("none", False, "share", "uneven"),
        ("none", True, "global", "empty first"),
        ("relu", False, "global", "uneven"),
        ("relu", True, "share", "empty first"),
        ("leaky_relu", False, "share", "empty first"),
        ("leaky_relu", True, "global", "uneven"),
    ):
        for dtype in (torch.float16, torch.float32, torch.float64):
            parts = shards(11, world, kind)
            check_second(rank, parts, dtype, activation, residual, affine_grad)
    # The welford mode's statistics of float32 are not those of the reference.
    check_second(rank, shards(11, world, "uneven"), torch.float64, "relu", True, "share", "welford")


def _third_derivatives(layer, x, weight, dy):
    loss = (layer(x).pow(3) * dy).sum()
    for _ in range(2):
        dx, dweight = torch.autograd.grad(loss, (x, weight), create_graph=True)
        loss = dx.pow(3).sum() + dweight.sum()
    return torch.autograd.grad(loss, (x, weight))


def case_third_derivatives(rank, world):
    """They are those of autograd through the definition."""
    x, dy = torch.randn(2, 3 * world, 2, generator=torch.Generator().manual_seed(51)).double()
    own = slice(3 * rank, 3 * rank + 3)
    layer = syncbn.SyncBatchNorm(2, eps=0.1, dtype=torch.float64)
    weight = torch.ones(2, dtype=torch.float64, requires_grad=True)

    def definition(x):
        var, mean = torch.var_mean(x, 0, correction=0)
        return (x - mean) / (var + 0.1).sqrt() * weight

    mine, whole = x[own].clone().requires_grad_(), x.clone().requires_grad_()
    dx, dweight = _third_derivatives(layer, mine, layer.weight, dy[own])
    dist.all_reduce(dweight)
    whole_dx, whole_dweight = _third_derivatives(definition, whole, weight, dy)
    # Numbers of up to 1e6, of a thousand operations.
    torch.testing.assert_close(dx, whole_dx[own], rtol=0, atol=1e-6)
    torch.testing.assert_close(dweight, whole_dweight, rtol=0, atol=1e-6)


def case_second_derivatives_that_one_rank_needs(rank, world):
    """All take part in the same exchanges: a rank with a penalty of 0, whose dy and weight need no
    gradient, has the others' second derivatives of its x; a step after that is in order."""
    x, dy = torch.randn(2, 4 * world, 3, generator=torch.Generator().manual_seed(52)).double()
    own = slice(4 * rank, 4 * rank + 4)
    layer = syncbn.SyncBatchNorm(3, dtype=torch.float64)
    layer.requires_grad_(rank == 0)
    mine, given = x[own].clone().requires_grad_(), dy[own].clone().requires_grad_(rank == 0)
    (dx,) = torch.autograd.grad(layer(mine), mine, given, create_graph=True)
    penalty = (0.0 if rank else 1.0) * dx.pow(3).sum()
    penalty.backward()
    whole = x.clone().requires_grad_()
    plain = nn.BatchNorm1d(3, dtype=torch.float64)
    (dx,) = torch.autograd.grad(plain(whole), whole, dy, create_graph=True)
    dx[:4].pow(3).sum().backward()
    # 4 * world numbers of order 1 and some 20 operations: below 1e-13.
    torch.testing.assert_close(mine.grad, whole.grad[own], rtol=0, atol=1e-12)
    assert mine.grad.abs().max() > 1e-3
    layer(mine).sum().backward()


def case_gradient_penalty_under_ddp(rank, world):
    """A critic with the penalty of WGAN-GP, three steps, against one process: see
    rank_cases_parallel.py for the bound."""
    torch.manual_seed(54)
    critic = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.LeakyReLU(0.2), nn.Conv2d(4, 1, 4)
    ).double()
    plain = copy.deepcopy(critic)
    ddp = DistributedDataParallel(syncbn.convert_sync_batchnorm(critic))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ddp, plain)]
    for step in range(3):
        x = torch.randn(2 * world, 2, 6, 6, generator=torch.Generator().manual_seed(step)).double()
        for optimizer, net, part in zip(
            optimizers, (ddp, plain), (x[2 * rank : 2 * rank + 2], x), strict=True
        ):
            part = part.clone().requires_grad_()
            optimizer.zero_grad()
            score = net(part)
            (dx,) = torch.autograd.grad(score.sum(), part, create_graph=True)
            penalty = (dx.flatten(1).norm(dim=1) - 1).square().mean()
            (score.mean() + 10 * penalty).backward()
            optimizer.step()
    assert_near(ddp.module, plain)


def _first_gradient(layer):
    x = torch.randn(4, 3, requires_grad=True)
    return torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)[0]


def case_second_backwards_that_differ_are_an_error_on_every_rank(rank, world):
    """Layers of the same size, in different orders."""
    layers = [syncbn.SyncBatchNorm(3) for _ in range(2)]
    for k, layer in enumerate(layers):
        layer.state.name = f"layer{k}"
    gradients = [_first_gradient(layer) for layer in layers]
    mine = 0 if rank == 0 else 1
    text = r"call 0, second backward \(.*same call: layer: layer0 on rank 0, layer1 on "
    diverges(text, gradients[mine].sum().backward)


def case_second_backward_without_a_rank_is_an_error(rank, world):
    """In time, with the layer's name."""
    layer = syncbn.SyncBatchNorm(3, timeout=1.375)  # a group of its own, which breaks
    layer.state.name = "critic.norm"
    dx = _first_gradient(layer)
    dist.barrier()
    if rank == 0:
        lost = (syncbn.ExchangeTimeout, syncbn.PeerLost)
        raises(lost, "critic.norm, call 0, second backward", dx.sum().backward)
    dist.barrier()


def case_batched_gradients_on_one_rank_are_refused_at_once_and_disturb_nobody(rank, world):
    layer = syncbn.SyncBatchNorm(3)
    x = torch.randn(4, 3, requires_grad=True)

    def grad(y, dy, **options):
        return torch.autograd.grad(y, x, dy, retain_graph=True, **options)[0]

    dy = torch.randn(4, 3)
    expected = grad(layer(x), dy)
    for create_graph in (False, True):
        y = layer(x)

        def backward(y=y, create_graph=create_graph):
            grad(y, torch.stack((dy, dy)), create_graph=create_graph, is_grads_batched=True)

        if rank == 0:
            raises(NotImplementedError, "backward inside vmap", backward)
        dist.barrier()
        assert torch.equal(grad(y, dy, create_graph=create_graph), expected)


def case_exchanges_of_a_second_backward(rank, world):
    """Three sums, four with affine_grad "global", of two collectives each; none where the input
    needs no gradient and shares are wanted, as in the first backward."""
    for affine_grad, needs_x, sums in (
        ("share", True, 3),
        ("global", True, 4),
        ("share", False, 0),
        ("global", False, 2),
    ):
        layer = syncbn.SyncBatchNorm(3, affine_grad=affine_grad)
        x = torch.randn(4, 3, requires_grad=needs_x)
        y = layer(x)
        dy = torch.ones_like(y).requires_grad_()
        sources = (layer.weight, layer.bias, *([x] if needs_x else []))
        gradients = torch.autograd.grad(y, sources, dy, create_graph=True)
        with CountCollectives() as count:
            torch.autograd.grad(sum(g.sum() for g in gradients), dy)
        assert count.names == 2 * sums * ["all_reduce"], (affine_grad, needs_x, count.names)
