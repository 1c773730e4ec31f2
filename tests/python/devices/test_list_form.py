# SPDX-License-Identifier: Apache-2.0
"""The list form of the layer: the inputs of several devices of one process."""

import copy

import numpy as np
import pytest
import torch

from support import TORCH_DTYPES, assert_same_layers, new_layer, rough_samples, to_tensor
from syncbn.parallel import all_reduce

U = 2.0**-53  # the rounding unit of float64


def step(layer, xs, dys):
    """Outputs and input gradients of one step with a list, or one tensor."""
    xs = [x.detach().clone().requires_grad_() for x in xs]
    ys = layer(xs) if len(xs) > 1 else [layer(xs[0])]
    torch.autograd.backward(ys, dys)
    return ys, [x.grad for x in xs]


SPLITS = ([5, 6], [11, 0], [0, 3, 8], [2, 0, 4, 0, 5], [1, 1, 1, 1, 1, 1, 2, 3])


@pytest.mark.parametrize("affine_grad", ("share", "global"))
@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_any_number_of_devices_gives_the_bits_of_one_exact(dtype, affine_grad):
    """On data on which sums in float64 depend on their order. The process's gradients of weight and
    bias are sums over all its devices, so they do not depend on the number of devices either."""
    rng = np.random.default_rng(1)
    x, dy = (to_tensor(rough_samples(rng, (11, 5, 4, 9), dtype), dtype) for _ in range(2))
    whole = new_layer(5, affine_grad=affine_grad)
    (y,), (dx,) = step(whole, [x], [dy])
    for sizes in SPLITS:
        layer = new_layer(5, affine_grad=affine_grad)
        ys, dxs = step(layer, x.split(sizes), dy.split(sizes))
        assert torch.equal(torch.cat(ys), y), sizes
        assert torch.equal(torch.cat(dxs), dx), sizes
        assert_same_layers(layer, whole)
    assert whole.num_batches_tracked == 1


@pytest.mark.parametrize("shape", ((13, 4), (13, 4, 6), (13, 4, 3, 5)), ids=str)
@pytest.mark.parametrize("reduce", (sum, None), ids=("sum", "all_reduce"))
def test_against_the_formulas_in_float64(shape, reduce):
    """Autograd through mean = sum(x) / N, var = sum(x^2) / N - mean^2, with sums over devices.

    A sum of n terms in the reference has a relative error of n u of its terms' magnitudes, so its
    var is off by (n + 4) u (E[x^2] + mean^2), relative to var + eps by (n + 4) u kappa. y holds
    (var + eps)^(-1/2) and dx the power -3/2 of it, and both a few more roundings and sums of n
    terms, each relative to the magnitudes that are added: below, 4 (n + 4) u kappa of those.
    syncbn's own error, a few u, is within that.
    """
    torch.manual_seed(3)
    eps, sizes = 1e-3, [4, 0, 7, 2]
    x, dy = (torch.randn(shape, dtype=torch.float64) * 2 + shift for shift in (1, 0))
    layer = new_layer(4, torch.float64, eps=eps, momentum=1.0)
    weight, bias = (p.detach().clone().requires_grad_() for p in (layer.weight, layer.bias))
    ys, dxs = step(layer, x.split(sizes), dy.split(sizes))

    dims = [d for d in range(x.dim()) if d != 1]
    view = (1, 4) + (1,) * (x.dim() - 2)
    n = x.numel() // 4
    xs = [t.clone().requires_grad_() for t in x.split(sizes)]
    sums, squares = [t.sum(dims) for t in xs], [t.square().sum(dims) for t in xs]
    if reduce is sum:
        sums, squares = [sum(sums)] * 4, [sum(squares)] * 4
    else:
        sums, squares = all_reduce(sums), all_reduce(squares)
    expected = []
    for t, s, q in zip(xs, sums, squares):
        mean = s / n
        rstd = (q / n - mean.square() + eps).rsqrt()
        t = (t - mean.view(view)) * (weight * rstd).view(view) + bias.view(view)
        expected.append(t)
    torch.autograd.backward(expected, dy.split(sizes))

    with torch.no_grad():
        mean, var = x.mean(dims), x.var(dims, unbiased=False)
        kappa = ((x.square().mean(dims) + mean.square()) / (var + eps)).view(view)
        few = 4 * (n + 4) * U * kappa
        rstd = (var + eps).rsqrt().view(view)
        a = (weight.abs().view(view)) * rstd
        centered = x.abs() + mean.abs().view(view)
        size = a * centered + bias.abs().view(view)
        assert ((torch.cat(ys) - torch.cat(expected)).abs() <= few * size).all()
        # The three terms of dx, with sums of magnitudes.
        magnitudes = dy.abs().sum(dims).view(view)
        products = (dy.abs() * centered).sum(dims).view(view)
        size = a * (dy.abs() + magnitudes / n + centered * rstd**2 * products / n)
        dx = torch.cat([t.grad for t in xs])
        assert ((torch.cat(dxs) - dx).abs() <= few * size).all()
        few = few.view(4)
        error = (layer.weight.grad - weight.grad).abs()
        assert (error <= few * (rstd * products).view(4)).all()
        assert ((layer.bias.grad - bias.grad).abs() <= few * magnitudes.view(4)).all()
        moment = (x.square().mean(dims) + mean.square()) * n / (n - 1)
        assert ((layer.running_mean - mean).abs() <= (n + 4) * U * x.abs().mean(dims)).all()
        assert ((layer.running_var - var * n / (n - 1)).abs() <= (n + 4) * U * moment).all()


