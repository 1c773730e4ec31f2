# SPDX-License-Identifier: Apache-2.0
"""Self tests of the oracle: finalize and passes (sections 3 to 6 of docs/numerics.md).

References compute over fractions.Fraction and round where the contract rounds; where only accuracy
is promised, the bound is derived next to it. Equality is equality of bits.
"""

import math

import numpy as np
import pytest

import oracle
from oracle.elementwise import upstream
from oracle_reference import (
    DTYPES,
    draw,
    exact_fma,
    loop_dx,
    loop_gradient,
    loop_moments,
    loop_v,
    nearest,
    product,
    quotient,
    same,
    sums_of,
    total,
)

# ---- section 3 -----------------------------------------------------------------------------------


def test_r53_exact():
    assert oracle.r53(0) == (0, 0)
    assert oracle.r53(1) == (2**52, -52) and oracle.r53(-3) == (-3 * 2**51, -51)
    for z, d, k in (
        (2**53 - 1, 2**53 - 1, 0),
        (2**53 + 1, 2**52, 1),  # ties to even, both ways
        (2**53 + 3, 2**52 + 2, 1),
        (2**54 - 1, 2**52, 2),  # a carry out of the top
        ((2**53 + 1 << 100) + 1, 2**52 + 1, 101),
    ):
        assert oracle.r53(z) == (d, k) and oracle.r53(-z) == (-d, k)


def stats(x, dtype, eps=1e-5):
    """(mean, var, rstd) of the first channel of a 2-D input."""
    x = np.array(x, dtype=np.float64).reshape(-1, 1)
    m = oracle.forward([x], dtype, eps=eps)
    return float(m.mean[0]), float(m.var[0]), float(m.rstd[0])


def test_moments_by_hand_exact():
    inf, nan = math.inf, math.nan
    for dtype in DTYPES:
        assert stats([1, 2, 3, 4], dtype, 0.0) == (2.5, 1.25, 1 / math.sqrt(1.25))
        assert stats([-7.0], dtype, 0.0) == (-7.0, 0.0, inf)
        assert stats([0.0, -0.0], dtype, 0.25) == (0.0, 0.0, 2.0)
        assert same(stats([inf, 1.0], dtype), (inf, nan, nan))
        assert same(stats([1.0, -inf], dtype), (-inf, nan, nan))
        assert same(stats([inf, -inf], dtype), (nan, nan, nan))
        assert same(stats([nan, inf], dtype), (nan, nan, nan))
    assert stats([1e200, 1.0], "float64") == (5e199, inf, 0.0)
    assert same(stats([-5e-324, 0.0], "float64", 1.0), (-0.0, 0.0, 1.0))
    # A third of 2^-149: d/N rounds once, and RN(1/3) it is.
    assert stats([2.0**-149, 0, 0], "float32")[0] == 2.0**-149 / 3
    assert stats([2.0**-149, 0, 0], "float32")[1] == (2.0 / 9) * 2.0**-298


# ---- sections 4 to 6, rounding by rounding -------------------------------------------------------


