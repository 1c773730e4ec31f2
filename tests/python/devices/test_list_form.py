# SPDX-License-Identifier: Apache-2.0
"""The list form of the layer: the inputs of several devices of one process."""

import copy

import numpy as np
import pytest
import torch

import syncbn
from support import (
    TORCH_DTYPES,
    assert_same_layers,
    new_layer,
    rough_samples,
    to_tensor,
    unchanged,
)
from syncbn.parallel import SelfDataParallel
from test_in_place import layers


def step(layer, xs, dys):
    """Outputs and input gradients of one step with a list, or one tensor."""
    xs = [x.detach().clone().requires_grad_() for x in xs]
    given = [x * 1 for x in xs]
    ys = layer(given) if len(xs) > 1 else [layer(given[0])]
    assert [y is x for x, y in zip(given, ys, strict=True)] == [layer.inplace] * len(xs)
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


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_any_number_of_devices_in_place_exact(dtype):
    """Outputs, statistics and what is recovered have the bits of one device in place; forward has
    those of a layer that is not, too."""
    rng = np.random.default_rng(6)
    x, dy = (to_tensor(rough_samples(rng, (11, 5, 4, 9), dtype), dtype) for _ in range(2))
    whole, ordinary = layers(5)
    (y,), (dx,) = step(whole, [x], [dy])
    assert torch.equal(ordinary(x), y)
    for sizes in SPLITS:
        layer, _ = layers(5)
        ys, dxs = step(layer, x.split(sizes), dy.split(sizes))
        assert torch.equal(torch.cat(ys), y), sizes
        assert torch.equal(torch.cat(dxs), dx), sizes
        assert_same_layers(layer, whole)
    layer, _ = layers(5)  # a device without samples may have another dtype
    none = torch.empty(0, 5, 4, 9).half()
    ys, dxs = step(layer, [none, x], [none, dy])
    assert torch.equal(ys[1], y) and torch.equal(dxs[1], dx) and ys[0].dtype == torch.half
    assert_same_layers(layer, whole)
    given = [part * 1 for part in x.split([5, 6])]
    ys = SelfDataParallel(layers(5)[0], ["cpu"] * 2)(given)
    assert ys[0] is given[0] and ys[1] is given[1] and torch.equal(torch.cat(ys), y)


def test_welford_statistics_of_devices():
    """Near plain batch norm over the whole batch, in float64: sums of 84 numbers near 1, and 1e-12
    is 4,500 units in the last place. Also without samples, with a mask, and without channels."""
    torch.manual_seed(7)
    x, dy = torch.randn(2, 12, 3, 7).double()
    plain = torch.nn.BatchNorm1d(3, momentum=1.0, dtype=torch.float64)
    whole = x.clone().requires_grad_()
    plain(whole).backward(dy)
    for sizes in ([12], [5, 7], [0, 4, 8, 0]):
        layer = syncbn.SyncBatchNorm(3, momentum=1.0, statistics="welford", dtype=torch.float64)
        _, dxs = step(layer, x.split(sizes), dy.split(sizes))
        for a, b in ((torch.cat(dxs), whole.grad), *zip(layer.buffers(), plain.buffers())):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
        torch.testing.assert_close(layer.weight.grad, plain.weight.grad, rtol=0, atol=1e-12)
    layer.load_state_dict(plain.state_dict())
    mask = torch.ones(12, 7, dtype=torch.bool)
    layer([x, 9 * x], mask=[mask, ~mask])
    torch.testing.assert_close(layer.running_var, plain.running_var, rtol=0, atol=1e-12)
    before = copy.deepcopy(layer.state_dict())
    layer([x[:0], x[:0]])
    unchanged(layer, before)
    assert syncbn.SyncBatchNorm(0, statistics="welford")([x[:, :0]] * 2)[1].shape == (12, 0, 7)


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
