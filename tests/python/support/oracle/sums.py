# SPDX-License-Identifier: Apache-2.0
"""Local sums, wire words and their merge (sections 1 and 2 of docs/numerics.md)."""

import numpy as np

from .exact import product_error, two_sum
from .formats import format_of, tensor_of

RADIX = 52
MAX_RANKS = 2048
MAX_COUNT = 2**36
SEGMENT = 512
LANES = 16
FLAG_NAN, FLAG_POSITIVE, FLAG_NEGATIVE, FLAG_SECOND = (1 << bit for bit in (0, 15, 30, 45))
COUNTER = 2**15 - 1

_CHUNK = 2**21  # elements, padding included, that are summed at a time
_LOW_BITS = 27
_LEAST_EXPONENT = -1080  # below every exponent that frexp gives


def lane_steps(planes):
    """(n, M) elements as (n, segments, steps, lanes): element e of a plane at lane e mod 16.

    Absent elements are +0, which no lane notices (section 1). A plane shorter than a segment is
    padded to whole steps only, one shorter than a step to a power of two: the lanes that are left
    out would be +0.
    """
    n, m = planes.shape
    lanes = min(LANES, 1 << (m - 1).bit_length())
    block = SEGMENT if m > SEGMENT else lanes
    padded = np.zeros((n, -(-m // block) * block))
    padded[:, :m] = planes
    if m > SEGMENT:
        return padded.reshape(n, -1, SEGMENT // LANES, LANES)
    return padded.reshape(n, 1, -1, lanes)


def partials(u, v, dtype):
    """Partials of planes u, v of shape (n, M): two lists of arrays (n, segments) (section 1).

    One array per list for types of at most 32 bits, (s, r) for float64; absent float64 partials
    (s or r not finite) are +0 in r.
    """
    us, vs = lane_steps(u), lane_steps(v)
    with np.errstate(all="ignore"):
        if dtype == "float64":
            return _pair_partials(us, None), _pair_partials(us, vs)
        first = np.zeros(us.shape[:2] + us.shape[3:])
        second = np.zeros_like(first)
        for step in range(us.shape[2]):
            x, y = us[:, :, step], vs[:, :, step]
            first = first + x
            second = second + x * y  # the product is exact, so this is the fma
        while (h := first.shape[-1] // 2) > 0:
            first = first[..., :h] + first[..., h:]
            second = second[..., :h] + second[..., h:]
    return [first[..., 0]], [second[..., 0]]


def _pair_partials(us, vs):
    """(s, r) of each segment for float64 (section 1); vs None means the first sum."""
    s = np.zeros(us.shape[:2] + us.shape[3:])
    r = np.zeros_like(s)
    for step in range(us.shape[2]):
        x = us[:, :, step]
        if vs is None:
            s, d = two_sum(s, x)
            r = r + d
        else:
            p, q = product_error(x, vs[:, :, step])
            s, d = two_sum(s, p)
            r = r + (q + d)
    while (h := s.shape[-1] // 2) > 0:
        s, d = two_sum(s[..., :h], s[..., h:])
        r = (r[..., :h] + r[..., h:]) + d
    s, r = s[..., 0], r[..., 0]
    return [s, np.where(np.isfinite(s) & np.isfinite(r), r, 0.0)]


class _ExactSum:
    """One exact integer per channel: significands summed per exponent in two int64 halves.

    A half is below 2^27, so 2^36 additions stay below 2^63.
    """

    def __init__(self, channels):
        self.width = 1024 - _LEAST_EXPONENT + 1
        self.high = np.zeros(channels * self.width, dtype=np.int64)
        self.low = np.zeros_like(self.high)
        self.channels = channels

    def add(self, values):
        """Adds the finite ones of values (n, C, segments)."""
        channel = np.broadcast_to(np.arange(self.channels)[None, :, None], values.shape)
        keep = np.isfinite(values) & (values != 0.0)
        significand, exponent = np.frexp(values[keep])
        whole = np.ldexp(significand, 53).astype(np.int64)  # value = whole * 2^(exponent - 53)
        slot = channel[keep] * self.width + (exponent - _LEAST_EXPONENT)
        np.add.at(self.high, slot, whole >> _LOW_BITS)
        np.add.at(self.low, slot, whole & (2**_LOW_BITS - 1))

    def integers(self, unit):
        """The sums in units of 2^-unit, as a list of Python ints."""
        result = []
        for c in range(self.channels):
            part = slice(c * self.width, (c + 1) * self.width)
            high, low = self.high[part], self.low[part]
            total = 0
            for slot in np.flatnonzero((high != 0) | (low != 0)).tolist():
                whole = (int(high[slot]) << _LOW_BITS) + int(low[slot])
                shift = slot + _LEAST_EXPONENT - 53 + unit
                if shift < 0:
                    assert whole % (1 << -shift) == 0, "a partial is no multiple of its unit"
                total += whole << shift if shift >= 0 else whole >> -shift
            result.append(total)
        return result


def words_of(first, second, flags, dtype):
    """Canonical words [k] of one channel: two Python ints in their units and the flags word."""
    form = format_of(dtype)
    words = []
    for value, count in ((first, form.digits1), (second, form.digits2)):
        for _ in range(count - 1):
            words.append(value & (2**RADIX - 1))
            value >>= RADIX
        if not -(2**63) <= value < 2**63:
            raise OverflowError("a sum does not fit its digits")
        words.append(value)
    return words + [flags]


def integers_of(words, dtype):
    """(first, second, flags) of one channel's words [k], as Python ints (section 2)."""
    form = format_of(dtype)
    digits = [int(w) for w in words]
    if len(digits) != form.words:
        raise ValueError(f"{len(digits)} words, expected {form.words} for {dtype}")
    first = sum(w << (RADIX * i) for i, w in enumerate(digits[: form.digits1]))
    second = sum(w << (RADIX * i) for i, w in enumerate(digits[form.digits1 : -1]))
    return first, second, digits[-1]


def flag_names(flags):
    """The set of raised flags of a (merged) flags word: nan, +inf, -inf, second."""
    names = ("nan", "+inf", "-inf", "second")
    return {name for i, name in enumerate(names) if flags >> (15 * i) & COUNTER}


def planes_of(tensor):
    """(N, C, *spatial) as (N, C, M), row-major in logical order (section 1)."""
    if tensor.ndim < 2:
        raise ValueError("expected at least two dimensions (N, C, ...)")
    m = int(np.prod(tensor.shape[2:], dtype=np.int64))
    return tensor.reshape(tensor.shape[0], tensor.shape[1], m)


def mask_of(mask, tensor):
    """A mask (N, *spatial), or None, as (N, 1, *spatial) booleans: True where elements count."""
    if mask is None:
        return None
    mask = np.asarray(mask, dtype=bool)
    if mask.shape != tensor.shape[:1] + tensor.shape[2:]:
        raise ValueError("a mask has the shape (N, spatial...)")
    return mask[:, None]


def count_of(tensor, mask=None):
    """Elements of a channel that count on this rank."""
    if mask is None:
        return tensor.shape[0] * int(np.prod(tensor.shape[2:], dtype=np.int64))
    return int(np.count_nonzero(mask_of(mask, tensor)))


def local_words(u, v, dtype, mask=None):
    """One rank's words, int64 [C, k], for samples u, v (N, C, *spatial) (sections 1 and 2).

    Forward: u = v = x. Backward: u = dy (after the activation's derivative), v = x. Local digits
    are canonical: all but a sum's top digit in [0, 2^52); the flags word has 0 or 1 per counter.
    """
    u, v = tensor_of(u, dtype, "u"), tensor_of(v, dtype, "v")
    if u.shape != v.shape:
        raise ValueError("u and v have different shapes")
    mask = mask_of(mask, u)
    if mask is not None:
        u, v = np.where(mask, u, 0.0), np.where(mask, v, 0.0)
    u, v = planes_of(u), planes_of(v)
    n, channels, m = u.shape
    form = format_of(dtype)
    sums = _ExactSum(channels), _ExactSum(channels)
    flags = [0] * channels
    samples = max(1, _CHUNK // max(1, channels * max(m, LANES)))
    for start in range(0, n if m and channels else 0, samples):
        part = slice(start, min(n, start + samples))
        shape = (part.stop - part.start, channels, -1)
        both = partials(u[part].reshape(-1, m), v[part].reshape(-1, m), dtype)
        first, second = ([p.reshape(shape) for p in arrays] for arrays in both)
        for total, arrays in zip(sums, (first, second)):
            for array in arrays:
                total.add(array)
        seen = (
            (FLAG_NAN, np.isnan(first[0])),
            (FLAG_POSITIVE, first[0] == np.inf),
            (FLAG_NEGATIVE, first[0] == -np.inf),
            (FLAG_SECOND, ~np.isfinite(second[0])),
        )
        for flag, where in seen:
            for c in np.flatnonzero(where.any(axis=(0, 2))).tolist():
                flags[c] |= flag
    integers = zip(sums[0].integers(form.unit1), sums[1].integers(form.unit2), flags)
    rows = [words_of(first, second, flag, dtype) for first, second, flag in integers]
    return np.array(rows, dtype=np.int64).reshape(channels, form.words)


def merge(words):
    """Merges a list of int64 [C, k], one per rank: an int64 SUM, then the carries (section 2).

    The number of words names the format. Flag counters add up and are not carried.
    """
    words = [np.asarray(w, dtype=np.int64) for w in words]
    if not 1 <= len(words) <= MAX_RANKS:
        raise ValueError(f"{len(words)} ranks, expected 1 to {MAX_RANKS}")
    if len({w.shape for w in words}) != 1 or words[0].ndim != 2:
        raise ValueError("ranks send different shapes")
    dtype = {6: "float16", 19: "float32", 83: "float64"}[words[0].shape[1]]
    total = sum(w.astype(object) for w in words)
    if any(not -(2**63) <= value < 2**63 for value in total.reshape(-1).tolist()):
        raise OverflowError("the int64 sum of a word overflows")
    rows = [words_of(*integers_of(row, dtype), dtype) for row in total]
    return np.array(rows, dtype=np.int64).reshape(words[0].shape)
