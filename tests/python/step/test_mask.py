# SPDX-License-Identifier: Apache-2.0
"""Masks against the oracle, PyTorch's autograd and the contract's own equalities.

torch.nn.SyncBatchNorm has no mask: padded positions enter mean and variance, and get gradients.
"""

import numpy as np
import pytest
import torch

import oracle
import syncbn
from rank import Checked, Rank
from support import (
    TORCH_DTYPES,
    assert_same_bits,
    available_levels,
    layouts_of,
    new_layer,
    rough_samples,
    run_layer,
    to_tensor,
)
from syncbn.operators import ops

DTYPES = tuple(TORCH_DTYPES)
# Planes of 1, 49, 513 and 1300 elements.
SHAPES = ((40, 17), (6, 3, 7, 7), (3, 5, 27, 19), (2, 4, 1300))


@pytest.fixture(autouse=True)
def _restore_level():
    before = ops.cpu_instruction_set()
    yield
    ops.force_cpu_instruction_set(before)


def masks_of(rng, shape):
    """Single elements, the ends of samples, whole samples, all."""
    shape = (shape[0], *shape[2:])
    plane = int(np.prod(shape[1:]))
    lengths = rng.integers(0, plane + 1, shape[0])
    ends = np.arange(plane) < lengths[:, None]
    yield "elements", rng.random(shape) < 0.6
    yield "ends", ends.reshape(shape)
    yield "samples", np.broadcast_to(rng.random((shape[0],) + (1,) * len(shape[1:])) < 0.5, shape)
    yield "nothing", np.zeros(shape, dtype=bool)


def spoilt(rng, x, mask):
    """x with NaN and infinities where the mask is False: they must not matter anywhere."""
    rubbish = rng.choice([np.nan, np.inf, -np.inf, 1.0], x.shape)
    return np.where(mask[:, None], x, rubbish)