@pytest.mark.parametrize(
    "activation, power", [("none", 0), ("none", 40), ("relu", -40), ("leaky_relu", 0), ("relu", 40)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_passes_are_the_formulas_exact(dtype, activation, power):
    """Every y, dx, residual gradient and parameter gradient; values only (signs of 0 aside)."""
    if dtype == "float16" and power:
        power //= 5
    rng = np.random.default_rng(6)
    shape, wide = (4, 3, 21), dtype == "float64"
    x = oracle.round_to((rng.standard_normal(shape) + 3) * 2.0**power, dtype)
    dy, z = draw(rng, shape, dtype, -2, 2), draw(rng, shape, dtype, -2, 2)
    weight, bias = rng.standard_normal(3), rng.standard_normal(3)
    s = 0.3 if wide else nearest(0.3, "float32")
    xs, dys, zs = ([v[:1], v[1:]] for v in (x, dy, z))
    options = {"residuals": zs, "activation": activation, "slope": 0.3}
    f = oracle.forward(xs, dtype, weight, bias, 1e-30, **options)
    b = oracle.backward(dys, xs, dtype, f, weight, bias, parameter_dtype="float16", **options)
    ys, dxs, us = (np.concatenate(part) for part in (f.ys, b.dxs, b.dresiduals))
    arithmetic = "float64" if wide else "float32"
    for c in range(3):
        mean, rstd = float(f.mean[c]), float(f.rstd[c])
        statistics = loop_moments(*sums_of(f.merged[c], dtype), f.count, 1e-30)
        assert same([f.mean[c], f.var[c], f.rstd[c]], statistics)
        sums = sums_of(b.merged[c], dtype)
        c1, c2, c3, dweight, dbias = loop_gradient(*sums, f.count, mean, rstd, weight[c])
        assert b.dweight[c] == nearest(dweight, "float16")
        assert b.dbias[c] == nearest(dbias, "float16")
        for own, dw, db in zip(b.words, b.dweight_shares, b.dbias_shares):
            share = loop_gradient(*sums_of(own[c], dtype), f.count, mean, rstd, weight[c])
            assert [dw[c], db[c]] == [nearest(v, "float16") for v in share[3:]]
        rows = zip(*(v[:, c].ravel().tolist() for v in (x, dy, z, ys, us, dxs)))
        for value, up, residual, y, u, dx in rows:
            v = loop_v(value, mean, rstd, weight[c], bias[c], residual, wide)
            expected, gradient = v, up
            if activation == "relu":
                expected, gradient = max(v, 0.0), up if v > 0 else 0.0
            elif activation == "leaky_relu" and v <= 0:
                expected = product(v, s, arithmetic)
                gradient = nearest(product(up, s, arithmetic), dtype)
            assert y == nearest(expected, dtype)
            assert u == gradient
            assert dx == loop_dx(gradient, value, mean, rstd, c1, c2, c3, dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("std,weight,up", [(127, 10, -12), (126, 0, 0), (-130, -10, -10)])
def test_extreme_deviations_exact(dtype, std, weight, up):
    """rstd beyond the range of e, and values of c2 and t that binary32 holds as subnormals."""
    rng = np.random.default_rng(12)
    x = np.ldexp(rng.choice([-1.0, 1.0, 0.5, -0.25], (4, 1, 30)), std)
    x = oracle.round_to(x * rng.uniform(0.9, 1.0, x.shape), dtype)
    dy = draw(rng, x.shape, dtype, up - 4, up)
    factor = np.array([1.3 * 2.0**weight])
    f = oracle.forward([x], dtype, factor, eps=0.0)
    b = oracle.backward([dy], [x], dtype, f, factor)
    mean, rstd = float(f.mean[0]), float(f.rstd[0])
    c1, c2, c3, _, _ = loop_gradient(*sums_of(b.merged[0], dtype), 120, mean, rstd, factor[0])
    expected = [
        loop_dx(u, v, mean, rstd, c1, c2, c3, dtype)
        for u, v in zip(dy.ravel().tolist(), x.ravel().tolist())
    ]
    assert np.array_equal(b.dxs[0].ravel(), expected) and np.any(expected)


def test_special_values_of_the_activations():
    """NaN passes relu, a NaN v passes dy, -0 becomes +0 in relu and stays -0 in leaky relu."""
    one = np.ones(1)
    x, dy = np.array([[-0.0], [math.nan], [-1.0], [math.inf]]), np.full((4, 1), 2.0)
    args = (x, np.zeros(1), one, "float32", -one)  # v = -x, and fma(-1, -0, 0) = +0
    inf, nan = math.inf, math.nan
    y = oracle.normalize(*args, activation="relu")
    assert same(y, [[0.0], [nan], [1.0], [0.0]])
    y = oracle.normalize(*args, activation="leaky_relu", slope=0.5)
    assert same(y, [[0.0], [nan], [1.0], [-inf]])
    y = oracle.normalize(*args, bias=[-0.0], activation="leaky_relu", slope=0.5)
    assert same(y[0], [0.0])
    x0 = np.array([[0.0]])
    y = oracle.normalize(x0, np.zeros(1), one, "float32", -one, [-0.0], activation="leaky_relu")
    assert same(y, [[-0.0]])
    y = oracle.normalize(x0, np.zeros(1), one, "float32", -one, [-0.0], activation="relu")
    assert same(y, [[0.0]])
    run = (np.zeros(1), one, "float32", -one)
    for activation, u in (("relu", [0.0, 2.0, 2.0, 0.0]), ("leaky_relu", [1.0, 1.0, 2.0, 1.0])):
        got = upstream(dy, x, *run, None, np.zeros((4, 1)), activation, 0.5, None)
        assert same(got[:, 0], u)


def test_mean_beyond_binary32():
    """RN32(mean) may overflow only with running statistics: then ml = 0 and t = -inf."""
    y = oracle.normalize(np.ones((1, 1)), np.array([1e300]), np.ones(1), "float32", np.ones(1))
    assert same(y, [[-math.inf]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_flags_of_backward_exact(dtype):
    rng = np.random.default_rng(7)
    x, dy = draw(rng, (4, 5, 3), dtype), draw(rng, (4, 5, 3), dtype)
    clean = dy.copy()
    dy[0, 0, 0], dy[1, 1, 1], dy[2, 2, 2] = math.nan, math.inf, -math.inf
    dy[0, 3, 0], dy[3, 3, 0] = math.inf, -math.inf  # on different ranks
    xs, dys = [x[:2], x[2:]], [dy[:2], dy[2:]]
    f = oracle.forward(xs, dtype)
    mask = np.ones((4, 3), dtype=bool)
    mask[3, 2] = False
    b, good = (oracle.backward(d, xs, dtype, f) for d in (dys, [clean[:2], clean[2:]]))
    nan, inf = math.nan, math.inf
    dxs = np.concatenate(b.dxs)
    assert np.isnan(dxs[:, :4]).all() and same(dxs[:, 4], np.concatenate(good.dxs)[:, 4])
    assert same(b.dweight, [nan] * 4 + [good.dweight[4]])
    assert same(b.dbias, [nan, inf, -inf, nan, good.dbias[4]])
    # A rank's own flags decide over its share.
    share = good.dbias_shares[0]
    assert same(b.dbias_shares[0], [nan, inf, share[2], inf, share[4]])
    assert same(np.isnan(b.dweight_shares[1]), [False, False, True, True, False])
    f = oracle.forward([x], dtype, masks=[mask])
    b = oracle.backward([dy], [x], dtype, f, masks=[mask])
    assert same(b.dxs[0][3, :, 2], np.zeros(5)) and np.isnan(b.dxs[0][3, 0, 1])


@pytest.mark.parametrize("buffer_dtype", ["bfloat16", "float32", "float64"])
def test_running_statistics_exact(buffer_dtype):
    rng = np.random.default_rng(10)
    f = oracle.forward([draw(rng, (3, 40, 5), "float32")], "float32")
    mean, var = (oracle.round_to(rng.uniform(0.5, 2, 40), buffer_dtype) for _ in range(2))
    batches = 0
    for momentum in (0.1, None, 0.3, None):
        old = mean, var
        mean, var, batches = oracle.update_running(mean, var, batches, f, momentum, buffer_dtype)
        factor = quotient(1, batches) if momentum is None else momentum
        for c in range(40):
            unbiased = product(float(f.var[c]), quotient(f.count, f.count - 1))
            for new, before, v in ((mean, old[0], float(f.mean[c])), (var, old[1], unbiased)):
                kept = product(total(1, -factor), before[c])
                blend = exact_fma(factor, v, kept, "float64")
                assert new[c] == nearest(blend, buffer_dtype)
    assert batches == 4
    single = oracle.forward([np.full((1, 1), 3.0)], "float32")  # N = 1: var is not corrected
    new = oracle.update_running(np.ones(1), np.ones(1), 4, single, 0.5, buffer_dtype)
    assert new[0] == [2.0] and new[1] == [0.5] and new[2] == 5
