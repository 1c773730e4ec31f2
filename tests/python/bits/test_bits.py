# SPDX-License-Identifier: Apache-2.0
"""Every bit of the operators against the oracle (docs/numerics.md), on every vector code that this
processor has, for every dtype and layout. All comparisons are exact."""

import numpy as np
import pytest
import torch

import oracle
from rank import Rank
from support import (
    TORCH_DTYPES,
    assert_same_bits,
    available_levels,
    layouts_of,
    rough_samples,
    run_layer,
    to_tensor,
)
from syncbn.operators import ops

DTYPES = ("float16", "bfloat16", "float32", "float64")
LEVELS = available_levels()

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
    ops.force_cpu_instruction_set(before)


def check(
    x,
    dy,
    dtype,
    weight=None,
    bias=None,
    eps=1e-5,
    layouts=("contiguous",),
    levels=LEVELS,
    run=run_layer,
):
    """x, dy: float64 arrays of values of dtype; weight, bias: of float32."""
    forward = oracle.forward([x], dtype, weight=weight, bias=bias, eps=eps)
    backward = oracle.backward(
        [dy], [x], dtype, forward, weight=weight, bias=bias, parameter_dtype="float32"
    )
    parameters = [torch.from_numpy(p).float() if p is not None else None for p in (weight, bias)]
    xs, dys = layouts_of(to_tensor(x, dtype)), layouts_of(to_tensor(dy, dtype))
    for level in levels:
        assert ops.force_cpu_instruction_set(level)
        for layout in layouts:
            got = run(xs[layout], dys[layout], *parameters, eps)
            what = f"{level}, {layout}, "
            np.testing.assert_array_equal(got["words"].numpy(), forward.words[0], what + "words")
            np.testing.assert_array_equal(
                got["gradient_words"].numpy(), backward.words[0], what + "gradient words"
            )
            for name in ("mean", "var", "rstd"):
                assert_same_bits(got[name], getattr(forward, name), what + name)
            assert_same_bits(got["y"], forward.ys[0], what + "y")
            assert_same_bits(got["dx"], backward.dxs[0], what + "dx")
            if weight is not None:
                assert_same_bits(got["dweight"], backward.dweight, what + "dweight")
                assert_same_bits(got["dbias"], backward.dbias, what + "dbias")


