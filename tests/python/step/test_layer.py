# SPDX-License-Identifier: Apache-2.0
"""The module and the function on one rank, without a process group."""

import copy
import io
import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import syncbn
from rank import Checked, Rank
from support import assert_near_pytorch
from syncbn.operators import ALONE, IN_PLACE, MESSAGE, OWN

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ((16, 8), (4, 8, 9), (4, 8, 6, 7), (3, 8, 4, 3, 5)), ids=str)
def test_against_pytorch_in_float64(shape, dtype):
    torch.manual_seed(0)
    x = (torch.randn(shape) * 2 + 1).to(dtype)
    dy = torch.randn(shape).to(dtype)
    layer = syncbn.SyncBatchNorm(8, eps=1e-3, dtype=torch.float64)
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    x.requires_grad_()
    y = layer(x)
    y.backward(dy)
    got = y, x.grad, layer.weight.grad, layer.bias.grad
    assert_near_pytorch(got, x, dy, layer.weight, layer.bias, 1e-3)


@pytest.mark.parametrize("momentum", (0.1, 1.0, None))
def test_running_statistics_follow_pytorch(momentum):
    """float64 buffers: PyTorch's sums of n terms differ by at most n roundings."""
    ours = syncbn.SyncBatchNorm(5, momentum=momentum, dtype=torch.float64)
    plain = nn.BatchNorm1d(5, momentum=momentum, dtype=torch.float64)
    for seed in range(4):
        torch.manual_seed(seed)
        x = torch.randn(6, 5, 7, dtype=torch.float64) + 2
        ours(x)
        plain(x)
    bound = 4 * 8 * x.numel() / 5 * 2**-53
    for name in ("running_mean", "running_var"):
        assert ((getattr(ours, name) - getattr(plain, name)).abs() <= bound * 9).all()
    assert ours.num_batches_tracked == plain.num_batches_tracked == 4


OPTIONS = list(
    itertools.product((True, False), (True, False), (0.1, None), (True, False), (1e-3, 1e-5))
)


@pytest.mark.parametrize("affine, track, momentum, input_grad, eps", OPTIONS)
def test_every_option_runs_like_pytorch(affine, track, momentum, input_grad, eps):
    """The same results as nn.BatchNorm2d within float32 rounding of values of about 1: 1e-5 is 84
    roundings, more than both implementations make together."""
    torch.manual_seed(1)
    options = dict(eps=eps, momentum=momentum, affine=affine, track_running_stats=track)
    ours, plain = syncbn.SyncBatchNorm(4, **options), nn.BatchNorm2d(4, **options)
    x = torch.randn(3, 4, 5, 5)
    results = []
    for layer in (ours, plain):
        a = x.clone().requires_grad_(input_grad)
        y = layer(a)
        if y.requires_grad:
            (y * torch.arange(75.0).view(3, 1, 5, 5) / 75).sum().backward()
        layer.eval()
        results.append((y, layer(x), a.grad, *(p.grad for p in layer.parameters())))
    for got, expected in zip(*results, strict=True):
        assert (got is None) == (expected is None)
        if got is not None:
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-5)
    assert list(ours.state_dict()) == list(plain.state_dict())


def test_evaluation_is_pytorchs_operator_exact():
    layer = syncbn.SyncBatchNorm(3).train()
    layer(torch.randn(4, 3, 6, 6))
    layer.eval()
    x = torch.randn(2, 3, 6, 6)
    expected = F.batch_norm(x, layer.running_mean, layer.running_var, layer.weight, layer.bias)
    assert torch.equal(layer(x), expected)
    traced = torch.jit.trace(layer, x)
    assert any("batch_norm" in node.kind() for node in traced.inlined_graph.nodes())


@pytest.mark.parametrize("shape", ((3, 4), (3, 4, 5), (2, 4, 3, 3), (2, 4, 2, 3, 2)), ids=str)
def test_gradcheck_on_one_rank(shape):
    torch.manual_seed(2)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(4, dtype=torch.float64, requires_grad=True)

    def function(x, weight, bias):
        return syncbn.functional.sync_batch_norm(x, None, None, weight, bias, training=True)

    assert torch.autograd.gradcheck(function, (x, weight, bias))


@pytest.mark.parametrize("memory_format", (torch.contiguous_format, torch.channels_last))
def test_output_and_gradient_keep_the_layout(memory_format):
    x = torch.randn(2, 6, 5, 4).to(memory_format=memory_format).requires_grad_()
    y = syncbn.SyncBatchNorm(6)(x)
    y.sum().backward()  # an expanded gradient with strides of 0
    assert y.is_contiguous(memory_format=memory_format)
    assert x.grad.is_contiguous(memory_format=memory_format)


def test_one_value_per_channel_is_refused_and_changes_nothing():
    layer = syncbn.SyncBatchNorm(3)
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        layer(torch.randn(1, 3, 1, 1))
    assert all(torch.equal(before[k], v) for k, v in layer.state_dict().items())


