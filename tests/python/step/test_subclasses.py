# SPDX-License-Identifier: Apache-2.0
"""Tensors of other classes in training: the class, the data and the gradients are those that
nn.BatchNorm2d gives, the bits those of plain tensors, and what comes out can be written to."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import syncbn
from subclasses import CLASSES, Named, named

X = torch.linspace(-2, 3, 4 * 3 * 5 * 5).sin().view(4, 3, 5, 5)
Z, DY, MASK = X.cos(), X.flip(0), X[:, 0] > 0
VIEWS = ("named", "bare", "lost")  # those without a __torch_dispatch__

LATER = {
    "relu_": lambda y: y.relu_(),
    "+= 1": lambda y: y.__iadd__(1),
    "[:, 0] = 0": lambda y: (y.__setitem__((slice(None), 0), 0), y)[1],
    "mul": lambda y: y * 2,
}
OPTIONS = {
    "usual": {},
    "welford": {"statistics": "welford"},
    "relu": {"activation": "relu"},
    "cumulative": {"momentum": None},
    "global": {"affine_grad": "global"},
    "bare": {"affine": False, "track_running_stats": False},
}
CALLS = {
    "direct": lambda run, *given: run(*given),
    "checkpoint": lambda run, *given: checkpoint(run, *given, use_reentrant=False),
    "reentrant": lambda run, *given: checkpoint(run, *given, use_reentrant=True),
}
PLACES = ("input", "residual", "mask", "weight", "bias", "running_mean", "running_var")


def run(layer, make, place="input", call="direct", later="mul", residual=False, mask=False):
    """What is of the class: one argument, parameter or buffer."""
    given = {
        "input": X.clone().requires_grad_(),
        "residual": Z.clone().requires_grad_() if residual or place == "residual" else None,
        "mask": MASK.clone() if mask or place == "mask" else None,
    }
    if place in given:
        given[place] = make(given[place].detach())
        given[place].requires_grad_(place != "mask")
    elif place in layer._parameters:
        layer._parameters[place] = make(layer._parameters[place].detach())
        layer._parameters[place].requires_grad_()
    else:
        layer._buffers[place] = make(layer._buffers[place])
    arguments = list(given.values())
    while arguments[-1] is None:
        arguments.pop()
    y = CALLS[call](lambda *given: LATER[later](layer(*given)), *arguments)
    y.backward(DY.clone())
    gradients = [None if t is None else t.grad for t in (*given.values(), *layer.parameters())]
    return y, gradients, list(layer.buffers())


def bits(results):
    y, *rest = results
    flat = [y, *(t for part in rest for t in part)]
    return [None if t is None else getattr(t, "held", t.detach()) for t in flat]


def assert_equal_bits(a, b):
    for t, other in zip(bits(a), bits(b), strict=True):
        if t is None or other is None:
            assert t is other
        else:
            assert torch.equal(t.as_subclass(torch.Tensor), other.as_subclass(torch.Tensor))


def assert_as_plain(got, plain):
    """Classes, and what a class keeps with its tensor."""
    (y, gradients, buffers), (other, others, kept) = got, plain
    assert type(y) is type(other)
    assert getattr(y, "origin", None) == getattr(other, "origin", None)
    assert [type(t) for t in gradients] == [type(t) for t in others]
    assert [type(t) for t in buffers] == [type(t) for t in kept]


def same(x):
    return x


@pytest.mark.parametrize("later, call", zip(LATER, (*CALLS, "direct"), strict=True))
@pytest.mark.parametrize("name", VIEWS)
def test_input(name, later, call):
    for option in OPTIONS.values():
        got = run(syncbn.SyncBatchNorm(3, **option), CLASSES[name], "input", call, later)
        own = run(syncbn.SyncBatchNorm(3, **option), same, "input", call, later)
        assert_equal_bits(got, own)
        plain = {k: v for k, v in option.items() if k in ("affine", "track_running_stats")}
        assert_as_plain(got, run(nn.BatchNorm2d(3, **plain), CLASSES[name], "input", call, later))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", VIEWS)
def test_other_arguments_alone(name, place):
    for call in ("direct", "checkpoint"):
        got = run(syncbn.SyncBatchNorm(3), CLASSES[name], place, call, "+= 1", True, True)
        own = run(syncbn.SyncBatchNorm(3), same, place, call, "+= 1", True, True)
        assert_equal_bits(got, own)
    if place not in ("residual", "mask"):
        got = run(syncbn.SyncBatchNorm(3), CLASSES[name], place)
        assert_as_plain(got, run(nn.BatchNorm2d(3), CLASSES[name], place))


@pytest.mark.parametrize("place", PLACES)
def test_a_wrapper_computes_with_what_it_holds(place):
    got = run(syncbn.SyncBatchNorm(3), CLASSES["wrapper"], place)
    own = run(syncbn.SyncBatchNorm(3), same, place)
    assert_equal_bits(got, own)
    if place not in ("residual", "mask"):
        assert_as_plain(got, run(nn.BatchNorm2d(3), CLASSES["wrapper"], place))


def test_a_list_of_inputs():
    def outputs(make, other, weight=same):
        layer = syncbn.SyncBatchNorm(3)
        layer.weight = nn.Parameter(weight(torch.ones(3)))
        xs = [make(X.clone()), other(Z.clone())]
        for x in xs:
            x.requires_grad_()
        ys = layer(xs)
        for y in ys:
            y.relu_()
        sum((y * y).sum() for y in ys).backward()
        return ys, [t.grad for t in (*xs, *layer.parameters())], list(layer.buffers())

    def flat(results):
        return results[0][0], results[0][1:], *results[1:]

    got = outputs(named, same)
    assert [type(y) for y in got[0]] == [Named, torch.Tensor]
    assert got[0][0].origin == "scan 7"
    assert all(type(g) is torch.Tensor for g in got[1])
    assert_equal_bits(flat(got), flat(outputs(same, same)))
    assert [type(y) for y in outputs(same, same, named)[0]] == [Named, Named]
    assert [type(y) for y in outputs(CLASSES["lost"], named)[0]] == [torch.Tensor, Named]


def test_compiled(name="named"):
    """With the backend that takes such tensors into plain layers."""

    def compiled(layer):
        function = torch.compile(lambda x: layer(x).relu_(), backend="eager", fullgraph=True)
        return run(function, CLASSES[name])[0], layer.running_var

    def run(function, make):
        x = make(X.clone())
        y = function(x)
        y.sum().backward()
        return y, x.grad

    y, var = compiled(syncbn.SyncBatchNorm(3))
    other, _ = compiled(nn.BatchNorm2d(3))
    assert type(y) is type(other)
    assert getattr(y, "origin", None) == getattr(other, "origin", None)
    layer = syncbn.SyncBatchNorm(3)
    assert torch.equal(y.as_subclass(torch.Tensor), layer(X).relu_())
    assert torch.equal(var, layer.running_var)