def parameters(rng, channels):
    return (
        rng.standard_normal(channels).astype(np.float32).astype(np.float64),
        rng.standard_normal(channels).astype(np.float32).astype(np.float64),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_layout_and_level_exact(shape, dtype):
    rng = np.random.default_rng([*shape, len(dtype), ord(dtype[0])])
    x = rough_samples(rng, shape, dtype)
    dy = oracle.round_to(rng.standard_normal(shape), dtype)
    layouts = ("contiguous", "channels-last", "gaps", "slice", "channels-last slice")
    check(x, dy, dtype, *parameters(rng, shape[1]), layouts=layouts)


@pytest.mark.parametrize("dtype", DTYPES)
def test_mixed_layouts_of_gradient_and_input_exact(dtype):
    rng = np.random.default_rng(1)
    shape = (3, 17, 6, 5)
    x, dy = rough_samples(rng, shape, dtype), rough_samples(rng, shape, dtype)
    forward = oracle.forward([x], dtype)
    backward = oracle.backward([dy], [x], dtype, forward)
    xs, dys = layouts_of(to_tensor(x, dtype)), layouts_of(to_tensor(dy, dtype))
    for x_layout, y_layout in (("contiguous", "channels-last"), ("channels-last", "slice")):
        got = run_layer(xs[x_layout], dys[y_layout], None, None)
        assert_same_bits(got["y"], forward.ys[0], "y")
        assert_same_bits(got["dx"], backward.dxs[0], "dx")


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
        x = oracle.round_to(x, dtype)
        dy = oracle.round_to(dy, dtype)
        check(
            x, dy, dtype, *parameters(rng, len(specials)), layouts=("contiguous", "channels-last")
        )


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
        check(x, dy, dtype, *parameters(rng, 7), layouts=("contiguous", "channels-last"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("eps", (0.0, 1e-5, 1e-3))
def test_constant_channels_exact(dtype, eps):
    """Variance 0 (rstd infinite if eps is 0), and very large mean over deviation."""
    rng = np.random.default_rng(4)
    x = np.ones((3, 4, 5, 5))
    x[:, 1] = 0.0
    x[:, 2] = 1e4 + rng.standard_normal((3, 5, 5))
    x[:, 3] = 3.1
    x = oracle.round_to(x, dtype)
    check(x, oracle.round_to(rng.standard_normal(x.shape), dtype), dtype, eps=eps,
          layouts=("contiguous", "channels-last"))  # fmt: skip


@pytest.mark.parametrize("dtype", ("float16", "bfloat16", "float32", "float64"))
@pytest.mark.parametrize("samples", (5_000, 300_000))
def test_many_partials_exact(samples, dtype):
    """Every element of a 2-D input is a partial: local accumulators must not overflow."""
    rng = np.random.default_rng(5)
    largest = float(oracle.round_to(np.array([127.99999]), dtype)[0])
    x = np.full((samples, 3), largest)
    x[:, 1] *= -1
    x[:, 2] *= rng.choice([-1.0, 1.0], samples)
    check(x, -x, dtype, *parameters(rng, 3), levels=LEVELS if samples < 10**5 else LEVELS[-1:])


def run_flushing(*arguments):
    """run_layer in a process that flushes subnormals; the mode is the same afterwards."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no flush-to-zero mode")
    try:
        result = run_layer(*arguments)
        subnormal = torch.full((64,), torch.finfo(torch.float32).smallest_normal) * 0.5
        assert not subnormal.view(torch.int32).any(), "the layer changed the process's mode"
        return result
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("dtype", DTYPES)
def test_flush_to_zero_mode_exact(dtype):
    rng = np.random.default_rng(6)
    tiny = torch.finfo(TORCH_DTYPES[dtype]).smallest_normal
    x = oracle.round_to(rng.standard_normal((4, 5, 7, 7)) * tiny / 8, dtype)
    dy = oracle.round_to(rng.standard_normal(x.shape) * tiny, dtype)
    layouts = ("contiguous", "channels-last")
    # eps 0 and eps subnormal, so that the tiny deviations matter.
    check(x, dy, dtype, eps=0.0, layouts=layouts, run=run_flushing)
    check(x, dy, dtype, eps=1e-310, layouts=layouts, run=run_flushing)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parameter_dtype", DTYPES)
def test_parameter_dtypes_exact(parameter_dtype, dtype):
    """weight and bias of any type; their gradients rounded once to it."""
    rng = np.random.default_rng(7)
    x = rough_samples(rng, (4, 17, 9), dtype)
    dy = oracle.round_to(rng.standard_normal(x.shape), dtype)
    weight = oracle.round_to(rng.standard_normal(17), parameter_dtype)
    bias = oracle.round_to(rng.standard_normal(17), parameter_dtype)
    forward = oracle.forward([x], dtype, weight=weight, bias=bias)
    backward = oracle.backward(
        [dy], [x], dtype, forward, weight=weight, bias=bias, parameter_dtype=parameter_dtype
    )
    got = run_layer(
        to_tensor(x, dtype),
        to_tensor(dy, dtype),
        to_tensor(weight, parameter_dtype),
        to_tensor(bias, parameter_dtype),
    )
    for name, expected in (
        ("y", forward.ys[0]),
        ("dx", backward.dxs[0]),
        ("dweight", backward.dweight),
        ("dbias", backward.dbias),
    ):
        assert_same_bits(got[name], expected, name)


@pytest.mark.parametrize("buffer_dtype", DTYPES)
@pytest.mark.parametrize("momentum", (0.0, 0.1, 1.0, None))
def test_running_statistics_exact(momentum, buffer_dtype):
    rng = np.random.default_rng(8)
    mean = oracle.round_to(rng.standard_normal(9), buffer_dtype)
    var = oracle.round_to(rng.random(9) + 0.5, buffer_dtype)
    tracked = 0
    running = [to_tensor(mean, buffer_dtype), to_tensor(var, buffer_dtype), torch.tensor(0)]
    for samples in (4, 0, 7, 1):
        x = rough_samples(rng, (samples, 9, 5), "float32")
        forward = oracle.forward([x], "float32")
        mean, var, tracked = oracle.update_running(
            mean, var, tracked, forward, momentum, buffer_dtype
        )
        rank = Rank(to_tensor(x, "float32"))
        rank.step()
        ops.update_running_statistics(*running, None, rank.saved, momentum)
        assert_same_bits(running[0], mean, "running_mean")
        assert_same_bits(running[1], var, "running_var")
        assert int(running[2]) == tracked


@pytest.mark.parametrize("dtype", DTYPES)
def test_evaluation_exact(dtype):
    rng = np.random.default_rng(9)
    x = rough_samples(rng, (4, 17, 9), dtype)
    mean, var = (oracle.round_to(rng.random(17) + 0.5, "float32") for _ in range(2))
    weight, bias = parameters(rng, 17)
    rstd = oracle.inverse_deviation(var, 1e-3)
    expected = oracle.normalize(x, mean, rstd, dtype, weight, bias)
    tensors = [to_tensor(t, "float32") for t in (mean, var, weight, bias)]
    for level in LEVELS:
        assert ops.force_cpu_instruction_set(level)
        y, _ = ops.evaluate(to_tensor(x, dtype), *tensors, 1e-3)
        assert_same_bits(y, expected, level)
