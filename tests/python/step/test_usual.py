# SPDX-License-Identifier: Apache-2.0
"""The usual eager step, whose arguments the operators alone check, has a checked one's bits."""

import pytest
import torch

import syncbn
from syncbn.step import autograd

C = 5
SHAPE = (4, C, 7, 3)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def random(shape=SHAPE, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def step(layer, x, dy, **more):
    """All that comes out."""
    x = x.clone().requires_grad_()
    residual = more.get("residual")
    if residual is not None:
        more["residual"] = residual = residual.clone().requires_grad_()
    y = layer(x, **more)
    y.backward(dy)
    out = [y.detach(), x.grad, *layer.buffers(), *(p.grad for p in layer.parameters())]
    out += [] if residual is None else [residual.grad]
    return [t.clone() for t in out]


def assert_equal(a, b):
    assert len(a) == len(b)
    for s, t in zip(a, b):
        assert s.dtype == t.dtype and s.shape == t.shape
        assert torch.equal(s.nan_to_num(7), t.nan_to_num(7)) and torch.equal(s.isnan(), t.isnan())


def both_ways(monkeypatch, run):
    """What it gives, in the usual way, and checked."""
    taken, usual_way = [], autograd._usual

    def take(*given):
        taken.append(usual_way(*given))
        return taken[-1]

    monkeypatch.setattr(autograd, "_usual", take)
    usual = run()
    assert taken and all(y is not None for y in taken)
    monkeypatch.setattr(autograd, "_is_usual", lambda x: False)
    return usual, run()


MASK = torch.rand(4, 7, 3, generator=torch.Generator().manual_seed(3)) < 0.7
USUAL = {
    "plain": ({}, {}),
    "relu": ({"activation": "relu"}, {}),
    "leaky relu": ({"activation": "leaky_relu", "negative_slope": -0.5}, {}),
    "residual": ({}, {"residual": random(seed=1)}),
    "residual of another layout": (
        {"activation": "relu"},
        {"residual": random(seed=1).contiguous(memory_format=torch.channels_last)},
    ),
    "residual and relu": ({"activation": "relu"}, {"residual": random(seed=1)}),
    "mask": ({}, {"mask": MASK}),
    "mask, residual, relu": ({"activation": "relu"}, {"mask": MASK, "residual": random(seed=1)}),
    "cumulative average": ({"momentum": None}, {}),
    "global gradients": ({"affine_grad": "global"}, {}),
    "welford": ({"statistics": "welford", "activation": "relu"}, {"mask": MASK}),
    "no parameters": ({"affine": False}, {}),
    "no bias": ({"bias": False}, {}),
    "nothing tracked": ({"track_running_stats": False}, {}),
}


@pytest.mark.parametrize("name", USUAL)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels last", "gaps"])
def test_bits_of_a_checked_step_exact(monkeypatch, name, dtype, layout):
    options, more = USUAL[name]
    x, dy = random(seed=5, dtype=dtype), random(seed=6, dtype=dtype)
    if layout == "channels last":
        x = x.contiguous(memory_format=torch.channels_last)
    if layout == "gaps":
        x = torch.stack([x, x], -1)[..., 0]
    if "residual" in more:
        more = {**more, "residual": more["residual"].to(dtype)}

    def run():
        layer = syncbn.SyncBatchNorm(C, **options)
        first = step(layer, x, dy, **more)
        layer.zero_grad()
        return first, step(layer, x + 1, dy.sum().expand(SHAPE), **more)

    for usual, checked in zip(*both_ways(monkeypatch, run)):
        assert_equal(usual, checked)


@pytest.mark.parametrize("x_needs", [True, False])
@pytest.mark.parametrize("affine_grad", ["share", "global"])
def test_gradients_that_are_not_wanted_exact(monkeypatch, x_needs, affine_grad):
    def run():
        layer = syncbn.SyncBatchNorm(C, affine_grad=affine_grad)
        layer.bias.requires_grad_(False)
        x = random().requires_grad_(x_needs)
        layer(x).backward(random(seed=2))
        assert layer.bias.grad is None
        return [layer.weight.grad, *([x.grad] * x_needs)]

    assert_equal(*both_ways(monkeypatch, run))


def test_a_refusal_changes_nothing_and_has_words():
    layer = syncbn.SyncBatchNorm(C)
    layer(random().requires_grad_())
    before = [*(t.clone() for t in layer.buffers()), layer.state.call.clone()]
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        layer(torch.ones(1, C, requires_grad=True))
    for residual in (random(dtype=torch.float64), random().to_sparse(), random((1, C, 7, 3))):
        with pytest.raises(ValueError, match="residual: got "):
            layer(random(), residual)
    layer.weight = torch.nn.Parameter(torch.ones(C + 1))
    with pytest.raises(ValueError, match=r"weight: got shape \(6,\), expected \(5,\)"):
        layer(random())
    assert_equal(before, [*layer.buffers(), layer.state.call])