@pytest.mark.parametrize("shape", ((0, 3, 4, 4), (2, 3, 0, 4), (0, 3)), ids=str)
def test_empty_batches_update_nothing(shape):
    layer = syncbn.SyncBatchNorm(3)
    before = copy.deepcopy(layer.state_dict())
    x = torch.empty(shape, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.shape == x.shape and x.grad.shape == x.shape
    assert not layer.weight.grad.any() and not layer.bias.grad.any()
    assert all(torch.equal(before[k], v) for k, v in layer.state_dict().items())


BAD_INPUTS = {
    "one axis": (lambda: torch.randn(3), "expected at least 2D"),
    "channels": (lambda: torch.randn(2, 5, 4), r"running_mean: got shape \(3,\), expected \(5,\)"),
    "integers": (
        lambda: torch.ones(2, 3, 4, dtype=torch.int64),
        "got torch.int64, expected float16",
    ),
    "complex": (lambda: torch.randn(2, 3, 4, dtype=torch.complex64), "got torch.complex64"),
    "another device": (lambda: torch.randn(2, 3, 4, device="meta"), "got a tensor on meta"),
}


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_bad_input_is_one_clear_error_and_changes_nothing(case):
    make, text = BAD_INPUTS[case]
    layer = syncbn.SyncBatchNorm(3)
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(ValueError, match=text):
        layer(make())
    assert all(torch.equal(before[k], v) for k, v in layer.state_dict().items())


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match="affine_grad: got 'mean'"):
        syncbn.SyncBatchNorm(3, affine_grad="mean")
    with pytest.raises(ValueError, match="eps: got -1"):
        syncbn.SyncBatchNorm(3, eps=-1)(torch.randn(4, 3))
    with pytest.raises(ValueError, match=r"momentum: got 1.5\d*, expected a number in \[0, 1\]"):
        syncbn.SyncBatchNorm(3, momentum=1.5)(torch.randn(4, 3))


def test_copies_and_pickles():
    layer = syncbn.SyncBatchNorm(3)
    layer(torch.randn(4, 3))
    saved = io.BytesIO()
    torch.save(layer, saved)
    saved.seek(0)
    for other in (
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        torch.load(saved, weights_only=False),
    ):
        x = torch.randn(4, 3)
        assert torch.equal(other(x), copy.deepcopy(layer)(x))


def _mean_after_a_step(layer, x, results):
    layer(x)
    results.put(layer.running_mean.tolist())


def test_averaged_copies_and_other_processes():
    """Exponential moving averages copy the model; a layer travels to a process that is started."""
    torch.manual_seed(0)
    model = syncbn.convert_sync_batchnorm(torch.nn.Sequential(torch.nn.BatchNorm1d(3)))
    average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    for _ in range(3):
        model(torch.randn(4, 3))
        average.update_parameters(model)
    assert average.module[0].num_batches_tracked > 0
    assert isinstance(average.module[0], syncbn.SyncBatchNorm)
    average(torch.randn(4, 3))

    x = torch.randn(4, 3)
    expected = copy.deepcopy(model[0])
    expected(x)
    context = torch.multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    process = context.Process(target=_mean_after_a_step, args=(model[0], x, results))
    process.start()
    assert results.get() == expected.running_mean.tolist()
    process.join()


def test_operators_pass_opcheck():
    weight, call, ops = torch.randn(5), torch.zeros(1, dtype=torch.int64), Checked()
    for layout in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(2, 5, 4, 3).to(memory_format=layout)
        dy = torch.randn_like(x)
        for way in (ALONE, MESSAGE, IN_PLACE):
            running = [torch.zeros(5), torch.ones(5), torch.tensor(0)]
            options = {"kind": 2, "slope": 0.1, "call": call, "running": running, "ops": ops}
            rank = Rank(x.clone(), weight, None, None if way == IN_PLACE else dy, **options)
            message = rank.begin(300, way)
            rank.finish(message)
            if way == IN_PLACE:
                ops.recover_input(x, rank.saved, weight, None, 0.1)
                continue
            for keep, share in ((True, False), (False, True)):
                sums = rank.begin_backward(dy, keep, share=share, way=way)
                if way != ALONE:
                    rank.finish_backward(sums)
        ops.update_running_statistics(*running, call, rank.saved, 0.1)
        ops.header(message, 1)
        ops.rejection(x, 20)
        ops.remaining_words(message, message[:40].clone(), 1, 5, 59)
        rank.begin_backward(dy, share=True, way=OWN)
        rank.finish_backward(None)


@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
def test_compiled_training_step_is_equal_exact(backend):
    def step(layer, x):
        y = layer(x)
        (y * y).sum().backward()
        return y

    eager, compiled = syncbn.SyncBatchNorm(4), syncbn.SyncBatchNorm(4)
    compiled_layer = torch.compile(compiled, backend=backend, fullgraph=True)
    for seed in range(2):
        torch.manual_seed(seed)
        a = torch.randn(3, 4, 5, 5, requires_grad=True)
        b = a.detach().clone().requires_grad_()
        assert torch.equal(step(eager, a), step(compiled_layer, b))
        assert torch.equal(a.grad, b.grad)
    for name, value in eager.named_buffers():
        assert torch.equal(value, dict(compiled.named_buffers())[name]), name
