# SPDX-License-Identifier: Apache-2.0
"""PyTorch's operators on CUDA, run on emulated kernels, have the bits of those on the CPU."""

import itertools

import package  # noqa: F401  it finds the two below
import torch
from emulated import DTYPES, assert_equal, on_cpu, on_cuda, random, run_checks

from rank import Rank
from syncbn.operators import OWN, info_of


def total(messages):
    return torch.stack(messages).sum(0)


def placed(messages):
    """The sum of messages with a place for the record of each rank."""
    return torch.cat([total([m[:8] for m in messages]), *(m[8:] for m in messages)])


def step(ops, xs, dys, weight, bias, residual, kind, mask, call):
    """All operators of a step of several ranks, on the first of them."""
    x, count, counters = xs[0], len(xs), call.clone()
    running = torch.zeros(x.shape[1]), torch.ones(x.shape[1]).double(), torch.tensor(3)
    options = {"eps": 1e-3, "kind": kind, "slope": 0.1, "layer": 7, "ops": ops}
    first = Rank(
        *(x, weight, bias, residual, mask),
        **{**options, "counters": counters, "running": running, "momentum": None},
    )
    ranks = [first]
    for t in xs[1:]:
        z = None if residual is None else torch.zeros_like(t)
        ranks.append(Rank(t, weight, bias, z, counters=call.clone(), **options))
    messages = [rank.begin(word=0x2001001) for rank in ranks]
    for rank in ranks:
        rank.finish(total(messages), count)
    results = [messages[0][:8], first.y, first.saved, first.bits]
    results += [t.clone() for t in (*running, counters)]
    keep = residual is not None and kind != 0
    for share, dtypes in (
        (False, (torch.float32, torch.float64)),
        (True, (torch.float64, x.dtype)),
        (False, (None, None)),
    ):
        sums = [
            rank.begin_backward(dy, keep and rank is first, dtypes, share)
            for rank, dy in zip(ranks, dys, strict=True)
        ]
        results += [sums[0][:8], first.u, *first.finish_backward(total(sums), count)]
    first.begin_backward(dys[0], keep, share=True, way=OWN)
    results += first.finish_backward(None)
    ops.update_running_statistics(*running, first.saved, 0.3)
    return [*results, *running]


def check_steps():
    call, channels = torch.tensor([5, 0]), 6
    shapes = ((3, channels, 4, 5), (7, channels), (0, channels, 3))
    for dtype, shape, kind in itertools.product(DTYPES, shapes, (0, 1, 2)):
        for with_residual, with_mask, ranks in ((0, 0, 1), (1, 0, 1), (0, 1, 2), (1, 1, 3)):
            xs = [random(shape, i, dtype) for i in range(ranks)]
            if len(shape) == 4:
                xs[0] = xs[0].to(memory_format=torch.channels_last)
            dys = [torch.empty_like(x).copy_(random(shape, 9, dtype)) for x in xs]
            z = torch.empty_like(xs[0]).copy_(random(shape, 5, dtype)) if with_residual else None
            mask = random((shape[0], *shape[2:]), 6) > -0.5 if with_mask else None
            weight, bias = random(channels, 7), random(channels, 8, dtype)
            arguments = (xs, dys, weight, bias, z, kind, mask, call)
            got, expected = step(on_cuda, *arguments), step(on_cpu, *arguments)
            if mask is not None:  # bits of elements that do not count are nobody's
                got[3] = expected[3]
            assert_equal(got, expected, (dtype, shape, kind, with_residual, with_mask, ranks))


def check_ranks_without_samples_of_another_dtype():
    """The merged message is in the group's format; this rank's own, in any, is of zeros."""
    tensors = random((4, 3, 5), 0), torch.empty(0, 3, 5, dtype=torch.float16)
    ranks = [Rank(t, eps=0.0, ops=on_cuda) for t in tensors]

    def merged(messages):
        words = messages[0].clone()
        words[:8] += messages[1][:8]
        return words

    sums = merged([rank.begin() for rank in ranks])
    for rank in ranks:
        rank.finish(sums, 2)
    assert_equal([ranks[1].saved], [ranks[0].saved], "saved")
    sums = merged([rank.begin_backward(t, share=True) for rank, t in zip(ranks, tensors)])
    dx, dweight, dbias = ranks[1].finish_backward(sums, 2)
    assert dx.shape == tensors[1].shape and not dweight.any() and not dbias.any()


def check_disagreement_gives_nan():
    """And a count of -1, which leaves running statistics alone; the gradient is NaN too."""
    x, running, call = random((4, 3, 5), 0), [torch.zeros(3), torch.ones(3)], torch.tensor([0, 0])
    tracked = torch.tensor(0)
    rank = Rank(x, layer=1, counters=call, running=(*running, tracked), momentum=0.1, ops=on_cuda)
    y = rank.finish(rank.begin() + Rank(x, layer=2, counters=call, ops=on_cuda).begin(), 2)
    assert all(t.isnan().all() for t in (y, rank.mean, rank.var, rank.rstd))
    assert info_of(rank.saved).tolist() == [-1, 0]
    assert not running[0].any() and running[1].eq(1).all() and tracked == 0 and call[0] == 1
    sums = rank.begin_backward(x, dtypes=(torch.float32, None), share=True)
    dx, dweight, _ = rank.finish_backward(2 * sums, 2)
    assert dx.isnan().all() and dweight.isnan().all()