def test_missing_output_gradients_are_zeros_exact():
    torch.manual_seed(5)
    x, dy = torch.randn(6, 3, 4), torch.randn(6, 3, 4)
    a, b = new_layer(3), new_layer(3)
    xs = [t.clone().requires_grad_() for t in x.split([1, 2, 3])]
    ys = a(xs)
    ys[1].backward(dy[1:3])
    zeros = torch.zeros_like(dy)
    zeros[1:3] = dy[1:3]
    _, dxs = step(b, x.split([1, 2, 3]), zeros.split([1, 2, 3]))
    assert all(torch.equal(x.grad, dx) for x, dx in zip(xs, dxs, strict=True))
    assert_same_layers(a, b)


def test_inputs_that_need_no_gradient():
    xs = [torch.randn(2, 3), torch.randn(2, 3, requires_grad=True)]
    layer = new_layer(3)
    layer.weight.requires_grad_(False)
    torch.stack(layer(xs)).square().sum().backward()
    assert xs[0].grad is None and xs[1].grad is not None
    assert layer.weight.grad is None and layer.bias.grad is not None


def test_layouts_change_no_bit_exact():
    """Channels-last inputs, gradients of another layout."""
    torch.manual_seed(6)
    x, dy = torch.randn(6, 3, 4, 5), torch.randn(6, 3, 4, 5)
    a, b = new_layer(3), new_layer(3)
    ys, dxs = step(a, x.split([2, 4]), dy.split([2, 4]))
    last = [t.contiguous(memory_format=torch.channels_last) for t in x.split([2, 4])]
    zs, dzs = step(b, last, dy.split([2, 4]))
    assert all(torch.equal(p, q) for p, q in zip([*ys, *dxs], [*zs, *dzs], strict=True))
    assert_same_layers(a, b)


def test_devices_without_samples():
    layer = new_layer(3)
    before = copy.deepcopy(layer.state_dict())
    ys, dxs = step(layer, [torch.empty(0, 3, 2)] * 3, [torch.empty(0, 3, 2)] * 3)
    assert [y.shape for y in ys] == [dx.shape for dx in dxs] == [(0, 3, 2)] * 3
    assert all(torch.equal(v, before[k]) for k, v in layer.state_dict().items())
    assert not layer.weight.grad.any()
    # The dtype of a device without samples is its own.
    half = torch.randn(4, 3, dtype=torch.float16)
    ys, dxs = step(layer, [torch.empty(0, 3), half], [torch.empty(0, 3), half])
    assert [t.dtype for t in (*ys, *dxs)] == [torch.float32, torch.float16] * 2
    assert layer.num_batches_tracked == 1


@pytest.mark.parametrize("affine_grad", ("share", "global"))
def test_values_that_are_not_finite_exact(affine_grad):
    """Channels with NaN, one infinity, both, and an overflow of the squares, on several devices."""
    x, dy = torch.randn(8, 5, 3, dtype=torch.float64), torch.randn(8, 5, 3, dtype=torch.float64)
    x[[1, 6], 0, 0] = float("nan")
    x[[0, 3, 7], 1, 1] = float("inf")
    x[2, 2, 0], x[5, 2, 0] = float("inf"), -float("inf")
    x[[1, 4], 3, 2] = 1e200
    dy[[0, 5], 4, 0] = float("inf")
    whole, layer = (new_layer(5, torch.float64, affine_grad=affine_grad) for _ in range(2))
    expected = step(whole, [x], [dy])
    got = step(layer, x.split([3, 3, 2]), dy.split([3, 3, 2]))
    for parts, (one,) in zip(got, expected, strict=True):
        torch.testing.assert_close(torch.cat(parts), one, rtol=0, atol=0, equal_nan=True)
    assert_same_layers(layer, whole)


def test_second_derivatives_are_refused():
    xs = [torch.randn(4, 3, requires_grad=True) for _ in range(2)]
    dxs = torch.autograd.grad(
        sum(y.square().sum() for y in new_layer(3)(xs)), xs, create_graph=True
    )
    text = "SyncBatchNorm: got a second derivative of a list of inputs, expected one input"
    with pytest.raises(NotImplementedError, match=text):
        dxs[0].sum().backward()


@pytest.mark.parametrize("momentum", (0.25, None), ids=str)
def test_a_count_of_batches_that_was_averaged_exact(momentum):
    """As that of one input."""
    whole, layer = (new_layer(3, momentum=momentum) for _ in range(2))
    for each in (whole, layer):
        each.num_batches_tracked = torch.tensor(2.5)
    x = torch.randn(7, 3)
    whole(x), layer(x.split([4, 3]))
    assert_same_layers(layer, whole)
    assert layer.num_batches_tracked == 3.5
