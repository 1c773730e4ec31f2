# SPDX-License-Identifier: Apache-2.0
"""Second and third derivatives on one rank; rank_cases_second.py has them on several.

torch.nn.SyncBatchNorm has no second derivatives: its backward calls operators without a derivative
(batch_norm_backward_reduce). torch.nn.BatchNorm* has them, in one process; it is the reference.
"""

import functools
import gc
import weakref

import pytest
import torch
from torch import nn

import syncbn
from checkpoint_support import plain, recomputing
from second_reference import check_second
from support import TORCH_DTYPES, new_layer


@pytest.mark.parametrize(
    "activation, residual, affine_grad",
    (("none", False, "global"), ("relu", True, "share"), ("leaky_relu", False, "share")),
)
def test_second_derivatives(activation, residual, affine_grad):
    for dtype in TORCH_DTYPES.values():
        check_second(0, [slice(0, 11)], dtype, activation, residual, affine_grad)


def leaves(*shape):
    torch.manual_seed(60)
    x, z = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in "xz")
    weight, bias = (torch.randn(shape[1], dtype=torch.float64, requires_grad=True) for _ in "wb")
    return x, z, weight, bias


@pytest.mark.parametrize(
    "activation, statistics",
    (("none", "welford"), ("relu", "reproducible"), ("leaky_relu", "reproducible")),
)
def test_gradgradcheck_with_a_mask(activation, statistics):
    """Third derivatives too; NaN where nothing counts changes none. PyTorch has no masks here."""
    mask = torch.tensor([[True, False, True], [True, True, False], [False, False, True]])
    x, z, weight, bias = leaves(3, 2, 3)

    def function(x, z, weight, bias):
        x = torch.where(mask.unsqueeze(1), x, torch.nan)
        return syncbn.functional.sync_batch_norm(
            *(x, None, None, weight, bias, True),
            eps=0.1,
            residual=z,
            activation=activation,
            negative_slope=0.3,
            statistics=statistics,
            mask=mask,
        )

    def gradients(x, z, weight, bias):
        loss = function(x, z, weight, bias).pow(3).sum()
        return torch.autograd.grad(loss, (x, z, weight, bias), create_graph=True)

    assert torch.autograd.gradgradcheck(function, (x, z, weight, bias))
    assert torch.autograd.gradgradcheck(gradients, (x, z, weight, bias))


def test_the_graph_is_freed_without_the_garbage_collector():
    x = torch.randn(4, 3, requires_grad=True)
    gc.disable()
    try:
        y = syncbn.SyncBatchNorm(3)(x)
        (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        dx.square().sum().backward()
        nodes = [weakref.ref(y.grad_fn), weakref.ref(dx.grad_fn)]
        tensors = [weakref.ref(y), weakref.ref(dx)]
        del y, dx
        assert not any(reference() for reference in (*nodes, *tensors))
    finally:
        gc.enable()


def test_create_graph_keeps_the_bits_of_the_first_gradients_exact():
    for options in ({}, {"activation": "relu", "affine_grad": "global"}):
        results = []
        for create_graph in (False, True):
            torch.manual_seed(61)
            layer = new_layer(5, **options)
            x, z, dy = (torch.randn(4, 5, 6).requires_grad_() for _ in "xzd")
            sources = (x, z, layer.weight, layer.bias)
            results.append(torch.autograd.grad(layer(x, z), sources, dy, create_graph=create_graph))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_in_place_is_refused():
    layer = new_layer(3, activation="leaky_relu", inplace=True)
    with torch.no_grad():
        layer.weight.fill_(1)
    x = torch.randn(4, 3, requires_grad=True)
    (dx,) = torch.autograd.grad(layer(x * 1).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative with inplace=True.*expected"):
        dx.sum().backward()
    assert layer.weight.grad is None


def test_batched_gradients_are_refused():
    """vectorize=True runs backward inside vmap; torch.nn.BatchNorm1d has a rule for it."""
    x = torch.randn(4, 3, requires_grad=True)
    jacobian = torch.autograd.functional.jacobian
    layer = syncbn.SyncBatchNorm(3)
    assert jacobian(layer, x).shape == (4, 3, 4, 3)
    with pytest.raises(NotImplementedError, match="inside vmap.*expected one gradient"):
        jacobian(layer, x, vectorize=True)
    with pytest.raises(NotImplementedError, match="second backward.*inside vmap"):
        torch.autograd.functional.hessian(lambda x: layer(x).pow(3).sum(), x, vectorize=True)


def test_no_samples_at_all():
    """Zeros, not NaN; torch.nn.BatchNorm1d gives x no gradient at all."""
    layer = new_layer(3)
    x = torch.empty(0, 3, 2, requires_grad=True)
    dx, dweight = torch.autograd.grad(layer(x).sum(), (x, layer.weight), create_graph=True)
    (dx.sum() + dweight.sum()).backward()
    assert x.grad.shape == x.shape and torch.equal(layer.weight.grad, torch.zeros(3))


def penalty(segment):
    """Gradients, running statistics and counters of two layers with a penalty on dx; a layer is
    used twice."""
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(3, 4), syncbn.SyncBatchNorm(4), nn.Tanh()).double()
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    (dx,) = torch.autograd.grad(
        segment(lambda x: net[1](net(x)), x).pow(3).sum(), x, create_graph=True
    )
    dx.square().sum().backward()
    return x.grad, *(p.grad for p in net.parameters()), *net.buffers()


def test_through_a_checkpointed_segment_exact():
    """The bits of no checkpoint, and one update. A batch norm of PyTorch updates twice."""
    expected = penalty(plain)
    for form in (recomputing, lambda f, x: recomputing(functools.partial(recomputing, f), x)):
        for got, exact in zip(penalty(form), expected, strict=True):
            assert torch.equal(got, exact)
