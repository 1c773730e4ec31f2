# SPDX-License-Identifier: Apache-2.0
"""Operators whose kernels exchange with those of other ranks, in processes of their own, have the
bits of one rank on the CPU."""

import itertools

import torch
from emulated import DTYPES, assert_equal, on_cpu, on_cuda, random, run_checks

from ranks import BLOCKS, Memory, on_ranks

CHANNELS = 7
RELU = (1, 0.0)


def parts(tensor, sizes):
    return [part.contiguous() for part in tensor.split(sizes)]


def buffers(cumulative):
    counters = (torch.tensor(3), torch.tensor([5]), torch.tensor([0]))
    momentum = None if cumulative else 0.25
    return torch.zeros(CHANNELS), torch.ones(CHANNELS), *counters, momentum


def forward(run, x, weight, bias, ranks, momentum_by_count, merge, rest):
    """A message, what normalize_and_update gives of it, and what that updates."""
    message = run("local_moments", x, 7, torch.tensor([5]), 1e-3, 0, None)
    updated = buffers(momentum_by_count)
    sums = merge(message)
    given = (x, message, sums, rest, weight, bias, None, 1e-3, ranks, *RELU, None, *updated)
    return [*run("normalize_and_update", *given), *updated[:-1]]


def gradients(run, dy, x, weight, bias, out, ranks, share, merge, rest):
    _, mean, _, rstd, info, bits = out[:6]
    through = (weight, bias, bits, *RELU)
    message, _ = run("local_gradients", dy, x, mean, rstd, info, *through, False, 0, None)
    given = (dy, x, merge(message), rest, mean, rstd, info, *through, torch.float32, x.dtype)
    results = run("input_gradient", *given, ranks, None, message if share else None)
    return [*results, message]


def check_bits_of_one_rank():
    """All ranks finalize in the exchange, or the first one sums messages beside the others."""
    sizes = [3, 0, 2]
    for (i, dtype), share, sums in itertools.product(enumerate(DTYPES), (0, 1), (0, 1)):
        x, dy = random((5, CHANNELS, 3, 4), i, dtype), random((5, CHANNELS, 3, 4), i + 9, dtype)
        weight, bias = random(CHANNELS, 7), random(CHANNELS, 8, dtype)
        xs, dys = parts(x, sizes), parts(dy, sizes)
        memory = Memory(len(sizes))

        def step(
            rank, xs=xs, dys=dys, weight=weight, bias=bias, share=share, sums=sums, memory=memory
        ):
            words = memory.words(rank)

            def merge(message):
                if not (sums and rank == 0):
                    return message
                merged = message.clone()
                on_cuda("exchange_sums", merged, CHANNELS, words)
                return merged

            rest = None if sums and rank == 0 else words
            on_cuda("load_peer_exchange", xs[rank], BLOCKS)
            common = (len(sizes), share, merge, rest)
            out = forward(on_cuda, xs[rank], weight, bias, *common)
            back = gradients(on_cuda, dys[rank], xs[rank], weight, bias, out, *common)
            return out, back, memory.mark[rank]

        alone = (1, share, lambda message: message, None)
        whole = forward(on_cpu, x, weight, bias, *alone)
        back = gradients(on_cpu, dy, x, weight, bias, whole, 1, False, *alone[2:])
        results = on_ranks(len(sizes), step)
        for rank, (out, own, mark) in enumerate(results):
            what = (dtype, share, sums, rank)
            assert_equal(out[:1], [parts(whole[0], sizes)[rank]], what)
            assert_equal([*out[1:5], *out[6:]], [*whole[1:5], *whole[6:]], what)
            assert_equal(own[:1], [parts(back[0], sizes)[rank]], what)
            expected = back[1:3]
            if share:
                dtypes = (torch.float32, dtype)
                expected = on_cpu(
                    "affine_gradient_shares", own[3], xs[rank], whole[1], whole[3], *dtypes
                )
            assert_equal(own[1:3], expected, what)
            assert not mark.any()


def check_a_rank_that_does_not_come():
    """NaN, untouched averages and a mark, on all that came; the next exchange waits no longer."""
    x, plain = random((3, CHANNELS, 4), 1), (random(CHANNELS, 7), None)
    memory = Memory(3, timeout=20_000_000)

    def step(rank):
        if rank == 1:
            return None
        given = (x, *plain, 3, False, lambda message: message, memory.words(rank))
        return forward(on_cuda, *given), forward(on_cuda, *given), memory.mark[rank]

    first, _, last = on_ranks(3, step)
    for results in (first, last):
        for out in results[:2]:
            assert all(t.isnan().all() for t in out[:4]) and out[4].tolist() == [-1, 0]
            assert_equal(out[6:9], buffers(False)[:3], "averages")
    gave_up = {int(first[2][0]), int(last[2][0])}
    assert gave_up <= {1, 3} and (first[2][2] == 1 or last[2][2] == 1), (first[2], last[2])


def check_errors():
    x, memory = random((3, CHANNELS, 4), 1), Memory(2)
    message = on_cuda("local_moments", x, 7, None, 1e-3, 0, None)
    good = memory.words(0)
    for words, text in (
        (good[:-1], "group: got 8 words, expected those of a group whose devices exchange"),
        (good.double(), "group: got 9 words"),
        (torch.cat([good[:2], good[:1], good[3:]]), "group.blocks: got 0, expected 1 to 8"),
    ):
        try:
            on_cuda("exchange_sums", message, CHANNELS, words)
        except RuntimeError as error:
            assert text in str(error), error
        else:
            raise AssertionError(text)


run_checks(globals())
