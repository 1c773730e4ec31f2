# SPDX-License-Identifier: Apache-2.0
"""PyTorch's operators on CUDA, run on emulated kernels, have the bits of those on the CPU."""

import itertools

import torch
from emulated import DTYPES, assert_equal, on_cpu, on_cuda, random, run_checks


def total(messages):
    return torch.stack(messages).sum(0)


def step(run, xs, dys, weight, bias, residuals, kind, mask, call):
    """All operators of a step of several ranks, on the first of them."""
    ranks, x, dy, z = len(xs), xs[0], dys[0], residuals[0]
    masks = [mask] + [None] * (ranks - 1)
    messages = [
        run("local_moments", t, 7, call, 1e-3, 0, m, 0x2001001)
        for t, m in zip(xs, masks, strict=True)
    ]
    out = run(
        "normalize",
        x,
        messages[0],
        total(messages),
        None,
        weight,
        bias,
        z,
        1e-3,
        ranks,
        kind,
        0.1,
        mask,
    )
    y, mean, var, rstd, info, bits = out
    through = (weight, bias, bits, kind, 0.1)
    keep = z is not None and kind != 0
    gradients, us = zip(
        *(
            run(
                "local_gradients",
                d,
                t,
                mean,
                rstd,
                info,
                *(through if i == 0 else (None, None, None, 0, 0.0)),
                keep and i == 0,
                0,
                m,
            )
            for i, (d, t, m) in enumerate(zip(dys, xs, masks, strict=True))
        )
    )
    shares = run("affine_gradient_shares", gradients[0], x, mean, rstd, torch.float64, x.dtype)
    merged = total(gradients)
    arguments = (
        dy,
        x,
        merged,
        None,
        mean,
        rstd,
        info,
        *through,
        torch.float32,
        torch.float64,
        ranks,
    )
    whole = run("input_gradient", *arguments, mask, None)
    own = run("input_gradient", *arguments, mask, gradients[0])
    unwanted = run("input_gradient", *arguments[:-3], None, None, ranks, mask, None)
    buffers = []
    for momentum in (0.3, None):
        running = torch.zeros(x.shape[1]), torch.ones(x.shape[1], dtype=torch.float64)
        tracked, counter = torch.tensor(3), call.clone()
        run("update_running_statistics", *running, tracked, counter, mean, var, info, momentum)
        buffers += [*running, tracked, counter]
    return [
        messages[0][:8],
        *out,
        gradients[0][:8],
        us[0],
        *shares,
        *whole,
        *own,
        *unwanted,
        *buffers,
    ]


def check_steps():
    call, channels = torch.tensor([5]), 6
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
            arguments = (xs, dys, weight, bias, [z], kind, mask, call)
            got, expected = step(on_cuda, *arguments), step(on_cpu, *arguments)
            if mask is not None:  # bits of elements that do not count are nobody's
                got[6] = expected[6]
            assert_equal(got, expected, (dtype, shape, kind, with_residual, with_mask, ranks))


def check_ranks_without_samples_of_another_dtype():
    """The merged message is in the group's format; this rank's own, in any, is of zeros."""
    x, empty = random((4, 3, 5), 0), torch.empty(0, 3, 5, dtype=torch.float16)
    message = on_cuda("local_moments", x, 1, None, 0.0, 0, None)
    merged = message.clone()
    merged[:8] += on_cuda("local_moments", empty, 1, None, 0.0, 0, None)[:8]
    nothing = (None, None, None, 0.0, 2, 0, 0.0, None)
    got = on_cuda("normalize", empty, message, merged, None, *nothing)[1:5]
    expected = on_cpu("normalize", x, message, merged, None, *nothing)[1:5]
    assert_equal(got, expected, "statistics")
    mean, _, rstd, info = got
    plain = (None, None, None, 0, 0.0)
    gradients = [
        on_cuda("local_gradients", t, t, mean, rstd, info, *plain, False, 0, None)[0]
        for t in (x, empty)
    ]
    merged = gradients[0].clone()
    merged[:8] += gradients[1][:8]
    dx, dweight, dbias = on_cuda(
        "input_gradient",
        empty,
        empty,
        merged,
        None,
        mean,
        rstd,
        info,
        *plain,
        torch.float32,
        torch.float32,
        2,
        None,
        gradients[1],
    )
    assert dx.shape == empty.shape and not dweight.any() and not dbias.any()


def check_disagreement_gives_nan():
    """And a count of -1, which leaves running statistics alone; the gradient is NaN too."""
    x = random((4, 3, 5), 0)
    messages = [on_cuda("local_moments", x, layer, None, 0.0, 0, None) for layer in (1, 2)]
    out = on_cuda(
        "normalize", x, messages[0], total(messages), None, *(None,) * 3, 0.0, 2, 0, 0.0, None
    )
    y, mean, var, rstd, info, _ = out
    assert all(t.isnan().all() for t in (y, mean, var, rstd)) and info.tolist() == [-1, 0]
    running, tracked, call = torch.zeros(3), torch.tensor(0), torch.tensor([0])
    on_cuda("update_running_statistics", running, None, tracked, call, mean, var, info, 0.1)
    assert not running.any() and tracked == 0 and call == 1
    plain = (None, None, None, 0, 0.0)
    gradients, _ = on_cuda("local_gradients", x, x, mean, rstd, info, *plain, False, 0, None)
    dx, dweight, _ = on_cuda(
        "input_gradient",
        x,
        x,
        2 * gradients,
        None,
        mean,
        rstd,
        info,
        *plain,
        torch.float32,
        None,
        2,
        None,
        gradients,
    )
    assert dx.isnan().all() and dweight.isnan().all()


