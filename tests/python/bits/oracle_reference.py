# SPDX-License-Identifier: Apache-2.0
"""References for the tests of the oracle: the definitions, over fractions.Fraction."""

import math
from fractions import Fraction

import numpy as np

import oracle

DTYPES = ("float16", "bfloat16", "float32", "float64")
# Significant bits, exponent of the smallest normal number, exponent of the largest binade.
TYPES = {
    "float16": (11, -14, 15),
    "bfloat16": (8, -126, 127),
    "float32": (24, -126, 127),
    "float64": (53, -1022, 1023),
}


def nearest(value, dtype):
    """The Fraction rounded to nearest even in dtype, from the definition; a float."""
    digits, least, largest = TYPES[dtype]
    value = Fraction(value)
    if value == 0:
        return 0.0
    e = abs(value.numerator).bit_length() - value.denominator.bit_length()
    e -= abs(value) < Fraction(2) ** e
    quantum = Fraction(2) ** (max(e, least) - digits + 1)
    rounded = round(value / quantum) * quantum
    if abs(rounded) >= Fraction(2) ** (largest + 1):
        return math.inf if value > 0 else -math.inf
    return math.copysign(float(rounded), value)


def exact_fma(a, b, c, dtype):
    """fma from the definition, for finite arguments; a zero as in IEEE 754."""
    value = Fraction(a) * Fraction(b) + Fraction(c)
    if value:
        return nearest(value, dtype)
    return math.copysign(0.0, a) * math.copysign(1.0, b) + c if c == 0 and 0 in (a, b) else 0.0


def bits(values):
    """Bits of float64 values, with one NaN."""
    values = np.array(values, dtype=np.float64)
    return np.where(np.isnan(values), np.nan, values).view(np.int64)


def same(a, b):
    """Equal bits; NaN equals NaN, +0 differs from -0."""
    return np.array_equal(bits(a), bits(b))


def draw(rng, shape, dtype, low=-8, high=8):
    """Normal values times 2^low..2^high, one power per value, in dtype."""
    powers = rng.integers(low, high, shape)
    return oracle.round_to(np.ldexp(rng.standard_normal(shape), powers), dtype)


def special(rng, count, dtype):
    """Values of dtype from random bits of binary64 or near its ends, all finite."""
    digits, least, largest = TYPES[dtype]
    x = np.ldexp(rng.uniform(-1, 1, count), rng.integers(least - digits, largest + 2, count))
    x[::7] = rng.choice([0.0, -0.0, 1.0, -1.0], x[::7].shape)
    x[::11] = np.ldexp(rng.integers(-3, 4, x[::11].shape).astype(float), least - digits + 1)
    x = oracle.round_to(x, dtype)
    return np.where(np.isfinite(x), x, 1.0)


# Sections 3, 4 and 6, rounding by rounding, for finite values; signs of zeros aside.


def product(a, b, dtype="float64"):
    return nearest(Fraction(a) * Fraction(b), dtype)


def quotient(a, b):
    return nearest(Fraction(a) / Fraction(b), "float64")


def total(a, b, dtype="float64"):
    return nearest(Fraction(a) + Fraction(b), dtype)


def sums_of(row, dtype):
    """The two sums of one channel's words, as Fractions."""
    form = oracle.format_of(dtype)
    first, second, _ = oracle.integers_of(row, dtype)
    return Fraction(first, 2**form.unit1), Fraction(second, 2**form.unit2)


def loop_t(x, mean, wide):
    """t of section 4."""
    if wide:
        return total(x, -mean)
    high = nearest(mean, "float32")
    low = nearest(total(mean, -high), "float32")
    return total(total(x, -high, "float32"), -low, "float32")


def loop_v(x, mean, rstd, weight, bias, z, wide):
    """v of section 4, the residual z added."""
    w, t = product(weight, rstd), loop_t(x, mean, wide)
    if wide:
        return total(exact_fma(w, t, bias, "float64"), z)
    v = exact_fma(nearest(w, "float32"), t, nearest(bias, "float32"), "float32")
    return total(v, z, "float32")


def loop_moments(s, q, n, eps):
    """(mean, var, rstd) from the exact sums s of x and q of x^2; the root by integers."""
    mean = quotient(nearest(s, "float64"), n)
    var = quotient(quotient(nearest(n * q - s * s, "float64"), n), n)
    square = Fraction(total(var, eps))
    root = math.isqrt(int(square * 4**600)) * 2 + 1  # the true root is no tie: the odd bit decides
    return mean, var, quotient(1, nearest(Fraction(root, 2**601), "float64"))


def loop_gradient(s, q, n, mean, rstd, weight):
    """(c1, c2, c3, dweight, dbias) from the exact sums s of u and q of u x."""
    a64, b64 = nearest(s, "float64"), nearest(q, "float64")
    big = exact_fma(-mean, a64, b64, "float64")
    w = product(weight, rstd)
    c2 = -product(product(product(w, rstd), rstd), quotient(big, n))
    return w, c2, -product(w, quotient(a64, n)), product(rstd, big), a64


def loop_dx(u, x, mean, rstd, c1, c2, c3, dtype):
    """dx of section 6."""
    t = loop_t(x, mean, dtype == "float64")
    if dtype == "float64":
        return exact_fma(c1, u, exact_fma(c2, t, c3, dtype), dtype)
    e = max(-126, min(127, math.frexp(rstd)[1] - 1))
    c1, c3 = nearest(c1, "float32"), nearest(c3, "float32")
    c2 = nearest(product(c2, Fraction(2) ** -e), "float32")
    inner = exact_fma(c2, product(t, Fraction(2) ** e, "float32"), c3, "float32")
    return nearest(exact_fma(c1, u, inner, "float32"), dtype)
