# SPDX-License-Identifier: Apache-2.0
"""From merged words to numbers per channel (sections 3, 5 and 6 of docs/numerics.md)."""

from dataclasses import dataclass

import numpy as np

from .exact import fma_scalar, rn_ratio, scale
from .formats import format_of, round_to
from .sums import MAX_COUNT, flag_names, integers_of


def r53(z):
    """R53(z) = (d, k): z rounded to 53 significant bits, ties to even, z ~ d * 2^k (section 3)."""
    if z == 0:
        return 0, 0
    magnitude = abs(z)
    k = magnitude.bit_length() - 53
    if k <= 0:
        d = magnitude << -k
    else:
        d, rest = magnitude >> k, magnitude & ((1 << k) - 1)
        half = 1 << (k - 1)
        if rest > half or (rest == half and d & 1):
            d += 1
        if d == 2**53:
            d, k = 2**52, k + 1
    return (d if z > 0 else -d), k


@dataclass(frozen=True)
class Moments:
    """Statistics of a batch, float64 [C] each."""

    mean: np.ndarray
    var: np.ndarray
    rstd: np.ndarray


@dataclass(frozen=True)
class Gradients:
    """Per channel, float64 [C]: A64, G, dweight and dbias in binary64; flagged is bool [C]."""

    a64: np.ndarray
    g: np.ndarray
    dweight: np.ndarray
    dbias: np.ndarray
    flagged: np.ndarray


def check_count(count):
    """Refuses a count per channel beyond the limit of section 2."""
    if not 0 <= count <= MAX_COUNT:
        raise ValueError(f"{count} elements per channel, expected at most 2^36")


def flagged_sum(flags, value):
    """A first sum's result with its flags applied: NaN, an infinity, or `value`."""
    if "nan" in flags or {"+inf", "-inf"} <= flags:
        return np.nan
    if "+inf" in flags:
        return np.inf
    return -np.inf if "-inf" in flags else value


def inverse_deviation(var, eps):
    """rstd = RN(1 / RN(sqrt(RN(var + eps)))), float64 of any shape (section 3)."""
    with np.errstate(all="ignore"):
        return 1.0 / np.sqrt(np.asarray(var, dtype=np.float64) + float(eps))


def moments(words, count, dtype, eps=1e-5):
    """Mean, variance and rstd, float64 [C], from merged words [C, k] and N (section 3)."""
    check_count(count)
    channels = len(words)
    if count == 0:
        return Moments(*(np.zeros(channels) for _ in range(3)))
    form = format_of(dtype)
    mean, var = np.empty(channels), np.empty(channels)
    for c, row in enumerate(words):
        first, second, word = integers_of(row, dtype)
        flags = flag_names(word)
        d, k = r53(first)
        mean[c] = flagged_sum(flags, scale(rn_ratio(d, count), k - form.unit1))
        spread = (count * second << (2 * form.unit1 - form.unit2)) - first * first
        d, k = r53(max(0, spread))
        var[c] = scale(rn_ratio(d, count) / count, k - 2 * form.unit1)
        if flags:
            var[c] = np.inf if flags == {"second"} else np.nan
    return Moments(mean, var, inverse_deviation(var, eps))


def gradients(words, count, dtype, mean, rstd):
    """G, dweight and dbias, float64 [C], from words [C, k] of u and u * x (section 6).

    `words` are the merged ones, or one rank's for its own share; N is the global count in both.
    """
    form = format_of(dtype)
    channels = len(words)
    a64, g, dweight, dbias = (np.zeros(channels) for _ in range(4))
    flagged = np.zeros(channels, dtype=bool)
    for c, row in enumerate(words if count else ()):
        first, second, word = integers_of(row, dtype)
        flags = flag_names(word)
        d, k = r53(first)
        a64[c] = scale(float(d), k - form.unit1)
        d, k = r53(second)
        b64 = scale(float(d), k - form.unit2)
        g[c] = fma_scalar(-float(mean[c]), float(a64[c]), b64)
        dweight[c] = np.nan if flags else float(rstd[c]) * float(g[c])
        dbias[c] = flagged_sum(flags, a64[c])
        flagged[c] = bool(flags)
    return Gradients(a64, g, dweight, dbias, flagged)


def update_running(
    running_mean, running_var, num_batches_tracked, fwd, momentum, buffer_dtype="float32"
):
    """New (running_mean, running_var, num_batches_tracked) after the batch `fwd` (section 5).

    momentum None is cumulative averaging. N = 0 changes nothing.
    """
    old_mean = round_to(running_mean, buffer_dtype)
    old_var = round_to(running_var, buffer_dtype)
    if fwd.count == 0:
        return old_mean, old_var, num_batches_tracked
    batches = num_batches_tracked + 1
    f = rn_ratio(1, batches) if momentum is None else float(momentum)
    n = fwd.count
    with np.errstate(all="ignore"):
        unbiased = fwd.var * rn_ratio(n, n - 1) if n > 1 else fwd.var

    def blend(old, new):
        pairs = zip(old.tolist(), new.tolist())
        return round_to([fma_scalar(f, v, (1.0 - f) * r) for r, v in pairs], buffer_dtype)

    return blend(old_mean, fwd.mean), blend(old_var, unbiased), batches