def check_welford():
    """The mean and variance of all ranks' elements: n values take at most three roundings each to
    float32 (float64), of at most the largest value, or its square."""
    for dtype, ranks in itertools.product(DTYPES, (1, 3)):
        xs = [random((2 + i, 4, 3, 5), i, dtype) for i in range(ranks)]
        call = torch.tensor([3])
        messages = [on_cuda("local_welford", x, 7, call, 1e-3, None, 5) for x in xs]
        out = on_cuda(
            "normalize_gathered",
            xs[0],
            messages[0],
            messages[0],
            torch.cat(messages),
            None,
            None,
            None,
            1e-3,
            ranks,
            0,
            0.0,
            None,
        )
        own = on_cpu("local_welford", xs[0], 7, call, 1e-3, None, 5)
        assert_equal([messages[0][:9]], [own[:9]], dtype)
        y, mean, var, rstd, info, _ = out
        whole = torch.cat(xs).double()
        count, size = whole.numel() // 4, whole.abs().max()
        bound = 3 * count * (2**-53 if dtype == torch.float64 else 2**-24)
        assert (mean - whole.mean((0, 2, 3))).abs().max() <= bound * size
        assert (var - whole.var((0, 2, 3), unbiased=False)).abs().max() <= 4 * bound * size**2
        assert info[0] == count and info[1] == messages[0][1]
        torch.testing.assert_close(rstd, (var + 1e-3).rsqrt(), rtol=2**-50, atol=0)


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
            for run in (on_cuda, on_cpu):
                y = x.clone()
                message = run("local_moments", y, 7, None, 1e-3, 0, None)
                statistics = run(
                    "normalize_in_place", y, message, message, None, weight, bias, 1e-3, 1, 0.25
                )
                mean, _, rstd, _ = statistics
                recovered = run("recover_input", y, mean, rstd, weight, bias, 0.25)
                results.append((y, *statistics, *recovered))
            assert_equal(*results, (dtype, shape, weight is None))


def check_given_statistics():
    """Normalization by estimates, and its gradient, against batch_norm on the CPU in inference."""
    shapes = ((3, 6, 4, 5), (7, 6), (0, 6, 3))
    for dtype, shape, of_estimates in itertools.product(DTYPES, shapes, DTYPES):
        x, dy = random(shape, 1, dtype), random(shape, 2, dtype)
        mean, var = random(6, 3, of_estimates), random(6, 4, of_estimates).abs()
        for weight, bias in ((random(6, 7), random(6, 8, dtype)), (None, None)):
            batches = torch.tensor([2])
            expected = on_cpu("batch_norm", x, mean, var, weight, bias, batches, True, False, 1e-3)
            *_, mean_rstd, info = expected
            got = on_cuda("evaluate", x, mean, var, weight, bias, 1e-3)
            what = (dtype, shape, of_estimates)
            assert_equal((got[0], torch.cat(got[1:])), (expected[0], mean_rstd), what)
            expected = on_cpu(
                "batch_norm_backward", dy, x, weight, mean_rstd, info, True, True, None, None
            )
            dx = on_cuda("evaluation_input_gradient", dy, got[2], weight)
            assert_equal((dx,), expected[:1], what)


def check_refused_welford_call_gives_nan():
    """Of a message of zeros but for the word that tells of a refusal, as another rank sends it."""
    for dtype in DTYPES:
        x = random((4, 3, 5), 0, dtype)
        message = on_cuda("local_welford", x, 1, None, 0.0, None)
        refusal = torch.zeros_like(message)
        refusal[3] = 1
        records, options = torch.cat([message, refusal]), (None, None, None, 0.0, 2, 0, 0.0, None)
        out = on_cuda("normalize_gathered", x, message, message, records, *options)
        y, mean, var, rstd, info, _ = out
        assert all(t.isnan().all() for t in (y, mean, var, rstd)) and info.tolist() == [-1, 0]


def refused(text, name, *arguments):
    try:
        on_cuda(name, *arguments)
    except Exception as error:
        assert text in str(error), error
        return
    raise AssertionError(f"{name} took it")


def check_errors():
    x = random((4, 3, 5), 0)
    message = on_cuda("local_moments", x, 1, None, 0.0, 0, None)
    refused("frame: got 9732 words", "local_moments", x, 1, None, 0.0, 9732, None)
    options = (None, None, None, 0.0, 1, 0, 0.0, None)
    refused(
        "rest: got 65 words, expected none", "normalize", x, message, message, message, *options
    )
    refused("merged: got 64 words", "normalize", x, message, message[:-1], None, *options)
    refused("weight: got", "normalize", x, message, message, None, x[0, 0], *options[1:])
    refused("eps: got", "local_moments", x, 1, None, -1.0, 0, None)
    mean = torch.zeros(3, dtype=torch.float64)
    refused("mean: got 2 entries", "evaluate", x, mean[:2], mean, None, None, 0.0)
    arguments = (x, message, message, None, None, x[0, 0], 0.0, 1, 0.5)
    refused("bias: got", "normalize_in_place", *arguments)


run_checks(globals())
