# SPDX-License-Identifier: Apache-2.0
"""Tensors of other classes, and tensors that change between forward and backward, on one rank or on
all; run by test_distributed.py as rank_cases.py is."""

import warnings

import torch
from torch import nn
from torch.masked import masked_tensor

import syncbn
from rank_cases import diverges, raises, refused
from subclasses import CLASSES, Closed

X = torch.linspace(-2, 3, 4 * 3 * 5 * 5).sin().view(4, 3, 5, 5)
DY = X.cos()


def _step(layer, x):
    x = x.clone().requires_grad_()
    layer(x).backward(DY)
    return x.grad


def case_a_subclass_on_one_rank_exact(rank, world):
    expected = syncbn.SyncBatchNorm(3)
    dx = _step(expected, X + rank)
    for make in (make for name, make in CLASSES.items() if name != "wrapper"):
        layer = syncbn.SyncBatchNorm(3)
        x = make(X + rank) if rank == 0 else X + rank
        x.requires_grad_()
        layer(x).mul_(1).backward(DY.clone())
        assert torch.equal(x.grad.as_subclass(torch.Tensor), dx)
        assert torch.equal(layer.weight.grad, expected.weight.grad)
        assert torch.equal(layer.running_var, expected.running_var)
        assert type(layer(x)) is type(nn.BatchNorm2d(3)(x))


def _closed():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is a prototype
        yield "MaskedTensor", lambda x: masked_tensor(x, x > 0)
    yield "Closed", lambda x: x.as_subclass(Closed)
    yield "Wrapper", CLASSES["wrapper"]


def case_classes_that_take_no_operator(rank, world):
    layer = syncbn.SyncBatchNorm(3)
    mask = X[:, 0] > 0
    for kind, make in _closed():
        for name, given in (
            ("input", lambda make=make: layer(make(X))),
            ("residual", lambda make=make: layer(X, make(X))),
            ("mask", lambda make=make: layer(X, None, make(mask))),
            ("inputs.0., of device 0: input", lambda make=make: layer([make(X), X])),
            ("inputs.1., of device 1: residual", lambda make=make: layer([X, X], [X, make(X)])),
            (
                "inputs.0., of device 0: mask",
                lambda make=make: layer([X, X], None, [make(mask), None]),
            ),
            ("running_mean", lambda make=make: _with(layer, "running_mean", make)),
            ("running_var", lambda make=make: _with(layer, "running_var", make)),
            ("num_batches_tracked", lambda make=make: _with(layer, "num_batches_tracked", make)),
        ):
            good = (lambda: layer([X, X])) if "inputs" in name else (lambda: layer(X))
            refused(rank, layer, f"{name}: got a {kind}, .*expected a plain tensor", given, good)
    layer(X)
    assert layer.num_batches_tracked == 1


def _with(layer, name, make):
    good = layer._buffers[name]
    layer._buffers[name] = make(good.clone())
    try:
        layer(X)
    finally:
        layer._buffers[name] = good


def case_classes_that_do_not_take_each_other(rank, world):
    layer = syncbn.SyncBatchNorm(3)
    if rank == 0:
        layer.running_mean = CLASSES["lost"](layer.running_mean)

        class Other(torch.Tensor):
            __torch_function__ = classmethod(lambda *_, **__: NotImplemented)

    text = "no implementation found"
    bad = (lambda: layer(X.as_subclass(Other))) if rank == 0 else None
    refused(rank, layer, text, bad, lambda: layer(X), TypeError)
    layer(X)


def _data(name, value):
    """Other data in the place of a parameter's, or of the input's."""

    def change(layer, x):
        (getattr(layer, name) if name in ("weight", "bias") else x).data = value

    return change


def _freed(name):
    def change(layer, x):
        t = getattr(layer, name) if name in ("weight", "bias") else x
        t.untyped_storage().resize_(0)

    return change


#: What changes between forward and backward.
CHANGES = {
    "weight": _data("weight", torch.ones(5)),
    "weight's storage": _freed("weight"),
    "bias": _data("bias", torch.zeros(5)),
    "bias's storage": _freed("bias"),
    "input": _data("input", torch.ones(3, 3)),
    "input's samples": _data("input", torch.ones(2, 3, 5, 5)),
    "input's axes": _data("input", torch.ones(1, 4, 3, 5, 5)),
    "input's storage": _freed("input"),
    "input's dtype": _data("input", X.double()),
    "residual's storage": _freed("residual"),
}


def case_refusals_in_backward_reach_every_rank(rank, world):
    """Over an operator that the whole step is, and over the general way."""
    for options in ({}, {"activation": "relu"}, {"statistics": "welford"}, IN_PLACE):
        for name, change in CHANGES.items():
            if name.startswith("bias") and "activation" not in options:
                continue  # backward does not read the bias
            if options is IN_PLACE and name not in ("weight", "weight's storage", "bias"):
                continue  # its input is its output
            layer = nn.Sequential(syncbn.SyncBatchNorm(3, **options))[0]
            x = X.clone().requires_grad_()
            y = layer(x * 1) if options is IN_PLACE else layer(x)
            y = layer(x, x) if name.startswith("residual") else y
            if rank == 0:
                change(layer, x)
                text = r"SyncBatchNorm, call \d, backward, 3 channels, float32.*: "
                text += r"(input|x|dy|weight|bias): got .*, expected "
                raises(ValueError, text, y.backward, DY)
            else:
                # The quotation has the call's name once.
                text = "rank 0: [^:]*: ValueError: (input|x|dy|weight|bias): got .*, expected "
                diverges(text, y.backward, DY)


IN_PLACE = {"activation": "leaky_relu", "inplace": True}


def case_freed_memory_in_forward_reaches_every_rank(rank, world):
    """Before the exchange: the other ranks have updated nothing either."""
    for options in ({}, {"statistics": "welford"}):
        for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
            layer = syncbn.SyncBatchNorm(3, **options)
            layer(X)
            before = [b.clone() for b in layer.buffers()]
            text = f"{name}: got a storage of 0 bytes"
            if rank == 0:
                getattr(layer, name).untyped_storage().resize_(0)
                raises(ValueError, text, layer, X)
            else:
                text = f"rank 0: .*ValueError: .*{text}"
                diverges(text, layer, X)
                assert all(map(torch.equal, layer.buffers(), before)), name


def case_a_weight_replaced_between_derivatives_reaches_every_rank(rank, world):
    layer = syncbn.SyncBatchNorm(3)
    x = X.clone().requires_grad_()
    (dx,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    if rank == 0:
        layer.weight.data = torch.ones(5)
        raises(ValueError, r"weight: got shape \(5,\), expected \(3,\)", dx.sum().backward)
    else:
        text = r"rank 0: .*ValueError: .*weight: got shape \(5,\)"
        diverges(text, dx.sum().backward)
