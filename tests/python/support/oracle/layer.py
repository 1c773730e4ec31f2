# SPDX-License-Identifier: Apache-2.0
"""The whole layer over a list of ranks (sections 1 to 6 of docs/numerics.md)."""

from dataclasses import dataclass

import numpy as np

from .elementwise import along, input_gradient, normalize, scaled_weight, upstream
from .finalize import check_count, gradients, moments
from .formats import round_to, tensor_of
from .sums import count_of, local_words, mask_of, merge


@dataclass(frozen=True)
class Forward:
    """words per rank and merged, N, statistics float64 [C], outputs per rank in x's type."""

    words: list
    merged: np.ndarray
    count: int
    mean: np.ndarray
    var: np.ndarray
    rstd: np.ndarray
    ys: list


@dataclass(frozen=True)
class Backward:
    """Words per rank and merged, gradients per rank, global sums and shares, float64 [C].

    dresiduals is None without residuals.
    """

    words: list
    merged: np.ndarray
    dxs: list
    dresiduals: list
    dweight: np.ndarray
    dbias: np.ndarray
    dweight_shares: list
    dbias_shares: list


def _per_rank(values, ranks):
    values = [None] * ranks if values is None else list(values)
    if len(values) != ranks:
        raise ValueError("one entry per rank is expected")
    return values


def forward(
    xs,
    dtype,
    weight=None,
    bias=None,
    eps=1e-5,
    residuals=None,
    activation="none",
    slope=0.01,
    masks=None,
):
    """Training forward over ranks; xs is a list of (N_r, C, *spatial) (sections 1 to 4)."""
    xs = [tensor_of(x, dtype, "x") for x in xs]
    residuals, masks = _per_rank(residuals, len(xs)), _per_rank(masks, len(xs))
    words = [local_words(x, x, dtype, mask) for x, mask in zip(xs, masks)]
    merged = merge(words)
    count = sum(count_of(x, mask) for x, mask in zip(xs, masks))
    m = moments(merged, count, dtype, eps)
    ys = [
        normalize(x, m.mean, m.rstd, dtype, weight, bias, z, activation, slope, mask)
        for x, z, mask in zip(xs, residuals, masks)
    ]
    return Forward(words, merged, count, m.mean, m.var, m.rstd, ys)


def backward(
    dys,
    xs,
    dtype,
    fwd,
    weight=None,
    bias=None,
    residuals=None,
    activation="none",
    slope=0.01,
    masks=None,
    parameter_dtype="float32",
):
    """Training backward over ranks, with mean, rstd and N of `fwd` (section 6)."""
    xs = [tensor_of(x, dtype, "x") for x in xs]
    zs, ms = _per_rank(residuals, len(xs)), _per_rank(masks, len(xs))
    mean, rstd, count = fwd.mean, fwd.rstd, fwd.count
    us = [
        upstream(dy, x, mean, rstd, dtype, weight, bias, z, activation, slope, mask)
        for dy, x, z, mask in zip(_per_rank(dys, len(xs)), xs, zs, ms)
    ]
    if sum(count_of(x, mask) for x, mask in zip(xs, ms)) != count:
        raise ValueError("the backward ranks do not count N elements")
    check_count(count)
    words = [local_words(u, x, dtype, mask) for u, x, mask in zip(us, xs, ms)]
    merged = merge(words)
    total = gradients(merged, count, dtype, mean, rstd)
    w = scaled_weight(weight, rstd)
    dxs = []
    for u, x, mask in zip(us, xs, ms):
        dx = np.zeros_like(x)
        if count:
            dx = input_gradient(u, x, mean, rstd, w, total, count, dtype)
            dx = np.where(along(total.flagged, x) != 0.0, np.nan, dx)
        dxs.append(dx if mask is None else np.where(mask_of(mask, x), dx, 0.0))
    shares = [gradients(own, count, dtype, mean, rstd) for own in words]
    return Backward(
        words=words,
        merged=merged,
        dxs=dxs,
        dresiduals=None if residuals is None else us,
        dweight=round_to(total.dweight, parameter_dtype),
        dbias=round_to(total.dbias, parameter_dtype),
        dweight_shares=[round_to(share.dweight, parameter_dtype) for share in shares],
        dbias_shares=[round_to(share.dbias, parameter_dtype) for share in shares],
    )
