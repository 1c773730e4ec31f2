# SPDX-License-Identifier: Apache-2.0
"""A training step of ranks that are played by adding their messages, which is what the exchange
does; every bit of it against the oracle."""

import numpy as np
import torch

from support import assert_same_bits
from syncbn.operators import HEADER_WORDS


def expect(got, expected, what):
    for rank, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert_same_bits(a, b, f"{what} of rank {rank}")


def _same_words(messages, words, what):
    for message, own in zip(messages, words, strict=True):
        np.testing.assert_array_equal(message[HEADER_WORDS:].reshape(own.shape), own, what)
    return torch.stack(messages).sum(0)


def check_played(ranks, dys, forward, backward, dtypes, keep=False, what=""):
    """ranks: Rank of each; dtypes: of the gradients of weight and bias; keep: the residual's
    gradient is wanted."""
    count = len(ranks)
    merged = _same_words([rank.begin() for rank in ranks], forward.words, f"{what}words")
    expect([rank.finish(merged, count) for rank in ranks], forward.ys, f"{what}y")
    for name in ("mean", "var", "rstd"):
        expect([getattr(r, name) for r in ranks], [getattr(forward, name)] * count, what + name)
    for share in (False, True):
        sums = [r.begin_backward(dy, keep, dtypes, share) for r, dy in zip(ranks, dys)]
        if keep:
            expect([r.u for r in ranks], backward.dresiduals, f"{what}the residual's gradient")
        merged = _same_words(sums, backward.words, f"{what}words of gradients")
        dxs, dweights, dbiases = zip(*(rank.finish_backward(merged, count) for rank in ranks))
        expect(dxs, backward.dxs, f"{what}dx")
        if not share:
            expect(dweights, [backward.dweight] * count, f"{what}dweight")
            expect(dbiases, [backward.dbias] * count, f"{what}dbias")
        elif forward.count:  # without elements rstd, too, is 0
            expect(dweights, backward.dweight_shares, f"{what}dweight's share")
            expect(dbiases, backward.dbias_shares, f"{what}dbias's share")
