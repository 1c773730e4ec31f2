# SPDX-License-Identifier: Apache-2.0
"""Every bit of the operators against the oracle (docs/numerics.md), on every vector code that this
processor has, for every dtype and layout, with activations, residuals and masks. All comparisons
are exact."""

import itertools

import numpy as np
import pytest
import torch

import oracle
from played import check_played
from rank import Rank
from support import (
    TORCH_DTYPES,
    assert_same_bits,
    available_levels,
    layouts_of,
    rough_samples,
    to_tensor,
)
from syncbn.operators import ops

DTYPES = tuple(TORCH_DTYPES)
NAMES = ("none", "relu", "leaky_relu")
ACTIVATIONS = (("none", 0.01), ("relu", 0.01), ("leaky_relu", 0.01), ("leaky_relu", -1.5))
MASKS = ("elements", "ends", "samples", "nothing")

# Planes of 1, 3, 16, 49, 196, 512, 513 and 3000 elements; 1, 3, 17 and 65 channels.
SHAPES = (
    (5, 65),
    (40, 17, 1, 1),
    (3, 3, 3),
    (2, 17, 4, 4),
    (4, 65, 7, 7),
    (2, 3, 14, 14),
    (2, 17, 16, 32),
    (3, 3, 27, 19),
    (2, 1, 3000),
    (2, 5, 10, 15, 20),
    (1, 4, 2500),
)


@pytest.fixture(autouse=True)
def _restore_level():
    before = ops.cpu_instruction_set()
    yield
    ops.cpu_instruction_set(before)


def check(x, dy, dtype, weight, bias, layouts, residual=None, mask=None, eps=1e-5, **fused):
    """x, dy, residual: float64 arrays of values of dtype; weight, bias: of float32. fused: the
    activation and its slope."""
    options = fused | {"residuals": None if residual is None else [residual], "masks": [mask]}
    forward = oracle.forward([x], dtype, weight, bias, eps, **options)
    backward = oracle.backward([dy], [x], dtype, forward, weight, bias, **options)
    given = [
        dict.fromkeys(layouts) if t is None else layouts_of(to_tensor(t, dtype))
        for t in (x, dy, residual)
    ]
    affine = [torch.from_numpy(p).float() for p in (weight, bias)]
    kept = None if mask is None else torch.tensor(mask)
    kind, slope = NAMES.index(fused.get("activation", "none")), fused.get("slope", 0.01)
    for level, layout in itertools.product(available_levels(), layouts):
        assert ops.cpu_instruction_set(level) == level
        x, dy, residual = (t[layout] for t in given)
        rank = Rank(x, *affine, residual, kept, eps=eps, kind=kind, slope=slope)
        wanted = residual is not None
        what = f"{level}, {layout}, "
        check_played([rank], [dy], forward, backward, (torch.float32,) * 2, wanted, what)


