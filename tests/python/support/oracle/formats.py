# SPDX-License-Identifier: Apache-2.0
"""Number types, rounding to them, and the wire formats (section 2 of docs/numerics.md)."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Format:
    """Wire format of one channel: radix-2^52 digits of two sums and one flags word (section 2).

    The unit of the first sum is 2^-unit1 (L1 of section 3), of the second 2^-unit2 (L2).
    """

    name: str
    unit1: int
    digits1: int
    unit2: int
    digits2: int

    @property
    def words(self):
        """Words per channel, the flags word included."""
        return self.digits1 + self.digits2 + 1


FORMATS = {
    "half": Format("half", 24, 2, 48, 3),
    "single": Format("single", 149, 6, 298, 12),
    "double": Format("double", 1074, 41, 1074, 41),
}

_FORMAT_NAMES = {
    "float16": "half",
    "bfloat16": "single",
    "float32": "single",
    "float64": "double",
}

# Significant bits, exponent of the smallest normal number, exponent of the largest binade.
_TYPES = {"float16": (11, -14, 15), "bfloat16": (8, -126, 127), "float32": (24, -126, 127)}


def format_of(dtype):
    """The wire format of an input type."""
    if dtype not in _FORMAT_NAMES:
        raise ValueError(f"unknown type {dtype!r}, expected one of {sorted(_FORMAT_NAMES)}")
    return FORMATS[_FORMAT_NAMES[dtype]]


def round_to(values, dtype):
    """Binary64 values of any shape rounded to nearest even in `dtype`, as a new float64 array.

    One rounding: to a whole number of the value's quantum, which subnormals bound from below.
    """
    format_of(dtype)
    x = np.array(values, dtype=np.float64)
    if dtype == "float64":
        return x
    digits, least, largest = _TYPES[dtype]
    finite = np.isfinite(x)
    with np.errstate(all="ignore"):
        exponent = np.frexp(np.where(finite, x, 0.0))[1]
        quantum = np.maximum(exponent, least + 1) - digits
        y = np.ldexp(np.rint(np.ldexp(x, -quantum)), quantum)
        y = np.where(np.abs(y) >= 2.0 ** (largest + 1), np.copysign(np.inf, x), y)
    return np.where(finite, y, x)


def tensor_of(values, dtype, name):
    """`values` as a float64 array, refused unless every value is representable in `dtype`."""
    x = np.asarray(values, dtype=np.float64)
    same = (round_to(x, dtype) == x) | np.isnan(x)
    if not same.all():
        raise ValueError(f"{name} holds values that are not {dtype}")
    return x
