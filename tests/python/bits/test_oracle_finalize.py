# SPDX-License-Identifier: Apache-2.0
"""Self tests of the oracle: finalize (section 3 of docs/numerics.md), with references as in
test_oracle_layer.py.
"""

import math
from fractions import Fraction

import numpy as np
import pytest

import oracle
from oracle_reference import DTYPES, U, draw, fractions, gamma, same


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


def test_infinities_meet_in_the_merge_exact():
    xs = [np.array([[v]]) for v in (math.inf, 1.0, -math.inf)]
    f = oracle.forward(xs, "float32")
    assert same([f.mean[0], f.var[0], f.rstd[0]], [math.nan] * 3)
    assert same(f.ys, [[[math.nan]]] * 3)
    f = oracle.forward(xs[:2], "float32")
    assert same([f.mean[0], f.var[0]], [math.inf, math.nan])


@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_and_masked_out_batches_exact(dtype):
    x = draw(np.random.default_rng(1), (2, 3, 4), dtype)
    for xs, masks in (([x[:0]] * 2, None), ([x], [np.zeros((2, 4), dtype=bool)])):
        f = oracle.forward(xs, dtype, masks=masks)
        zero = np.zeros(3)
        assert f.count == 0 and same([f.mean, f.var, f.rstd], [zero] * 3)
        assert not f.merged.any() and same(f.ys[0], np.zeros(xs[0].shape))
        old = (np.ones(3), np.full(3, 2.0), 7)
        new = oracle.update_running(*old, f, 0.1)
        assert same(new[0], old[0]) and same(new[1], old[1]) and new[2] == 7
        b = oracle.backward(xs, xs, dtype, f, masks=masks)
        assert same([b.dweight, b.dbias], [zero] * 2) and same(b.dxs[0], np.zeros(xs[0].shape))


def test_pairs_of_float64_are_sharper_than_binary64():
    """Lanes of (s, r): the errors of s are summed exactly but for gamma(72) of their size, and
    each of at most 36 is below u times a partial sum; x^2 adds one such error of the product."""
    x = draw(np.random.default_rng(3), (1, 1, 5000), "float64", -3, 3)
    row = oracle.local_words(x, x, "float64")[0]
    for integer, power in zip(oracle.integers_of(row, "float64"), (1, 2)):
        values = [v**power for v in fractions(x)]
        size = sum(map(abs, values)) * (1 + gamma(37))
        error = abs(Fraction(integer, 2**1074) - sum(values))
        assert error <= gamma(72) * 37 * U * size
        assert error < U * abs(sum(values)) / 1000  # and far below one rounding
