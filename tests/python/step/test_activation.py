# SPDX-License-Identifier: Apache-2.0
"""The fused activation and residual against autograd; test_bits.py has every bit of them."""

import pytest
import torch
import torch.nn.functional as F

import syncbn
from rank import Rank
from support import layouts_of
from syncbn.step.options import ACTIVATIONS


@pytest.mark.parametrize("activation", ["none", "relu", "leaky_relu"])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "channels-last"])
def test_layer_against_autograd(activation, residual, layout):
    """float64, against PyTorch's separate operators; 1e-12 is 4,500 units in the last place of
    numbers near 1, for sums of 240 of them."""
    torch.manual_seed(0)
    fused = syncbn.SyncBatchNorm(6, activation=activation, negative_slope=0.2, dtype=torch.float64)
    plain = torch.nn.BatchNorm2d(6, dtype=torch.float64)
    with torch.no_grad():
        fused.weight.uniform_(-1, 1)
        fused.bias.uniform_(-1, 1)
    plain.load_state_dict(fused.state_dict())
    x, z, dy = (layouts_of(torch.randn(4, 6, 5, 3).double())[layout] for _ in range(3))
    activate = {
        "none": lambda v: v,
        "relu": F.relu,
        "leaky_relu": lambda v: F.leaky_relu(v, 0.2),
    }[activation]
    for training in (True, False):
        fused.train(training), plain.train(training)
        mine, theirs = ([x.clone().requires_grad_(), z.clone().requires_grad_()] for _ in range(2))
        y = fused(mine[0], mine[1]) if residual else fused(mine[0])
        v = plain(theirs[0])
        expected = activate(v + theirs[1] if residual else v)
        torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
        fused.zero_grad(), plain.zero_grad()
        y.backward(dy), expected.backward(dy)
        for a, b in zip(
            [*mine[: 1 + residual], fused.weight, fused.bias],
            [*theirs[: 1 + residual], plain.weight, plain.bias],
            strict=True,
        ):
            torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-12)
    torch.testing.assert_close(fused.state_dict(), plain.state_dict(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("frozen", ["x", "residual", "parameters"])
def test_what_needs_no_gradient(frozen):
    torch.manual_seed(0)
    layer = syncbn.SyncBatchNorm(4, activation="relu")
    x, z, dy = (torch.randn(3, 4, 5) for _ in range(3))
    expected = {}
    for skip in (None, frozen):
        leaves = {"x": x.clone(), "residual": z.clone()}
        for name, leaf in leaves.items():
            leaf.requires_grad_(name != skip)
        layer.requires_grad_(skip != "parameters")
        layer.zero_grad()
        layer(leaves["x"], leaves["residual"]).backward(dy)
        got = {name: leaf.grad for name, leaf in leaves.items()}
        got |= {name: parameter.grad for name, parameter in layer.named_parameters()}
        if skip is None:
            expected = got
            continue
        for name, gradient in got.items():
            if name == skip or (skip == "parameters" and name in ("weight", "bias")):
                assert gradient is None
            else:
                assert torch.equal(gradient, expected[name])


# Two of them were equal in steps of 2^-40 modulo a prime, two but for the sign.
SLOPES = (0.01, 128.01, 0.0, -0.01, 0.0100076, 5e-324, 3e38)


def test_slopes_that_differ_give_different_calls():
    """All bits of the slope count, and so does every other option."""
    x = torch.ones(2, 3)

    def fingerprint(kind, slope, mode=0, residual=None):
        rank = Rank(x, residual=residual, kind=kind, slope=slope, statistics=mode, layer=5)
        return int(rank.begin()[1])

    numbers = [
        fingerprint(kind, slope, mode, residual)
        for kind, slopes in ((0, [0.01]), (1, [0.01]), (2, SLOPES))
        for slope in slopes
        for mode in (0, 1)
        for residual in (None, x)
    ]
    assert len(set(numbers)) == len(numbers)
    assert fingerprint(2, 0.0) == fingerprint(2, -0.0)


def test_numbers_are_those_of_the_core():
    assert [a.number for a in ACTIVATIONS.values()] == list(range(len(ACTIVATIONS)))
