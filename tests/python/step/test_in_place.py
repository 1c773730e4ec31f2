# SPDX-License-Identifier: Apache-2.0
"""The in-place variant: forward bits, recovered inputs and gradients within derived bounds."""

import pytest
import torch

import syncbn
from support import layouts_of, unchanged
from syncbn.operators import ops
from syncbn.step.options import RECOVERY_LIMIT, recovery_bound

UNITS = {torch.float16: 2**-11, torch.bfloat16: 2**-8, torch.float32: 2**-24, torch.float64: 2**-53}
SLOPE = 0.01


def layers(channels, dtype=torch.float32, **options):
    """An in-place layer and one that is not, with equal parameters away from 0."""
    torch.manual_seed(channels)
    pair = [
        syncbn.SyncBatchNorm(
            channels, activation="leaky_relu", negative_slope=SLOPE, inplace=inplace, dtype=dtype
        )
        for inplace in (True, False)
    ]
    with torch.no_grad():
        pair[0].weight.copy_(0.5 + torch.rand(channels))
        pair[0].bias.copy_(0.5 * torch.randn(channels).clamp(-1, 1))
    pair[1].load_state_dict(pair[0].state_dict())
    return pair


@pytest.mark.parametrize("dtype", UNITS, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels-last"])
def test_forward_bits_and_backward_within_bound(dtype, layout):
    """y and the running statistics are the bits of the ordinary layer. With x' the recovered input
    and t = x - mean:

      |x' - x| <= k (|t| + |bias / (weight rstd)|) + 2 u |x|,  k = 11 u32 + u

    dx = c1 u + c2 t + c3, so it moves by at most |c2| times that, by what the sum of u x in c2
    moves, and by its own rounding (u of its largest term, 3 terms)."""
    inplace, ordinary = layers(7, torch.float32 if dtype != torch.float64 else dtype)
    x = layouts_of((torch.randn(6, 7, 9, 5) * 2 + 1).to(dtype))[layout]
    dy = layouts_of(torch.randn(6, 7, 9, 5).to(dtype))[layout]
    a, b = (x.clone().requires_grad_() for _ in range(2))
    memory = a * 1
    y = inplace(memory)
    assert y.data_ptr() == memory.data_ptr()
    expected = ordinary(b)
    assert torch.equal(y, expected)
    unchanged(ordinary, inplace.state_dict())
    y.backward(dy)
    expected.backward(dy)

    unit, u32 = UNITS[dtype], min(UNITS[dtype], 2**-24)
    k = 11 * u32 + unit
    xd, dyd = x.double(), dy.double()
    mean = xd.mean((0, 2, 3), keepdim=True)
    rstd = (xd.var((0, 2, 3), unbiased=False, keepdim=True) + 1e-5).rsqrt()
    weight, bias = (p.detach().double()[:, None, None] for p in (inplace.weight, inplace.bias))
    t, n = xd - mean, x.numel() / 7
    moved = k * (t.abs() + (bias / (weight * rstd)).abs()) + 2 * unit * xd.abs()
    u = torch.where(expected.double() > 0, dyd, SLOPE * dyd)
    sums = [(u * v).sum((0, 2, 3), keepdim=True) / n for v in (t, torch.ones_like(t))]
    c2 = (weight * rstd**3 * sums[0]).abs()
    c2_moved = weight * rstd**3 * (u.abs() * moved).sum((0, 2, 3), keepdim=True) / n
    terms = weight * rstd * (u.abs() + sums[1].abs()) + c2 * t.abs()
    bound = c2 * moved + c2_moved * (t.abs() + moved) + 3 * (unit + 4 * u32) * terms
    assert ((a.grad.double() - b.grad.double()).abs() <= bound).all()
    # dweight = rstd * sum(u t) moves with t; dbias takes its signs from y, and is exact.
    moved_weight = (rstd * (u.abs() * moved).sum((0, 2, 3), keepdim=True)).flatten()
    difference = (inplace.weight.grad - ordinary.weight.grad).double().abs()
    rounding = 2 * u32 * ordinary.weight.grad.double().abs()
    assert (difference <= moved_weight + rounding).all()
    assert torch.equal(inplace.bias.grad, ordinary.bias.grad)


def test_bound_is_refused_with_the_reason():
    x = torch.randn(4, 3, 5) * 1
    layer, _ = layers(3)
    with torch.no_grad():
        layer.weight[1] = 1e-6
        layer.bias[1] = 1.0
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    kept = x.clone()
    with pytest.raises(ValueError, match=r"weight: got entries so small.* standard deviations"):
        layer(x)
    with torch.no_grad():
        layer.weight[1] = 0.0
        layer.bias[1] = 0.0
    with pytest.raises(ValueError, match="up to inf standard deviations"):
        layer(x)
    assert torch.equal(x, kept)
    layer.load_state_dict(before)
    unchanged(layer, before)


@pytest.mark.parametrize(
    ("dtype", "ratio"),
    [(torch.float32, 10000), (torch.float16, 14), (torch.bfloat16, 0.9), (torch.float64, 5.5e12)],
)
def test_where_the_limit_lies(dtype, ratio):
    """|bias / weight| of about 10,900 for float32, 15 for float16, 1 for bfloat16."""
    x = torch.zeros(1, 1, dtype=dtype)
    weight, bias = torch.tensor([1.0, 2.0]), torch.tensor([0.0, 2.0 * ratio])
    x = x.expand(1, 2)
    assert recovery_bound(x, weight, bias, 0.5) <= RECOVERY_LIMIT
    assert recovery_bound(x, weight, 1.2 * bias, 0.5) > RECOVERY_LIMIT
    assert recovery_bound(x, weight, None, 0.5) == recovery_bound(x, None, None, 0.5)
    assert recovery_bound(x[:, :0], weight[:0], None, 0.5) == 0


@pytest.mark.parametrize(
    ("dtype", "weight", "slope"),
    [
        (torch.float16, 1e-4, 0.01),
        (torch.float16, 1e-3, 2**-10),
        (torch.float32, 1e-40, 0.01),
        (torch.float32, 1e-13, 1.0),
    ],
)
def test_weights_whose_outputs_underflow_are_refused(dtype, weight, slope):
    layer = syncbn.SyncBatchNorm(
        1, activation="leaky_relu", negative_slope=slope, inplace=True, dtype=torch.float32
    )
    with torch.no_grad():
        layer.weight.fill_(weight)
    with pytest.raises(ValueError, match="weight: got entries so small"):
        layer(torch.randn(8, 1).to(dtype))


def test_refused_arguments():
    for options, text in (
        ({"activation": "relu"}, "inplace: got True with relu"),
        ({"activation": "leaky_relu", "negative_slope": 0.0}, "negative_slope: got 0.0"),
        ({"activation": "leaky_relu", "statistics": "welford"}, "statistics='welford'"),
    ):
        with pytest.raises(ValueError, match=text):
            syncbn.SyncBatchNorm(4, inplace=True, **options)
    layer, _ = layers(4)
    x = torch.randn(2, 4, 6)
    wide = torch.randn(2, 8, 6)
    for arguments, text in (
        ((x.clone(), x), "inplace: got True with a residual"),
        ((x.clone(), None, x[:, 0] > 0), "mask: got one with inplace=True, expected None"),
        ((x.clone().requires_grad_(),), "input: got a leaf"),
        ((wide[:, :4],), "input: got a view"),
    ):
        kept = arguments[0].detach().clone()
        with pytest.raises(ValueError, match=text):
            layer(*arguments)
        assert torch.equal(arguments[0], kept)
    own = torch.randn(2, 4, 6)
    for given, text in (
        (([own, x.clone().requires_grad_()],), r"inputs\[1\], of device 1: input: got a leaf"),
        (([own, wide[:, :4]],), r"inputs\[1\], of device 1: input: got a view"),
        (([own, x.clone()], [x, x]), r"inputs\[0\], of device 0: inplace: got True with a res"),
        (([own, x.clone()], None, [None, x[:, 0] > 0]), r"inputs\[1\], .*mask: got one with"),
        (([own, own],), "inputs: got two in one memory with inplace=True, expected memory"),
    ):
        kept = own.clone()
        with pytest.raises(ValueError, match=text):
            layer(*given)
        assert torch.equal(own, kept)


def test_every_level_recovers_the_same_signs_exact():
    """The mask of recover_input is y > 0 on every vector code; x' differs in no bit either."""
    from rank import Rank
    from support import available_levels

    before = ops.cpu_instruction_set()
    y = torch.randn(3, 37, 11, 3)
    y[0, :, 0] = 0.0
    saved = torch.cat([torch.randn(2 * 37), torch.rand(37) + 0.5, torch.zeros(2)]).double()
    weight, bias = torch.rand(37) + 0.5, torch.randn(37)
    form = Rank(y, kind=2, slope=SLOPE).form
    try:
        for layout in ("contiguous", "channels-last"):
            results = []
            for level in available_levels():
                assert ops.cpu_instruction_set(level) == level
                tensor = layouts_of(y)[layout]
                results.append(ops.recover_input(tensor, saved, weight, bias, form))
            for x, mask in results[1:]:
                assert torch.equal(x, results[0][0])
                assert torch.equal(mask, results[0][1])
    finally:
        ops.cpu_instruction_set(before)