def parameters(rng, channels):
    return [rng.uniform(-2, 2, channels).astype(np.float32).astype(np.float64) for _ in range(2)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_operators_exact(shape, dtype):
    """Every bit, on every vector code and layout, with activation and residual and without."""
    rng = np.random.default_rng([*shape, len(dtype), ord(dtype[0])])
    x, z = (rough_samples(rng, shape, dtype) for _ in range(2))
    dy = oracle.round_to(rng.standard_normal(shape), dtype)
    weight, bias = parameters(rng, shape[1])
    for name, mask in masks_of(rng, shape):
        for activation, residual in (("none", False), ("leaky_relu", False), ("relu", True)):
            inputs = [spoilt(rng, t, mask) for t in (x, dy, z)]
            options = {"activation": activation, "slope": 0.3, "masks": [mask]}
            options["residuals"] = [inputs[2]] if residual else None
            forward = oracle.forward(inputs[:1], dtype, weight, bias, **options)
            backward = oracle.backward(
                inputs[1:2], inputs[:1], dtype, forward, weight, bias, **options
            )
            tensors = [layouts_of(to_tensor(t, dtype)) for t in inputs]
            affine = [torch.from_numpy(p).float() for p in (weight, bias)]
            for level in available_levels():
                assert ops.force_cpu_instruction_set(level)
                for layout in ("contiguous", "channels-last", "gaps"):
                    a, b, c = (t[layout] for t in tensors)
                    got = run_layer(
                        a,
                        b,
                        *affine,
                        residual=c if residual else None,
                        activation=activation,
                        slope=0.3,
                        mask=torch.tensor(mask),
                    )
                    what = f"{name}, {activation}, {level}, {layout}: "
                    for key, expected in (
                        ("words", forward.words[0]),
                        ("gradient_words", backward.words[0]),
                    ):
                        np.testing.assert_array_equal(got[key].numpy(), expected, what + key)
                    for key, expected in (
                        ("mean", forward.mean),
                        ("var", forward.var),
                        ("y", forward.ys[0]),
                        ("dx", backward.dxs[0]),
                        ("dweight", backward.dweight),
                        ("dbias", backward.dbias),
                    ):
                        assert_same_bits(got[key], expected, what + key)
                    if residual:
                        assert_same_bits(got["dresidual"], backward.dresiduals[0], what + "dz")


def step(layer, x, dy, *rest, **options):
    """(y, gradients of x and of the tensors in rest) of a training step."""
    leaves = [t.clone().requires_grad_() for t in (x, *rest)]
    layer.zero_grad()
    y = layer(*leaves, **options)
    y.backward(dy)
    return y.detach(), *(t.grad for t in leaves)


@pytest.mark.parametrize("statistics", ("reproducible", "welford"))
def test_a_mask_of_rows_is_their_removal_exact(statistics):
    """2-D input, and whole samples of any shape: nothing shares a segment with what is left out."""
    for shape in ((50, 7), (12, 5, 6, 4)):
        generator = torch.Generator().manual_seed(1)
        x, dy = (torch.randn(shape, generator=generator) for _ in range(2))
        kept = torch.rand(shape[0], generator=generator) < 0.6
        x[~kept] = float("nan")
        mask = kept.reshape(-1, *(1,) * (len(shape) - 2)).expand(shape[0], *shape[2:])
        layers = [new_layer(shape[1], statistics=statistics) for _ in range(2)]
        y, dx = step(layers[0], x, dy, mask=mask)
        expected_y, expected_dx = step(layers[1], x[kept], dy[kept])
        assert torch.equal(y[kept], expected_y) and torch.equal(dx[kept], expected_dx)
        assert not y[~kept].any() and not dx[~kept].any()
        for name, value in layers[1].state_dict().items():
            assert torch.equal(layers[0].state_dict()[name], value), name
        for p, q in zip(layers[0].parameters(), layers[1].parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)


def test_padding_at_the_end_of_one_axis_is_its_removal_exact():
    """(N, C, L): a masked tail of all samples moves no lane, so it equals the shorter input."""
    x, dy = torch.randn(2, 4, 3, 700)
    mask = torch.zeros(4, 700, dtype=torch.uint8)
    mask[:, :530] = 200  # any number but 0 counts
    y, dx = step(new_layer(3), x, dy, mask=mask)
    short_y, short_dx = step(new_layer(3), x[..., :530].contiguous(), dy[..., :530].contiguous())
    assert torch.equal(y[..., :530], short_y) and torch.equal(dx[..., :530], short_dx)
    assert not y[..., 530:].any() and not dx[..., 530:].any()


def formula(x, weight, bias, mask, eps=1e-5):
    """The same layer by autograd over plain tensor operations."""
    m = mask.to(x.dtype).unsqueeze(1)
    axes = [0, *range(2, x.dim())]
    mean = (x * m).sum(axes, keepdim=True) / m.sum()
    var = ((x - mean).square() * m).sum(axes, keepdim=True) / m.sum()
    shape = (1, -1) + (1,) * (x.dim() - 2)
    return ((x - mean) / (var + eps).sqrt() * weight.view(shape) + bias.view(shape)) * m


@pytest.mark.parametrize("statistics", ("reproducible", "welford"))
def test_gradients_are_those_of_the_formula(statistics):
    """float64, so both sides round at 2^-53: sums of 150 terms of order 1 and some twenty
    operations stay below 1e-12."""
    x, dy = torch.randn(2, 5, 4, 6, 7, dtype=torch.float64)
    mask = torch.rand(5, 6, 7) < 0.7
    layer = new_layer(4, torch.float64, statistics=statistics)
    y, dx = step(layer, x, dy, mask=mask)
    leaf = x.clone().requires_grad_()
    affine = [p.detach().clone().requires_grad_() for p in (layer.weight, layer.bias)]
    expected = formula(leaf, *affine, mask)
    expected.backward(dy)
    torch.testing.assert_close(y, expected.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(dx, leaf.grad, rtol=0, atol=1e-12)
    torch.testing.assert_close(layer.weight.grad, affine[0].grad, rtol=0, atol=1e-11)
    torch.testing.assert_close(layer.bias.grad, affine[1].grad, rtol=0, atol=1e-11)


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


def test_function_and_layer_agree_exact():
    """In training; test_evaluation has the other mode."""
    x, z, dy = torch.randn(3, 5, 3, 8)
    mask = torch.rand(5, 8) < 0.5
    options = {"activation": "leaky_relu", "negative_slope": 0.3}
    layer = new_layer(3, **options)
    y, *gradients = step(layer, x, dy, z, mask=mask)
    mean, var, *leaves = (
        torch.zeros(3),
        torch.ones(3),
        *(t.clone().requires_grad_() for t in (x, z)),
    )
    given = (leaves[0], mean, var, layer.weight, layer.bias)
    again = syncbn.functional.sync_batch_norm(
        *given, training=True, residual=leaves[1], mask=mask, **options
    )
    again.backward(dy)
    assert torch.equal(again, y) and all(map(torch.equal, (t.grad for t in leaves), gradients))
    assert torch.equal(mean, layer.running_mean) and torch.equal(var, layer.running_var)


def test_masks_that_count_everything_or_nothing():
    x, dy = torch.randn(2, 5, 3, 8)
    everything = step(new_layer(3), x, dy, mask=torch.ones(5, 8, dtype=torch.bool))
    for a, b in zip(everything, step(new_layer(3), x, dy), strict=True):
        assert torch.equal(a, b)
    layer = new_layer(3)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    y, dx = step(layer, x * float("nan"), dy, mask=torch.zeros(5, 8, dtype=torch.bool))
    assert not y.any() and not dx.any() and not layer.weight.grad.any()
    assert all(torch.equal(layer.state_dict()[name], value) for name, value in before.items())
    one = torch.zeros(5, 8, dtype=torch.bool)
    one[2, 3] = True
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        layer(x, mask=one)


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


def test_list_form_exact():
    """Devices with masks, one without, one that is empty and one where nothing counts: the bits of
    one batch. The mask of a device without one counts everything."""
    x, z, dy = torch.randn(3, 9, 4, 6)
    mask = torch.rand(9, 6) < 0.5
    mask[3:5] = True
    mask[7:] = False
    parts = [slice(0, 3), slice(3, 5), slice(5, 5), slice(5, 7), slice(7, 9)]
    for activation in ("none", "relu"):
        whole = new_layer(4, activation=activation)
        expected = step(whole, x, dy, z, mask=mask)
        layer = new_layer(4, activation=activation)
        xs, zs = ([t[p].clone().requires_grad_() for p in parts] for t in (x, z))
        masks = [None if k == 1 else mask[p] for k, p in enumerate(parts)]
        ys = layer(xs, zs, masks)
        torch.autograd.backward(ys, [dy[p] for p in parts])
        got = torch.cat(ys), torch.cat([t.grad for t in xs]), torch.cat([t.grad for t in zs])
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a, b)
        assert torch.equal(layer.running_var, whole.running_var)
        assert torch.equal(layer.weight.grad, whole.weight.grad)
    for bad in ([mask], mask):
        with pytest.raises(ValueError, match="mask: got .*, expected a list of 5, one per input"):
            layer(xs, zs, bad)
    layer.eval()
    for y, part in zip(layer(xs, zs, masks), parts, strict=True):
        assert torch.equal(y, layer(x[part], z[part], mask[part]))


class Masked(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = new_layer(4)

    def forward(self, x, mask):
        return self.layer(x * 2, mask=mask)


def test_devices_in_turns_exact():
    x, mask = torch.randn(8, 4, 6), torch.rand(8, 6) < 0.5
    whole = Masked()(x, mask)
    model = syncbn.parallel.SelfDataParallel(Masked(), ["cpu"] * 2)
    assert torch.equal(torch.cat(model([(x[:3], mask[:3]), (x[3:], mask[3:])])), whole)


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


def test_a_mask_with_the_negative_bit():
    x = torch.linspace(-1, 1, 60).view(5, 4, 3)
    mask = (x[:, 0] > 0).to(torch.uint8)
    y = syncbn.SyncBatchNorm(4)(x, None, torch._neg_view(-mask))
    assert torch.equal(y, syncbn.SyncBatchNorm(4)(x, None, mask))
