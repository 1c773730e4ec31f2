# SPDX-License-Identifier: Apache-2.0
"""Self tests of the oracle: rounding, fma, words (sections 1 and 2 of docs/numerics.md).

The references are straight loops over fractions.Fraction: slow, and with another arithmetic than
the oracle's. Equality is equality of bits.
"""

import math
from fractions import Fraction

import numpy as np
import pytest

import oracle
from oracle.exact import fma_scalar
from oracle_reference import DTYPES, TYPES, draw, exact_fma, nearest, same, special

TOP = 2**52 - 1
MAX = float(np.finfo(np.float64).max)


# ---- rounding and fma --------------------------------------------------------------------------


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
    digits, _, largest = TYPES[dtype]
    upper = np.append(grid[1:], 2.0 ** (largest + 1))
    middle = (grid + upper) / 2
    even = np.where(np.arange(grid.size) % 2 == 0, grid, upper)
    above = np.where(upper > grid[-1], np.inf, upper)
    even = np.where(even > grid[-1], np.inf, even)
    for sign in (1.0, -1.0):
        assert same(oracle.round_to(sign * middle, dtype), sign * even)
        assert same(oracle.round_to(sign * np.nextafter(middle, 0), dtype), sign * grid)
        assert same(oracle.round_to(sign * np.nextafter(middle, np.inf), dtype), sign * above)


@pytest.mark.parametrize("dtype", DTYPES)
def test_round_to_is_the_definition_exact(dtype):
    x = special(np.random.default_rng(3), 3000, "float64")
    x = np.where(x == 0.0, 1.0, x)
    assert same(oracle.round_to(x, dtype), [nearest(Fraction(v), dtype) for v in x.tolist()])


@pytest.mark.parametrize("dtype,function", [("float32", oracle.fma32), ("float64", oracle.fma)])
def test_fma_exact(dtype, function):
    rng = np.random.default_rng(4)
    n = 6000
    a, b, c = (special(rng, n, dtype) for _ in range(3))
    b[: n // 2] = draw(rng, n // 2, dtype)
    with np.errstate(over="ignore"):
        near = -oracle.round_to(a[:n:3] * b[:n:3], dtype)  # cancellation of the leading part
    c[:n:3] = np.where(np.isfinite(near), near, 1.0)
    tie = np.ldexp(1.0, rng.integers(-TYPES[dtype][0] - 2, 2, n // 5))  # exact ties and almost
    a[: n // 5], b[: n // 5], c[: n // 5] = tie, 1.0, np.resize([1.0, -1.0, 1.5], n // 5)
    a, b, c = (oracle.round_to(v, dtype) for v in (a, b, c))
    expected = [exact_fma(*t, dtype) for t in zip(a.tolist(), b.tolist(), c.tolist())]
    assert same(function(a, b, c), expected)
    if dtype == "float64":
        expected = [fma_scalar(*t) for t in zip(a.tolist(), b.tolist(), c.tolist())]
        assert same(function(a, b, c), expected)


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


def test_fma_of_non_finite_values():
    inf, nan = math.inf, math.nan
    cases = [
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


# ---- words -------------------------------------------------------------------------------------


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


def loop_integers(u, v, dtype):
    """Both sums of one channel's planes (lists of lists), by the text of section 1."""
    totals = [Fraction(0), Fraction(0)]
    wide = dtype == "float64"
    for plane_u, plane_v in zip(u, v):
        for start in range(0, len(plane_u), 512):
            for which in (0, 1):
                s, r = [0.0] * 16, [0.0] * 16
                for e in range(start, min(start + 512, len(plane_u))):
                    x, y, lane = plane_u[e], plane_v[e], e % 16
                    if not wide and which == 0:
                        s[lane] = s[lane] + x
                    elif not wide:
                        s[lane] = exact_fma(x, y, s[lane], "float64")
                    else:
                        p = x * y if which else x
                        q = exact_fma(x, y, -p, "float64") if which else 0.0
                        total = nearest(Fraction(s[lane]) + Fraction(p), "float64")
                        d = float(Fraction(s[lane]) + Fraction(p) - Fraction(total))
                        s[lane], r[lane] = total, r[lane] + ((q + d) if which else d)
                for h in (8, 4, 2, 1):
                    for lane in range(h):
                        total = s[lane] + s[lane + h]
                        d = float(Fraction(s[lane]) + Fraction(s[lane + h]) - Fraction(total))
                        s[lane], r[lane] = total, (r[lane] + r[lane + h]) + d
                totals[which] += Fraction(s[0]) + (Fraction(r[0]) if wide else 0)
    return totals


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 5, 16, 49, 511, 512, 513, 1100])
def test_order_inside_a_plane_exact(dtype, m):
    rng = np.random.default_rng(m)
    spread = 12 if dtype == "float16" else 40
    shape = (2, 2, m)
    u, v = draw(rng, shape, dtype, -spread, spread), draw(rng, shape, dtype, -spread, spread)
    v = u if m % 2 else v
    form = oracle.format_of(dtype)
    for c, row in enumerate(oracle.local_words(u, v, dtype)):
        first, second = loop_integers(u[:, c].tolist(), v[:, c].tolist(), dtype)
        expected = (first * 2**form.unit1, second * 2**form.unit2, 0)
        assert oracle.integers_of(row, dtype) == expected


def test_masks_exact():
    rng = np.random.default_rng(8)
    for dtype in DTYPES:
        x = draw(rng, (3, 2, 70), dtype, -10, 10)
        mask = rng.random((3, 70)) < 0.6
        zeroed = np.where(mask[:, None], x, 0.0)
        dirty = np.where(mask[:, None], x, np.nan)
        expected = oracle.local_words(zeroed, zeroed, dtype)
        assert np.array_equal(oracle.local_words(dirty, dirty, dtype, mask=mask), expected)
        # A masked suffix moves no lane: it equals the shorter plane. A whole sample goes too.
        mask = np.zeros((3, 70), dtype=bool)
        mask[:2, :33] = True
        a = oracle.forward([np.where(mask[:, None], x, np.inf)], dtype, masks=[mask])
        b = oracle.forward([x[:2, :, :33]], dtype)
        assert np.array_equal(a.merged, b.merged) and a.count == b.count == 66
        assert same(a.ys[0][:2, :, :33], b.ys[0])
        assert same(a.ys[0][2], np.zeros((2, 70)))
        assert same(a.ys[0][:, :, 33:], np.zeros((3, 2, 37)))
