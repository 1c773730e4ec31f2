# SPDX-License-Identifier: Apache-2.0
"""Elementwise passes of one rank (sections 4 and 6 of docs/numerics.md)."""

import numpy as np

from .exact import add32, fma, fma32, mul32
from .formats import round_to, tensor_of
from .sums import mask_of

ACTIVATIONS = ("none", "relu", "leaky_relu")


def along(values, x):
    """[C] values shaped to broadcast along the channels of x (N, C, *spatial)."""
    return np.asarray(values, dtype=np.float64).reshape((1, -1) + (1,) * (x.ndim - 2))


def scaled_weight(weight, rstd):
    """w = RN(weight * rstd) in binary64, [C]; an absent weight is 1."""
    weight = np.ones_like(rstd) if weight is None else np.asarray(weight, dtype=np.float64)
    with np.errstate(all="ignore"):
        return weight * rstd


def _centred(x, mean, dtype):
    """t of section 4: x - mean in binary32, or RN(x - mean) for float64."""
    with np.errstate(all="ignore"):
        if dtype == "float64":
            return x - along(mean, x)
        high = round_to(mean, "float32")
        low = np.where(np.isfinite(high), round_to(mean - high, "float32"), 0.0)
    return add32(add32(x, -along(high, x)), -along(low, x))


def _slope(slope, dtype):
    """The slope rounded to the arithmetic's type (section 4)."""
    return float(slope) if dtype == "float64" else float(round_to(slope, "float32"))


def _add(a, b, dtype):
    with np.errstate(all="ignore"):
        return a + b if dtype == "float64" else add32(a, b)


def multiply(a, b, dtype):
    with np.errstate(all="ignore"):
        return a * b if dtype == "float64" else mul32(a, b)


def _check_activation(activation):
    if activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}, expected one of {ACTIVATIONS}")


def _before_activation(x, mean, rstd, dtype, weight, bias, residual):
    """v of section 4, binary32 (binary64 for float64), (N, C, *spatial)."""
    w = scaled_weight(weight, rstd)
    b = np.zeros_like(rstd) if bias is None else np.asarray(bias, dtype=np.float64)
    t = _centred(x, mean, dtype)
    if dtype == "float64":
        v = fma(along(w, x), t, along(b, x))
    else:
        w, b = round_to(w, "float32"), round_to(b, "float32")
        v = fma32(along(w, x), t, along(b, x))
    if residual is None:
        return v
    residual = tensor_of(residual, dtype, "residual")
    if residual.shape != x.shape:
        raise ValueError("residual and x have different shapes")
    return _add(v, residual, dtype)


def normalize(
    x,
    mean,
    rstd,
    dtype,
    weight=None,
    bias=None,
    residual=None,
    activation="none",
    slope=0.01,
    mask=None,
):
    """y (N, C, *spatial) in x's type from x, mean and rstd [C] (section 4).

    y is +0 where the mask is False.
    """
    _check_activation(activation)
    x = tensor_of(x, dtype, "x")
    v = _before_activation(x, mean, rstd, dtype, weight, bias, residual)
    if activation == "relu":
        v = np.where((v > 0.0) | np.isnan(v), v, 0.0)
    elif activation == "leaky_relu":
        v = np.where(v > 0.0, v, multiply(v, _slope(slope, dtype), dtype))
    y = round_to(v, dtype)
    return y if mask is None else np.where(mask_of(mask, x), y, 0.0)


def upstream(dy, x, mean, rstd, dtype, weight, bias, residual, activation, slope, mask):
    """u of section 6, in dy's type: dy through the activation's derivative; +0 where masked."""
    _check_activation(activation)
    dy = tensor_of(dy, dtype, "dy")
    if dy.shape != x.shape:
        raise ValueError("dy and x have different shapes")
    u = dy
    if activation != "none":
        v = _before_activation(x, mean, rstd, dtype, weight, bias, residual)
        if activation == "relu":
            u = np.where(v <= 0.0, 0.0, dy)
        else:
            scaled = round_to(multiply(dy, _slope(slope, dtype), dtype), dtype)
            u = np.where(v > 0.0, dy, scaled)
    return u if mask is None else np.where(mask_of(mask, x), u, 0.0)


def input_gradient(u, x, mean, rstd, w, total, count, dtype):
    """dx in x's type from u, the global sums `total` and N > 0 (section 6)."""
    with np.errstate(all="ignore"):
        g = total.g / count
        c1 = w
        c2 = -(((w * rstd) * rstd) * g)
        c3 = -(w * (total.a64 / count))
        t = _centred(x, mean, dtype)
        if dtype == "float64":
            return fma(along(c1, x), u, fma(along(c2, x), t, along(c3, x)))
        usable = np.isfinite(rstd) & (rstd != 0.0)
        e = np.frexp(np.where(usable, rstd, 1.0))[1] - 1
        e = np.where(usable, np.clip(e, -126, 127), 0)
        up, down = np.ldexp(1.0, e), np.ldexp(1.0, -e)
        c1, c2, c3 = (along(round_to(c, "float32"), x) for c in (c1, c2 * down, c3))
        scaled = mul32(t, along(up, x))
    return round_to(fma32(c1, u, fma32(c2, scaled, c3)), dtype)
