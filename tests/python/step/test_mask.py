# SPDX-License-Identifier: Apache-2.0
"""Masks: gradients, evaluation and forms; test_bits.py has every bit of them.

torch.nn.SyncBatchNorm has no mask: padded positions enter mean and variance, and get gradients.
"""

import pytest
import torch

import syncbn
from rank import Checked, Rank
from support import layouts_of, new_layer


def step(layer, x, dy, *rest, **options):
    """(y, gradients of x and of the tensors in rest) of a training step."""
    leaves = [t.clone().requires_grad_() for t in (x, *rest)]
    layer.zero_grad()
    y = layer(*leaves, **options)
    y.backward(dy)
    return y.detach(), *(t.grad for t in leaves)


@pytest.mark.parametrize("activation", ("none", "leaky_relu"))
@pytest.mark.parametrize("statistics", ("reproducible", "welford"))
def test_gradcheck(statistics, activation):
    layer = new_layer(
        3, torch.float64, statistics=statistics, activation=activation, negative_slope=0.3
    )
    generator = torch.Generator().manual_seed(3)
    x, z = (torch.randn(4, 3, 5, dtype=torch.float64, generator=generator) for _ in range(2))
    mask = torch.rand(4, 5, generator=generator) < 0.6
    x, z = (t.requires_grad_() for t in (x, z))
    assert torch.autograd.gradcheck(lambda a: layer(a, mask=mask), (x,))
    assert torch.autograd.gradcheck(lambda a, b: layer(a, b, mask), (x, z))


@pytest.mark.parametrize("activation", ("none", "relu"))
@pytest.mark.parametrize("tracked", (True, False))
def test_evaluation(tracked, activation):
    """PyTorch's operator on what counts; NaN elsewhere reaches neither y nor any gradient."""
    generator = torch.Generator().manual_seed(4)
    x, z, dy = (torch.randn(6, 4, 9, generator=generator) for _ in range(3))
    mask = torch.rand(6, 9, generator=generator) < 0.6
    x, z = (torch.where(mask[:, None], t, float("nan")) for t in (x, z))
    layer = new_layer(4, activation=activation, track_running_stats=tracked).eval()
    y, dx, dz = step(layer, x, dy, z, mask=mask)
    rows = [t.movedim(1, -1)[mask] for t in (x, dy, z)]
    plain = new_layer(4, activation=activation, track_running_stats=tracked).eval()
    packed_y, packed_dx, packed_dz = step(plain, rows[0], rows[1], rows[2])
    # Running statistics leave no sum; a batch's own are sums in another order: 1e-5 of order 1.
    bound = {"rtol": 0, "atol": 0.0 if tracked else 1e-5}
    for got, expected in ((y, packed_y), (dx, packed_dx), (dz, packed_dz)):
        torch.testing.assert_close(got.movedim(1, -1)[mask], expected, **bound)
        assert not got.movedim(1, -1)[~mask].any()
    torch.testing.assert_close(layer.weight.grad, plain.weight.grad, rtol=1e-5, atol=1e-5)
    function = syncbn.functional.sync_batch_norm
    if tracked:
        given = (x, layer.running_mean, layer.running_var, layer.weight, layer.bias)
        got = function(*given, residual=z, mask=mask, activation=activation)
        assert torch.equal(got, y)


def test_strided_masks_and_changes_before_backward():
    x, dy = torch.randn(2, 5, 3, 8)
    wide = torch.rand(8, 10) < 0.5
    mask = wide[:, ::2].T
    for a, b in zip(
        step(new_layer(3), x, dy, mask=mask),
        step(new_layer(3), x, dy, mask=mask.contiguous()),
        strict=True,
    ):
        assert torch.equal(a, b)
    mask = mask.contiguous()
    y = new_layer(3)(x.requires_grad_(), mask=mask)
    mask.logical_not_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)


class Masked(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = new_layer(4)

    def forward(self, x, mask):
        return self.layer(x * 2, mask=mask)


def test_compiled_exact():
    """One graph, with the eager bits."""
    x, dy, mask = torch.randn(5, 4, 7), torch.randn(5, 4, 7), torch.rand(5, 7) < 0.5
    results = []
    for compiled in (False, True):
        model = Masked()
        call = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        for training in (True, False):
            model.train(training)
            leaf = x.clone().requires_grad_()
            y = call(leaf, mask)
            y.backward(dy)
            results.append((y.detach(), leaf.grad, model.layer.running_var.clone()))
    for eager, graph in zip(results[:2], results[2:], strict=True):
        for a, b in zip(eager, graph, strict=True):
            assert torch.equal(a, b)


def test_operators_follow_their_schemas():
    mask = torch.rand(5, 6) < 0.5
    for x in layouts_of(torch.randn(5, 4, 6)).values():
        for statistics in (0, 1):
            rank = Rank(x, None, None, x, mask, kind=1, statistics=statistics, ops=Checked())
            rank.step()
            rank.finish_backward(rank.begin_backward(x, keep=True))
    for mask, given in (
        (torch.ones(4, 6, dtype=torch.bool), r"mask: got shape \(4, 6\), expected \(5, 6\)"),
        (torch.ones(5, 6), "mask: got dtype Float, expected bool or uint8"),
        (torch.ones(6, 5, dtype=torch.bool).T, "mask: got strides"),
    ):
        with pytest.raises(RuntimeError, match=given):
            Rank(torch.randn(5, 4, 6), mask=mask).begin()


def test_masks_of_numbers():
    """Any but 0 counts, also with the negative bit."""
    x = torch.linspace(-1, 1, 60).view(5, 4, 3)
    mask = x[:, 0] > 0
    expected = syncbn.SyncBatchNorm(4)(x, None, mask)
    for numbers in (200 * mask.to(torch.uint8), torch._neg_view(-mask.to(torch.uint8))):
        assert torch.equal(syncbn.SyncBatchNorm(4)(x, None, numbers), expected)
