# SPDX-License-Identifier: Apache-2.0
"""The fused activation and residual: every bit against the oracle, gradients against autograd."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import oracle
import syncbn
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
ACTIVATIONS = (("none", 0.01), ("relu", 0.01), ("leaky_relu", 0.01), ("leaky_relu", -1.5))

# Planes of 1, 3, 49, 513 and 3000 elements; 1, 3, 17, 65 and 130 channels.
SHAPES = ((5, 65), (9, 130), (3, 3, 3), (4, 65, 7, 7), (2, 17, 27, 19), (2, 1, 3000))


@pytest.fixture(autouse=True)
def _restore_level():
    before = ops.cpu_instruction_set()
    yield
    ops.force_cpu_instruction_set(before)


def samples(shape, dtype, seed):
    """x, z, dy as float64 arrays of values of dtype; weight and bias of float32. y is near 0 often:
    weights of 0, and residuals that cancel."""
    rng = np.random.default_rng([*shape, len(dtype), ord(dtype[0]), seed])
    x = rough_samples(rng, shape, dtype)
    z, dy = (oracle.round_to(rng.standard_normal(shape), dtype) for _ in range(2))
    weight, bias = (oracle.round_to(rng.standard_normal(shape[1]), "float32") for _ in range(2))
    weight[:: max(2, shape[1] // 4)] = 0.0
    bias[:: max(2, shape[1] // 2)] = 0.0
    return x, z, dy, weight, bias


def expected_of(x, z, dy, weight, bias, dtype, activation, slope):
    """Forward and backward, as the oracle has them."""
    options = {"activation": activation, "slope": slope}
    residuals = None if z is None else [z]
    forward = oracle.forward([x], dtype, weight, bias, residuals=residuals, **options)
    return forward, oracle.backward(
        [dy], [x], dtype, forward, weight, bias, residuals=residuals, **options
    )


def check(given, expected, layouts, keep=True):
    """given: arguments of expected_of, which the oracle takes longer for than the layer. layouts:
    of x, z and dy, one name or three."""
    x, z, dy, weight, bias, dtype, activation, slope = given
    forward, backward = expected
    parameters = [torch.from_numpy(p).float() for p in (weight, bias)]
    names = layouts if isinstance(layouts, tuple) else (layouts,) * 3
    tensors = [
        None if values is None else layouts_of(to_tensor(values, dtype))[name]
        for values, name in zip((x, z, dy), names, strict=True)
    ]
    got = run_layer(
        tensors[0],
        tensors[2],
        *parameters,
        residual=tensors[1],
        activation=activation,
        slope=slope,
        keep=keep,
    )
    assert_same_bits(got["y"], forward.ys[0], "y")
    np.testing.assert_array_equal(got["gradient_words"].numpy(), backward.words[0])
    assert_same_bits(got["dx"], backward.dxs[0], "dx")
    assert_same_bits(got["dweight"], backward.dweight, "dweight")
    assert_same_bits(got["dbias"], backward.dbias, "dbias")
    if z is not None and keep:
        assert_same_bits(got["dresidual"], backward.dresiduals[0], "dresidual")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_bit_exact(shape, dtype):
    x, z, dy, weight, bias = samples(shape, dtype, 0)
    for activation, residual in itertools.product(ACTIVATIONS, (None, z)):
        given = x, residual, dy, weight, bias, dtype, *activation
        expected = expected_of(*given)
        for level in available_levels():
            assert ops.force_cpu_instruction_set(level)
            for layout in ("contiguous", "channels-last", "gaps", "channels-last slice"):
                check(given, expected, layout)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts_that_differ_exact(dtype):
    """The mask's order follows x alone, so forward and backward may meet different neighbours."""
    given = *samples((3, 19, 6, 5), dtype, 1), dtype, "relu", 0.0
    expected = expected_of(*given)
    for level in available_levels():
        assert ops.force_cpu_instruction_set(level)
        for layouts in itertools.product(("contiguous", "channels-last", "gaps"), repeat=3):
            for keep in (True, False):
                check(given, expected, layouts, keep)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["relu", "leaky_relu"])
def test_special_values_exact(dtype, activation):
    """NaN, infinities, zeros and subnormals in x, residual and dy."""
    info = torch.finfo(TORCH_DTYPES[dtype])
    specials = [np.nan, np.inf, -np.inf, 0.0, -0.0, info.tiny, -info.tiny / 4, info.max, 1.0, -1.0]
    values = np.array(list(itertools.product(specials, specials))).T  # z, dy
    z, dy = (v.reshape(1, 1, -1).repeat(2, 0).repeat(3, 1) for v in values)
    x = np.zeros_like(z)
    x[1] = 2.0  # mean 1, v = +1 and -1 times the weight, or 0
    weight, bias = np.array([0.0, 1.0, -2.0]), np.zeros(3)
    for residual in (None, z):
        given = x, residual, dy, weight, bias, dtype, activation, 0.01
        expected = expected_of(*given)
        for layout in ("contiguous", "channels-last"):
            check(given, expected, layout)


def test_threads_and_large_tensors_exact():
    """Blocks of a plane, streaming stores (4 MiB and more) and several threads against plain loops,
    from an odd address too."""
    before = torch.get_num_threads()
    generator = torch.Generator().manual_seed(0)
    for shape, offset in itertools.product(
        ((2, 3, 200, 1001), (4, 33, 100, 100), (70, 4099)), (0, 1)
    ):
        count = int(np.prod(shape)) + offset
        x, z, dy = (torch.randn(count, generator=generator)[offset:].view(shape) for _ in range(3))
        parameters = [torch.randn(shape[1], generator=generator) for _ in range(2)]
        for residual, keep in ((None, False), (z, True), (z, False)):
            results = []
            for level, threads in (
                ("reference", 2),
                *((available_levels()[-1], n) for n in (1, 3)),
            ):
                assert ops.force_cpu_instruction_set(level)
                torch.set_num_threads(threads)
                options = {"residual": residual, "activation": "relu", "keep": keep}
                try:
                    results.append(run_layer(x, dy, *parameters, **options))
                finally:
                    torch.set_num_threads(before)
            for name, value in results[0].items():
                for other in results[1:]:
                    assert value is other[name] or torch.equal(value, other[name]), (shape, name)


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


def test_a_layer_with_an_activation_is_not_reverted_in_silence():
    model = torch.nn.Sequential(syncbn.SyncBatchNorm(4, activation="relu"))
    with pytest.raises(ValueError, match=r"0: .*activation"):
        syncbn.revert_sync_batchnorm(model)
