# SPDX-License-Identifier: Apache-2.0
"""The module and the function on one rank, with and without a process group."""

import copy

import pytest
import torch
import torch.nn.functional as F

import syncbn
from rank import Checked, Rank
from support import assert_same_step, new_layer
from syncbn.operators import ALONE, FRAMED, MESSAGE, OWN
from syncbn.step.options import ACTIVATIONS


def test_a_group_of_one_rank_exact(one_rank):
    layers = (syncbn.SyncBatchNorm(3, sync=sync) for sync in (True, False))
    assert_same_step(*layers, torch.randn(5, 3, 4))


def test_pytorchs_apply_does_nothing_else_than_the_step_takes_over():
    """step/node.py calls what Function.apply calls where no transform of torch.func is active. If
    this fails, PyTorch's apply has learned something, which the step may have to do, too."""
    from torch.autograd import Function

    from syncbn.step import node

    assert node._apply.__self__ is node._BatchNormTraining
    known = {"_is_setup_context_defined", "setup_context", "forward", "RuntimeError"}
    known |= {"torch", "_C", "_are_functorch_transforms_active", "custom_function_call"}
    known |= {"_functorch", "utils", "unwrap_dead_wrappers", "super", "apply"}
    if vars(Function)["apply"] is not vars(torch._C._FunctionBase)["apply"]:  # not so in 2.15
        assert set(Function.apply.__func__.__code__.co_names) <= known
    plain = Function.setup_context
    assert node._BatchNormTraining.setup_context is plain  # else apply would bind defaults


@pytest.mark.parametrize("residual", (False, True))
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_evaluation_is_pytorchs_operators_exact(activation, residual):
    layer = new_layer(3, activation=activation, negative_slope=0.2)
    layer(torch.randn(4, 3, 6, 6))
    layer.eval()
    x, z = torch.randn(2, 2, 3, 6, 6)
    expected = F.batch_norm(x, layer.running_mean, layer.running_var, layer.weight, layer.bias)
    expected = expected + z if residual else expected
    if activation != "none":
        expected = F.relu(expected) if activation == "relu" else F.leaky_relu(expected, 0.2)
    assert torch.equal(layer(x, z) if residual else layer(x), expected)


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
    weight, counters, ops = torch.randn(5), torch.zeros(2, dtype=torch.int64), Checked()
    for layout in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(2, 5, 4, 3).to(memory_format=layout)
        dy = torch.randn_like(x)
        for way, in_place in ((ALONE, False), (MESSAGE, False), (FRAMED, False), (MESSAGE, True)):
            running = [torch.zeros(5), torch.ones(5), torch.tensor(0)]
            options = {"kind": 2, "slope": 0.1, "counters": counters, "running": running}
            residual = None if in_place else dy
            given = (x.clone(), weight, None, residual)
            rank = Rank(*given, **options, in_place=in_place, ops=ops)
            message = rank.begin(way)
            rank.finish(message)
            if in_place:
                ops.recover_input(x, rank.saved, weight, None, rank.form)
                continue
            for keep, share in ((True, False), (False, True)):
                sums = rank.begin_backward(dy, keep, share=share, way=way)
                if way != ALONE:
                    rank.finish_backward(sums)
        ops.update_running_statistics(*running, rank.saved, 0.1)
        ops.header(message, 1)
        rank.begin_backward(dy, share=True, way=OWN)
        rank.finish_backward(None)


@pytest.mark.parametrize("frozen", ["x", "residual", "parameters"])
def test_what_needs_no_gradient(frozen):
    torch.manual_seed(0)
    layer = syncbn.SyncBatchNorm(4, activation="relu")
    x, z, dy = (torch.randn(3, 4, 5) for _ in range(3))
    expected = {}
    for skip in (None, frozen):
        leaves = {"x": x.clone(), "residual": z.clone()}
        for name, leaf in leaves.items():
            leaf.requires_grad_(name != skip)
        layer.requires_grad_(skip != "parameters")
        layer.zero_grad()
        layer(leaves["x"], leaves["residual"]).backward(dy)
        got = {name: leaf.grad for name, leaf in leaves.items()}
        got |= {name: parameter.grad for name, parameter in layer.named_parameters()}
        if skip is None:
            expected = got
            continue
        for name, gradient in got.items():
            if name == skip or (skip == "parameters" and name in ("weight", "bias")):
                assert gradient is None
            else:
                assert torch.equal(gradient, expected[name])


# Two of them were equal in steps of 2^-40 modulo a prime, two but for the sign.
SLOPES = (0.01, 128.01, 0.0, -0.01, 0.0100076, 5e-324, 3e38)


def test_slopes_that_differ_give_different_calls():
    """All bits of the slope count, and so does every other option."""
    x = torch.ones(2, 3)

    def fingerprint(kind, slope, mode=0, residual=None):
        rank = Rank(x, residual=residual, kind=kind, slope=slope, statistics=mode, layer=5)
        return int(rank.begin()[1])

    numbers = [
        fingerprint(kind, slope, mode, residual)
        for kind, slopes in ((0, [0.01]), (1, [0.01]), (2, SLOPES))
        for slope in slopes
        for mode in (0, 1)
        for residual in (None, x)
    ]
    assert len(set(numbers)) == len(numbers)
    assert fingerprint(2, 0.0) == fingerprint(2, -0.0)


def test_numbers_are_those_of_the_core():
    assert [a.number for a in ACTIVATIONS.values()] == list(range(len(ACTIVATIONS)))