def check_welford():
    """The mean and variance of all ranks' elements: n values take at most three roundings each to
    float32 (float64), of at most the largest value, or its square."""
    for dtype, count in itertools.product(DTYPES, (1, 3)):
        xs = [random((2 + i, 4, 3, 5), i, dtype) for i in range(count)]
        options = {"eps": 1e-3, "statistics": 1, "layer": 7, "counters": torch.tensor([3, 0])}
        own = Rank(xs[0], **options).begin(word=5)
        ranks = [Rank(x, **options, ops=on_cuda) for x in xs]
        messages = [rank.begin(word=5) for rank in ranks]
        assert_equal([messages[0][:9]], [own[:9]], dtype)
        first = ranks[0]
        first.finish(placed(messages), count)
        whole = torch.cat(xs).double()
        elements, size = whole.numel() // 4, whole.abs().max()
        bound = 3 * elements * (2**-53 if dtype == torch.float64 else 2**-24)
        assert (first.mean - whole.mean((0, 2, 3))).abs().max() <= bound * size
        var = whole.var((0, 2, 3), unbiased=False)
        assert (first.var - var).abs().max() <= 4 * bound * size**2
        assert info_of(first.saved).tolist() == [elements, messages[0][1]]
        torch.testing.assert_close(first.rstd, (first.var + 1e-3).rsqrt(), rtol=2**-50, atol=0)


def check_in_place():
    """The output in x's memory, the statistics, and the input and signs that backward recovers. On
    the way in the message is that of x, which the kernels must have read before they write."""
    channels = 6
    for dtype, shape in itertools.product(DTYPES, ((3, channels, 4, 5), (7, channels), (0, 6, 3))):
        for weight, bias in ((random(channels, 7), random(channels, 8, dtype)), (None, None)):
            x = random(shape, 1, dtype)
            if len(shape) == 4 and weight is not None:
                x = x.to(memory_format=torch.channels_last)
            results = []
            for ops in (on_cuda, on_cpu):
                options = {"eps": 1e-3, "kind": 2, "slope": 0.25, "in_place": True, "ops": ops}
                rank = Rank(x.clone(), weight, bias, **options)
                y = rank.finish(rank.begin())
                assert y is rank.x
                recovered = ops.recover_input(y, rank.saved, weight, bias, rank.form)
                results.append((y, rank.saved, *recovered))
            assert_equal(*results, (dtype, shape, weight is None))


def check_given_statistics():
    """Normalization by estimates, and its gradient."""
    shapes = ((3, 6, 4, 5), (7, 6), (0, 6, 3))
    for dtype, shape, of_estimates in itertools.product(DTYPES, shapes, DTYPES):
        x, dy = random(shape, 1, dtype), random(shape, 2, dtype)
        mean, var = random(6, 3, of_estimates), random(6, 4, of_estimates).abs()
        for weight, bias in ((random(6, 7), random(6, 8, dtype)), (None, None)):
            results = []
            for ops in (on_cuda, on_cpu):
                y, saved = ops.evaluate(x, mean, var, weight, bias, eps=1e-3)
                info_of(saved).zero_()
                dx, form = torch.empty_like(x), Rank(x, ops=ops).form
                given = (dy, x, saved, weight, None, None, None, form, False)
                ops.backward_finish(*given, (dx, None, None, None), (None,) * 3, 1)
                results.append((y, saved[:6], saved[12:18], dx))
            assert_equal(*results, (dtype, shape, of_estimates))


def check_refused_welford_call_gives_nan():
    """Of a message of zeros but for the word that tells of a refusal, as another rank sends it."""
    for dtype in DTYPES:
        rank = Rank(random((4, 3, 5), 0, dtype), statistics=1, ops=on_cuda)
        message = rank.begin()
        refusal = torch.zeros_like(message)
        refusal[3] = 1
        y = rank.finish(placed([message, refusal]), 2)
        assert all(t.isnan().all() for t in (y, rank.mean, rank.var, rank.rstd))
        assert info_of(rank.saved).tolist() == [-1, 0]


def refused(text, function, *arguments, **options):
    try:
        function(*arguments, **options)
    except Exception as error:
        assert text in str(error), error
        return
    raise AssertionError(f"expected {text}")


def check_errors():
    x, mean = random((4, 3, 5), 0), torch.zeros(3, dtype=torch.float64)
    rank = Rank(x, ops=on_cuda)
    message = rank.begin()
    refused("rest: got 65 words, expected none", rank.finish, message, 1, message)
    refused("merged: got 64 words", rank.finish, message[:-1])
    refused("weight: got", Rank(x, x[0, 0], ops=on_cuda).begin)
    refused("eps: got", Rank(x, eps=-1.0, ops=on_cuda).begin)
    refused("bias: got", Rank(x, None, x[0, 0], in_place=True, ops=on_cuda).begin)
    refused("mean: got 2 entries", on_cuda.evaluate, x, mean[:2], mean, None, None, eps=0.0)


run_checks(globals())
