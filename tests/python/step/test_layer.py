# SPDX-License-Identifier: Apache-2.0
"""The module and the function on one rank, with and without a process group."""

import copy

import pytest
import torch
import torch.nn.functional as F

import syncbn
from rank import Checked, Rank
from syncbn.operators import ALONE, IN_PLACE, MESSAGE, OWN


def test_a_group_of_one_rank_exact(one_rank):
    torch.manual_seed(1)
    results = []
    base = torch.randn(5, 3, 4)
    for sync in (True, False):
        layer, x = syncbn.SyncBatchNorm(3, sync=sync), base.clone().requires_grad_()
        y = layer(x)
        y.pow(3).sum().backward()
        results.append((y, x.grad, layer.weight.grad, layer.bias.grad, *layer.buffers()))
    assert all(map(torch.equal, *results))


def test_evaluation_is_pytorchs_operator_exact():
    layer = syncbn.SyncBatchNorm(3).train()
    layer(torch.randn(4, 3, 6, 6))
    layer.eval()
    x = torch.randn(2, 3, 6, 6)
    expected = F.batch_norm(x, layer.running_mean, layer.running_var, layer.weight, layer.bias)
    assert torch.equal(layer(x), expected)


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
        rank.begin_backward(dy, share=True, way=OWN)
        rank.finish_backward(None)
