# SPDX-License-Identifier: Apache-2.0
"""The list form of the layer: the inputs of several devices of one process."""

import copy

import numpy as np
import pytest
import torch

from support import TORCH_DTYPES, assert_same_layers, new_layer, rough_samples, to_tensor


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


def test_second_derivatives_are_refused():
    xs = [torch.randn(4, 3, requires_grad=True) for _ in range(2)]
    dxs = torch.autograd.grad(
        sum(y.square().sum() for y in new_layer(3)(xs)), xs, create_graph=True
    )
    text = "SyncBatchNorm: got a second derivative of a list of inputs, expected one input"
    with pytest.raises(NotImplementedError, match=text):
        dxs[0].sum().backward()
