# SPDX-License-Identifier: Apache-2.0
"""The package's Python over the operators on CUDA, run on emulated kernels: the bits of the CPU.

torch.nn.SyncBatchNorm has no such pair of devices: it refuses the CPU.
"""

import contextlib
import itertools
from unittest import mock

import torch
from emulated import DTYPES, assert_equal, random, run_checks
from package import emulated, syncbn

from syncbn.exchange import transport
from syncbn.operators import MESSAGE
from syncbn.ops import batch_norm


def train(layer, x, dy, residual, mask):
    """Everything that two steps leave."""
    results = []
    for _ in range(2):
        a, z = (None if t is None else t.detach().requires_grad_() for t in (x, residual))
        memory = a * 1 if layer.inplace else a
        y = layer(memory, z, mask=mask)
        assert not layer.inplace or y.data_ptr() == memory.data_ptr()
        y.backward(dy)
        results += [y.detach(), a.grad, None if z is None else z.grad]
    gradients = [p.grad for p in layer.parameters()]
    return [*results, *gradients, *layer.buffers(), layer.state.call, layer.state.count]


def check_layers():
    leaky = {"activation": "leaky_relu", "negative_slope": 0.25}
    shapes = ((3, 6, 4, 5), (7, 6), (0, 6, 3))
    for dtype, shape in itertools.product(DTYPES, shapes):
        for options, with_residual, with_mask in (
            ({}, False, False),
            ({**leaky, "inplace": True}, False, False),
            ({"activation": "relu", "affine_grad": "global", "momentum": None}, True, True),
        ):
            x, dy = random(shape, 1, dtype), random(shape, 2, dtype)
            residual = random(shape, 3, dtype) if with_residual else None
            mask = random((shape[0], *shape[2:]), 6) > -0.5 if with_mask else None
            results = []
            for on_which in (emulated, contextlib.nullcontext):
                layer = syncbn.SyncBatchNorm(6, **options)
                with torch.no_grad():  # away from 0, from where no input is recovered
                    layer.weight.copy_(1 + random(6, 7).abs())
                    layer.bias.copy_(random(6, 8))
                with on_which():
                    results.append(train(layer, x, dy, residual, mask))
            assert_equal(*results, (dtype, shape, options))


def run_operator(x, dy, variables, wanted, **options):
    """batch_norm's outputs, then the gradients of x, scale and bias where wanted."""
    mean, var, scale, bias, batches = variables
    inputs = [
        None if t is None else t.detach().requires_grad_(want)
        for t, want in zip((x, scale, bias), wanted, strict=True)
    ]
    outputs = batch_norm(inputs[0], mean, var, *inputs[1:], batches, **options)
    if outputs[0].requires_grad:
        outputs[0].backward(dy)
    return [t.detach() for t in outputs] + [None if t is None else t.grad for t in inputs]


def assert_operator(x, dy, variables, wanted=(True, True, True), **options):
    before = [None if t is None else t.clone() for t in variables]
    expected = run_operator(x, dy, variables, wanted, **options)
    with emulated():
        got = run_operator(x, dy, variables, wanted, **options)
    assert_equal(got, expected, (x.dtype, x.shape, wanted, options))
    for variable, kept in zip(variables, before, strict=True):
        assert variable is None or torch.equal(variable, kept)


def check_batch_norm():
    """Against the operator on the CPU: outputs, variables and gradients, in training by the batch
    and by the estimates, and in inference; first and later batches."""
    shapes = ((3, 6, 4, 5), (7, 6), (0, 6, 3))
    modes = ({}, {"use_global_est": True}, {"is_infer": True})
    for (i, dtype), shape, mode in itertools.product(enumerate(DTYPES), shapes, modes):
        x, dy = random(shape, 1, dtype), random(shape, 2, dtype)
        if len(shape) == 4:
            x = x.to(memory_format=torch.channels_last)
        for batches, momentum in ((0, 0.9), (3, 0.9), (3, 0.3)):
            estimates = random(6, 3, DTYPES[i - 1]), random(6, 4, DTYPES[i - 2]).abs()
            affine = (random(6, 7), random(6, 8, dtype)) if batches else (None, None)
            variables = (*estimates, *affine, torch.tensor([batches]))
            assert_operator(x, dy, variables, epsilon=1e-3, momentum=momentum, **mode)
    x, dy = random((4, 6, 5), 1), random((4, 6, 5), 2)
    # A counter without axes, estimates with gaps.
    estimates = random((6, 2), 3)[:, 0], random((6, 2), 4).abs()[:, 1]
    variables = (*estimates, random(6, 7), random(6, 8), torch.tensor(1))
    for wanted in itertools.product((True, False), repeat=3):
        for mode in modes:
            assert_operator(x, dy, variables, wanted, **mode)


def check_batch_norm_of_ranks_that_disagree():
    """NaN, also where the estimates normalize, which stay as they are, like the counter."""
    x = random((4, 6, 5), 1).requires_grad_()
    variables = (random(6, 3), random(6, 4).abs(), None, None, torch.tensor([2]))

    def exchange(_, turn, message, *__):
        merged = message.clone()
        merged[1] += 1  # the sum of fingerprints
        return merged, None

    for mode in ({}, {"use_global_est": True}):
        parts = mock.patch.multiple(transport.Alone, way=MESSAGE, exchange=exchange)
        with emulated(), parts:
            out = batch_norm(x, *variables, **mode)
            (dx,) = torch.autograd.grad(out.y.sum(), x)
        assert out.y.isnan().all() and out.batch_mean.isnan().all() and out.batch_var.isnan().all()
        assert dx.isnan().all()
        assert_equal(out[3:], (*variables[:2], variables[4]), mode)


run_checks(globals())
