# SPDX-License-Identifier: Apache-2.0
"""The oracle at values whose result is known by hand (docs/numerics.md). That it computes what the
operators compute is for test_bits.py and test_properties.py. Equality is equality of bits."""

import math
from fractions import Fraction

import numpy as np
import pytest

import oracle
from oracle.elementwise import upstream
from oracle.exact import fma_scalar
from support import TORCH_DTYPES

DTYPES = tuple(TORCH_DTYPES)
TOP = 2**52 - 1
MAX = float(np.finfo(np.float64).max)


def bits(values):
    """Bits of float64 values, with one NaN."""
    values = np.array(values, dtype=np.float64)
    return np.where(np.isnan(values), np.nan, values).view(np.int64)


def same(a, b):
    """Equal bits; NaN equals NaN, +0 differs from -0."""
    return np.array_equal(bits(a), bits(b))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_round_to_every_tie_exact(dtype):
    """All neighbours, their midpoints, and a hair to both sides, by their order alone."""
    codes = np.arange(2**15, dtype=np.uint16)
    if dtype == "float16":
        grid = codes.view(np.float16).astype(np.float64)
    else:
        grid = (codes.astype(np.uint32) << 16).view(np.float32)
        grid = grid[np.isfinite(grid)].astype(np.float64)
    grid = grid[np.isfinite(grid)]  # ascending; even codes have even significands
    assert same(oracle.round_to(grid, dtype), grid)
    upper = np.append(grid[1:], 2.0 ** (16 if dtype == "float16" else 128))
    middle = (grid + upper) / 2
    even = np.where(np.arange(grid.size) % 2 == 0, grid, upper)
    above = np.where(upper > grid[-1], np.inf, upper)
    even = np.where(even > grid[-1], np.inf, even)
    for sign in (1.0, -1.0):
        assert same(oracle.round_to(sign * middle, dtype), sign * even)
        assert same(oracle.round_to(sign * np.nextafter(middle, 0), dtype), sign * grid)
        assert same(oracle.round_to(sign * np.nextafter(middle, np.inf), dtype), sign * above)


def test_fma32_rounds_once_exact():
    tiny = 2.0**-60  # below the last bit of binary64 at 2^24
    largest = 2.0**128 - 2.0**104
    cases = [
        (97.0, 172961.0, 0.0, 2.0**24),  # 97 * 172961 = 2^24 + 1, a tie
        (97.0, 172961.0, tiny, 2.0**24 + 2),
        (97.0, 172961.0, -tiny, 2.0**24),
        (-97.0, 172961.0, -tiny, -(2.0**24) - 2),
        (2.0**-75, 2.0**-75, 0.0, 0.0),  # half of the smallest subnormal
        (-(2.0**-75), 2.0**-75, 0.0, -0.0),
        (2.0**-75, 2.0**-75 * (1 + 2.0**-23), 0.0, 2.0**-149),
        (2.0**-75, 2.0**-75, 2.0**-149, 2.0**-148),
        (1.0, largest, 2.0**103, math.inf),  # a tie again
        (1.0, largest, 2.0**103 * (1 - 2.0**-24), largest),
        (2.0**64, 2.0**64, -largest, 2.0**104),  # a product beyond binary32
    ]
    for a, b, c, expected in cases:
        assert same(oracle.fma32(a, b, c), expected)


