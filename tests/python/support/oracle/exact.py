# SPDX-License-Identifier: Apache-2.0
"""Correctly rounded operations that numpy lacks: fma, fma32, and the error-free transformations.

RN, RN32, fma and fma32 are those of docs/numerics.md. Everything works on float64 arrays.
"""

import math

import numpy as np

from .formats import round_to


def rn_ratio(numerator, denominator):
    """RN(numerator / denominator) of two integers, denominator > 0, as a float.

    The true division of Python integers is correctly rounded; only its overflow is an exception.
    """
    try:
        return numerator / denominator
    except OverflowError:
        return math.inf if numerator > 0 else -math.inf


def scale(value, exponent):
    """RN(value * 2^exponent) of a finite float, for an exponent of any size."""
    numerator, denominator = value.as_integer_ratio()
    if exponent >= 0:
        return rn_ratio(numerator << exponent, denominator)
    return rn_ratio(numerator, denominator << -exponent)


def fma_scalar(a, b, c):
    """RN(a * b + c) of three Python floats, by integers."""
    if not (math.isfinite(a) and math.isfinite(b)):
        return a * b + c
    if not math.isfinite(c):
        return c
    if a == 0.0 or b == 0.0:
        return a * b + c  # only the sign of a zero is at stake
    an, ad = a.as_integer_ratio()
    bn, bd = b.as_integer_ratio()
    cn, cd = c.as_integer_ratio()
    return rn_ratio(an * bn * cd + cn * ad * bd, ad * bd * cd)


def two_sum(a, b):
    """Knuth's TwoSum: s = RN(a + b) and its error, subtracting a first (section 1).

    s = RN(a + b); z = RN(s - a); d = RN(RN(a - RN(s - z)) + RN(b - z)). The order of the
    subtractions shows only where s is finite and one of them overflows.
    """
    s = a + b
    z = s - a
    return s, (a - (s - z)) + (b - z)


def _split(m):
    """Veltkamp: m in [1/2, 1) in magnitude as a sum of two numbers of at most 26 bits."""
    c = 134217729.0 * m
    high = c - (c - m)
    return high, m - high


def _scaled_product(a, b):
    """(h, l, e) with a * b = (h + l) * 2^e exactly and h = RN(h + l), for finite a and b.

    Dekker's product of the significands in [1/2, 1): nothing in it can overflow or underflow.
    """
    ma, ea = np.frexp(a)
    mb, eb = np.frexp(b)
    h = ma * mb
    ah, al = _split(ma)
    bh, bl = _split(mb)
    low = ((ah * bh - h) + ah * bl + al * bh) + al * bl
    return h, low, ea + eb


def _round_to_odd(s, d):
    """s + d rounded to odd, where (s, d) is a TwoSum: the odd neighbour when d is not 0."""
    even = (s.view(np.int64) & 1) == 0
    return np.where((d != 0.0) & even, np.nextafter(s, np.copysign(np.inf, d)), s)


def _exactly(a, b, c, result, where):
    """Fills result[where] with fma(a, b, c) element by element."""
    at = np.flatnonzero(where)
    if at.size:
        triples = zip(a[at].tolist(), b[at].tolist(), c[at].tolist())
        result[at] = [fma_scalar(*t) for t in triples]


def fma(a, b, c):
    """fma(a, b, c) in binary64, element-wise with broadcasting; returns a float64 array.

    Fast path: Boldo and Melquiond's emulation (2008), proved for unbounded exponents. With the
    product's exponent sum in [-960, 1000] and |c| <= 2^1000 no step overflows and every
    intermediate is a multiple of 2^-1074, where binary64 rounds as with unbounded exponents.
    """
    arrays = np.broadcast_arrays(*(np.asarray(v, dtype=np.float64) for v in (a, b, c)))
    shape = arrays[0].shape
    a, b, c = (np.ascontiguousarray(v).reshape(-1) for v in arrays)
    with np.errstate(all="ignore"):
        finite_product = np.isfinite(a) & np.isfinite(b)
        zero_product = (a == 0.0) | (b == 0.0)
        result = np.where(finite_product & ~np.isfinite(c), c, a * b + c)
        open_ = finite_product & np.isfinite(c) & ~zero_product
        product = np.where(open_, a, 1.0), np.where(open_, b, 1.0)
        h, low, e = _scaled_product(*product)
        fast = open_ & (e >= -960) & (e <= 1000) & (np.abs(c) <= 2.0**1000)
        e = np.where(fast, e, 0)
        uh, ul = np.ldexp(h, e), np.ldexp(low, e)
        th, tl = two_sum(np.where(fast, c, 0.0), ul)
        vh, vl = two_sum(uh, th)
        result = np.where(fast, vh + _round_to_odd(*two_sum(tl, vl)), result)
    _exactly(a, b, c, result, open_ & ~fast)
    return result.reshape(shape)


def product_error(a, b):
    """p = RN(a * b) and q = fma(a, b, -p) (section 1, second sum of float64)."""
    a, b = (np.ascontiguousarray(v) for v in np.broadcast_arrays(a, b))
    shape = a.shape
    a, b = a.reshape(-1), b.reshape(-1)
    with np.errstate(all="ignore"):
        p = a * b
        q = a * b - p  # +0 for exact zeros; inf or NaN where p is not finite
        open_ = np.isfinite(a) & np.isfinite(b) & (a != 0.0) & (b != 0.0)
        _, low, e = _scaled_product(np.where(open_, a, 1.0), np.where(open_, b, 1.0))
        # low is a multiple of 2^-106, so nothing falls below 2^-1074 and p = h * 2^e.
        fast = open_ & np.isfinite(p) & (e >= -968)
        q = np.where(fast, np.ldexp(low, np.where(fast, e, 0)), q)
    _exactly(a, b, -p, q, open_ & ~fast)
    return p.reshape(shape), q.reshape(shape)


def fma32(a, b, c):
    """fma32(a, b, c) of binary32 values, element-wise with broadcasting.

    The product is exact in binary64; the sum is rounded to odd there, so that the final rounding
    to binary32 (at least two bits shorter) is that of the exact value.
    """
    with np.errstate(all="ignore"):
        p = np.asarray(a, dtype=np.float64) * np.asarray(b, dtype=np.float64)
        s, d = two_sum(p, np.asarray(c, dtype=np.float64))
        s = np.asarray(s)
        odd = np.where(np.isfinite(s), _round_to_odd(s, np.where(np.isfinite(s), d, 0.0)), s)
    return round_to(odd, "float32")


def add32(a, b):
    """RN32(a + b) of binary32 values."""
    return fma32(a, 1.0, b)


def mul32(a, b):
    """RN32(a * b) of binary32 values: the product is exact in binary64."""
    with np.errstate(all="ignore"):
        return round_to(np.asarray(a, dtype=np.float64) * b, "float32")