def parameters(rng, channels):
    """weight and bias, some of them 0."""
    weight, bias = (oracle.round_to(rng.standard_normal(channels), "float32") for _ in range(2))
    weight[:: max(2, channels // 4)] = 0.0
    bias[:: max(2, channels // 2)] = 0.0
    return weight, bias


def mask_of(rng, kind, shape):
    """Single elements, the ends of samples, whole samples, all."""
    samples, plane = shape[0], int(np.prod(shape[2:]))
    kept = {
        "elements": rng.random((samples, plane)) < 0.6,
        "ends": np.arange(plane) < rng.integers(0, plane + 1, (samples, 1)),
        "samples": np.broadcast_to(rng.random((samples, 1)) < 0.5, (samples, plane)),
        "nothing": np.zeros((samples, plane), dtype=bool),
    }
    return kept[kind].reshape(samples, *shape[2:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_layout_and_level_exact(shape, dtype):
    """Each shape and dtype also with one activation, with a residual or without, and with one kind
    of mask; what is masked out is NaN and infinities."""
    rng = np.random.default_rng([*shape, len(dtype), ord(dtype[0])])
    x, z = (rough_samples(rng, shape, dtype) for _ in range(2))
    dy = oracle.round_to(rng.standard_normal(shape), dtype)
    affine = parameters(rng, shape[1])
    layouts = ("contiguous", "channels-last", "gaps", "slice", "channels-last slice")
    check(x, dy, dtype, *affine, layouts)
    number = SHAPES.index(shape) + DTYPES.index(dtype)
    residual = z if SHAPES.index(shape) % 2 else None
    activation, slope = ACTIVATIONS[number % 4]
    check(x, dy, dtype, *affine, layouts, residual, activation=activation, slope=slope)
    mask = mask_of(rng, MASKS[(number + SHAPES.index(shape) // 4) % 4], shape)
    rubbish = rng.choice([np.nan, np.inf, -np.inf, 1.0], shape)
    x, dy, z = (np.where(mask[:, None], t, rubbish) for t in (x, dy, z))
    residual = z if DTYPES.index(dtype) % 2 else None
    check(x, dy, dtype, *affine, layouts[:3], residual, mask, activation=activation, slope=slope)


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values_exact(dtype):
    """Infinities of both signs, NaN, -0.0, subnormals, each in a channel of its own."""
    rng = np.random.default_rng(2)
    info = torch.finfo(TORCH_DTYPES[dtype])
    inf, nan, tiny, largest = np.inf, np.nan, info.smallest_normal / 4, info.max
    specials = (
        [inf], [-inf], [nan], [inf, -inf], [inf, nan], [-0.0], [0.0, -0.0], [tiny, -tiny],
        [largest], [largest, -largest], [largest, largest], [info.tiny], [],
    )  # fmt: skip
    for plane in (1, 49, 700):
        shape = (6, len(specials), plane)
        x = oracle.round_to(rng.standard_normal(shape), dtype)
        dy = oracle.round_to(rng.standard_normal(shape), dtype)
        for c, values in enumerate(specials):
            for i, value in enumerate(values):
                x[i, c, i * 7 % plane] = value
                dy[5 - i, c, i * 3 % plane] = value
        x[:, 5] = -0.0  # a channel of nothing but -0.0
        dy[:, 6] = -0.0
        x[:, 7] = np.where(rng.random(x[:, 7].shape) < 0.5, tiny, -tiny)
        x, dy = (oracle.round_to(t, dtype) for t in (x, dy))
        check(x, dy, dtype, *parameters(rng, len(specials)), ("contiguous", "channels-last"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ("relu", "leaky_relu"))
def test_special_values_of_activations_exact(dtype, activation):
    """NaN, infinities, zeros and subnormals in residual and dy."""
    info = torch.finfo(TORCH_DTYPES[dtype])
    specials = [np.nan, np.inf, -np.inf, 0.0, -0.0, info.tiny, -info.tiny / 4, info.max, 1.0, -1.0]
    values = np.array(list(itertools.product(specials, specials))).T
    z, dy = (v.reshape(1, 1, -1).repeat(2, 0).repeat(3, 1) for v in values)
    x = np.zeros_like(z)
    x[1] = 2.0  # mean 1, v = +1 and -1 times the weight, or 0
    affine = np.array([0.0, 1.0, -2.0]), np.zeros(3)
    for residual in (None, z):
        layouts = ("contiguous", "channels-last")
        check(x, dy, dtype, *affine, layouts, residual, activation=activation, slope=0.01)


@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
@pytest.mark.parametrize("std, weight, up", ((127, 10, -12), (126, 0, 0), (-130, -10, -10)))
def test_extreme_deviations_exact(dtype, std, weight, up):
    """rstd beyond the range of e, and values of c2 and t that binary32 holds as subnormals."""
    rng = np.random.default_rng(12)
    x = np.ldexp(rng.choice([-1.0, 1.0, 0.5, -0.25], (4, 1, 30)), std)
    x = oracle.round_to(x * rng.uniform(0.9, 1.0, x.shape), dtype)
    dy = oracle.round_to(rng.standard_normal(x.shape) * 2.0**up, dtype)
    affine = oracle.round_to([1.3 * 2.0**weight], "float32"), np.zeros(1)
    check(x, dy, dtype, *affine, ("contiguous", "gaps"), eps=0.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_windows_that_miss_exact(dtype):
    """Magnitudes that jump after the first samples, up and down by most of the exponent range: the
    guess of the fast accumulators is wrong and must not matter."""
    rng = np.random.default_rng(3)
    reach = {"float16": 14, "bfloat16": 120, "float32": 120, "float64": 900}[dtype]
    for plane in (1, 9, 600):
        shape = (24, 7, plane)
        scale = np.exp2(rng.integers(-reach, reach // 2, (24, 7, 1)))
        scale[0] = np.exp2(-reach)
        x = oracle.round_to(rng.standard_normal(shape) * scale, dtype)
        dy = oracle.round_to(rng.standard_normal(shape) * scale[::-1], dtype)
        check(x, dy, dtype, *parameters(rng, 7), ("contiguous", "channels-last"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_evaluation_exact(dtype):
    rng = np.random.default_rng(9)
    x = rough_samples(rng, (4, 17, 9), dtype)
    mean, var = (oracle.round_to(rng.random(17) + 0.5, "float32") for _ in range(2))
    weight, bias = parameters(rng, 17)
    rstd = oracle.inverse_deviation(var, 1e-3)
    expected = oracle.normalize(x, mean, rstd, dtype, weight, bias)
    tensors = [to_tensor(t, "float32") for t in (mean, var, weight, bias)]
    for level in available_levels():
        assert ops.cpu_instruction_set(level) == level
        y, _ = ops.evaluate(to_tensor(x, dtype), *tensors, eps=1e-3)
        assert_same_bits(y, expected, level)