def test_fma_is_that_of_integers_exact():
    """Products whose leading part cancels, exact ties and almost, and exponents of all sizes."""
    rng = np.random.default_rng(4)
    n = 6000
    a, b, c = (np.ldexp(rng.uniform(-1, 1, n), rng.integers(-1074, 1024, n)) for _ in range(3))
    b[: n // 2] = np.ldexp(rng.standard_normal(n // 2), rng.integers(-8, 8, n // 2))
    with np.errstate(over="ignore"):
        near = -a[::3] * b[::3]
    c[::3] = np.where(np.isfinite(near), near, 1.0)
    a[: n // 5] = np.ldexp(1.0, rng.integers(-55, 2, n // 5))
    b[: n // 5], c[: n // 5] = 1.0, np.resize([1.0, -1.0, 1.5], n // 5)
    b[: n // 5 : 7] += 2.0**-52
    expected = [fma_scalar(*t) for t in zip(a.tolist(), b.tolist(), c.tolist())]
    assert same(oracle.fma(a, b, c), expected)


def test_fma_by_hand_exact():
    inf, nan = math.inf, math.nan
    near = 1 + 2.0**-52, 1 - 2.0**-52  # their product is 1 - 2^-104: almost half a unit of 2^53
    cases = [
        (*near, 2.0**53 + 2, 2.0**53 + 2),
        (*near, -(2.0**53) - 2, -(2.0**53) - 2),
        (-near[0], near[1], 2.0**53 + 4, 2.0**53 + 4),
        (0.0, inf, 1.0, nan),
        (2.0, inf, -inf, nan),
        (2.0, inf, 1.0, inf),
        (1e300, 1e300, -inf, -inf),  # the product alone would overflow
        (1e300, 1e300, -1e300, inf),
        (1.0, 1.0, nan, nan),
        (-0.0, 1.0, -0.0, -0.0),
        (-0.0, 1.0, 0.0, 0.0),
        (-1e-300, 1e-300, 0.0, -0.0),
        (1e-300, -1e-300, 5e-324, 5e-324),
    ]
    for a, b, c, expected in cases:
        assert same(oracle.fma(a, b, c), expected) and same(fma_scalar(a, b, c), expected)


def words(values, dtype):
    """The words of one channel of a 2-D input."""
    x = np.array(values, dtype=np.float64).reshape(-1, 1)
    return oracle.local_words(x, x, dtype)[0].tolist()


def test_words_by_hand_exact():
    zero = [0] * 12
    # 1 = 2^149 units and 149 = 2*52 + 45; 1^2 = 2^298 units and 298 = 5*52 + 38.
    one = [0, 0, 2**45, 0, 0, 0]
    square = zero[:5] + [2**38] + zero[6:]
    for dtype in ("float32", "bfloat16"):
        assert words([1.0], dtype) == one + square + [0]
        minus = [0, 0, 2**52 - 2**45, TOP, TOP, -1]
        assert words([-1.0], dtype) == minus + square + [0]
        assert words([1.0, -1.0], dtype) == [0] * 6 + zero[:5] + [2**39] + zero[6:] + [0]
    least = 2.0**-149
    assert words([least], "float32") == [1, 0, 0, 0, 0, 0] + [1] + zero[1:] + [0]
    assert words([-least], "float32") == [TOP] * 5 + [-1] + [1] + zero[1:] + [0]
    # 65504 = (2^11 - 1) 2^5: 2^40 - 2^29 units of 2^-24; its square has 2^80 - 2^70 + 2^58.
    half = [2**40 - 2**29, 0, 0, 2**28 - 2**18 + 2**6, 0, 0]
    assert words([65504.0], "float16") == half
    assert words([2.0**-24], "float16") == [1, 0, 1, 0, 0, 0]
    # 1 = 2^1074 units and 1074 = 20*52 + 34; (1 + 2^-52)^2 = 1 + 2^-51 + 2^-104.
    one = [0] * 20 + [2**34] + [0] * 20
    assert words([1.0], "float64") == one + one + [0]
    assert words([-1.0], "float64")[:41] == [0] * 20 + [2**52 - 2**34] + [TOP] * 19 + [-1]
    square = sum(2 ** (1074 - k) for k in (0, 51, 104))
    assert oracle.integers_of(words([1 + 2.0**-52], "float64"), "float64")[1] == square
    assert words([5e-324], "float64") == [1] + [0] * 82
    assert words([-5e-324] * 3, "float64") == [TOP - 2] + [TOP] * 39 + [-1] + [0] * 42


def test_flags_exact():
    second = 1 << 45
    inf, nan = math.inf, math.nan
    for dtype in DTYPES:
        assert words([1.0, nan, nan], dtype)[-1] == 1 + second
        assert words([inf, 1.0, inf], dtype)[-1] == (1 << 15) + second
        assert words([inf, -inf], dtype)[-1] == (1 << 15) + (1 << 30) + second
        # Non-finite partials are not added.
        assert words([inf, 1.0], dtype)[:-1] == words([1.0], dtype)[:-1]
        x = np.array([inf, -inf]).reshape(1, 1, 2)  # one segment: NaN by IEEE arithmetic
        assert oracle.local_words(x, x, dtype)[0, -1] == 1 + second
        x = np.zeros((1, 1, 2000))
        x[..., [0, 600, 1200]] = nan
        assert oracle.local_words(x, x, dtype)[0, -1] == 1 + second
        u, v = np.zeros((1, 1)), np.full((1, 1), inf)  # 0 * inf: the second sum only
        assert oracle.local_words(u, v, dtype)[0, -1] == second
    assert words([1e200], "float64")[-1] == second
    x = np.full((1, 1, 17), MAX)  # lane 0 overflows in the first sum
    assert oracle.local_words(x, x, "float64")[0, -1] == (1 << 15) + second


def test_two_sum_of_the_largest_number_exact():
    """s is finite, yet one of TwoSum's subtractions overflows: r is dropped without a flag."""
    ulp = 2.0**971
    x = np.zeros((1, 1, 17))
    for a, b, lost in ((MAX, -1.5 * ulp, 0), (-1.5 * ulp, MAX, Fraction(ulp) / 2)):
        x[0, 0, 0], x[0, 0, 16] = a, b
        first, _, flags = oracle.integers_of(oracle.local_words(x, x, "float64")[0], "float64")
        assert first == (Fraction(MAX) - Fraction(ulp) * Fraction(3, 2) + lost) * 2**1074
        assert flags == 1 << 45  # the second sum overflows


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
