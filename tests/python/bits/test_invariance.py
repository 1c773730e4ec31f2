# SPDX-License-Identifier: Apache-2.0
"""The same bits for any sharding: ranks, splits, sample order, layouts, threads, vector codes.
Real processes are in test_distributed.py."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

import oracle
from played import check_played
from rank import Rank
from support import TORCH_DTYPES, assert_same_bits, available_levels, rough_samples, to_tensor
from syncbn.operators import HEADER_WORDS, ops

SHAPES = ((24, 17), (24, 3, 5, 5), (24, 17, 14, 14), (24, 2, 40, 30))


def data(shape, dtype):
    """Samples whose sums cancel over 60 binades, and, in the last channel, mean/std = 1e4."""
    rng = np.random.default_rng([*shape, len(dtype)])
    x = rough_samples(rng, shape, dtype)
    x[:, -1] = oracle.round_to(1e3 + 0.1 * rng.standard_normal(x[:, -1].shape), dtype)
    dy = rough_samples(rng, shape, dtype)
    weight = rng.standard_normal(shape[1]).astype(np.float32).astype(np.float64)
    return x, dy, weight


def channels_last(t):
    return t.movedim(1, -1).contiguous().movedim(-1, 1)


def random_shards(rng, samples, ranks):
    """An uneven split of shuffled samples; with 3 ranks or more, one of them is empty."""
    order = rng.permutation(samples)
    filled = ranks - 1 if ranks > 2 else ranks
    cuts = np.sort(rng.integers(0, samples + 1, filled - 1))
    shards = np.split(order, cuts)
    if filled < ranks:
        shards.insert(1, np.empty(0, dtype=np.int64))
    return shards


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("activation", ("none", "leaky_relu"))
def test_any_sharding_exact(shape, dtype, activation):
    x, dy, weight = data(shape, dtype)
    fused = {"weight": weight, "activation": activation, "slope": 0.1}
    kind = ("none", "relu", "leaky_relu").index(activation)
    whole = oracle.forward([x], dtype, **fused)
    gradients = oracle.backward([dy], [x], dtype, whole, **fused)
    tensors = (to_tensor(x, dtype), to_tensor(dy, dtype))
    weight = torch.from_numpy(weight).float()
    rng = np.random.default_rng(11)
    before, threads = ops.cpu_instruction_set(), torch.get_num_threads()
    try:
        for level, ranks, arrange in itertools.product(
            available_levels(), (1, 2, 3, 8), (torch.Tensor.contiguous, channels_last)
        ):
            ops.cpu_instruction_set(level)
            torch.set_num_threads(1 + ranks % 2)
            shards = random_shards(rng, shape[0], ranks)
            forward = replace(whole, words=[], ys=[whole.ys[0][s] for s in shards])
            dxs = [gradients.dxs[0][s] for s in shards]
            backward = replace(gradients, words=[], dxs=dxs, dweight_shares=[])
            played = [Rank(arrange(tensors[0][s]), weight, kind=kind, slope=0.1) for s in shards]
            dys = [arrange(tensors[1][s]) for s in shards]
            what = f"{level}, {ranks} ranks, {arrange.__name__}, "
            check_played(played, dys, forward, backward, (torch.float32,) * 2, what=what)
    finally:
        ops.cpu_instruction_set(before)
        torch.set_num_threads(threads)


@pytest.mark.parametrize("threads", (1, 2))
@pytest.mark.parametrize("channels_first", (True, False))
def test_large_tensors_are_dealt_to_threads_exact(threads, channels_first):
    """Large enough for every way of dealing work: by channel, by sample, by segment."""
    rng = np.random.default_rng(13)
    before = torch.get_num_threads()
    for shape in ((2, 3, 150, 130), (3, 65, 40, 40), (1, 40, 70, 60), (600, 80), (64, 96, 4, 4)):
        x = torch.from_numpy(rng.standard_normal(shape) + 3).float()
        x = x if channels_first else channels_last(x)
        forward = oracle.forward([x.double().numpy()], "float32")
        try:
            torch.set_num_threads(threads)
            rank = Rank(x)
            message = rank.begin()
            y = rank.finish(message)
        finally:
            torch.set_num_threads(before)
        np.testing.assert_array_equal(
            message[HEADER_WORDS:].reshape(shape[1], -1), forward.words[0]
        )
        assert_same_bits(rank.mean, forward.mean, "mean")
        assert_same_bits(y, forward.ys[0], "y")
