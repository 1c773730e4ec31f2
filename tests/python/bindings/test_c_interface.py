# SPDX-License-Identifier: Apache-2.0
"""The C interface through ctypes, as another language calls it: the bits of the layer, on one rank
and on two threads whose exchange is Python's, and errors with a text for what is wrong."""

import ctypes
import threading
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_char_p,
    c_double,
    c_int32,
    c_int64,
    c_size_t,
    c_void_p,
    pointer,
    sizeof,
)
from pathlib import Path

import pytest
import torch

import syncbn

_PATH = Path(syncbn.__file__).parent / "lib" / "libsyncbn.so"
LIBRARY = ctypes.CDLL(str(_PATH))
LIBRARY.syncbn_last_error.restype = c_char_p
LIBRARY.syncbn_last_error_layer.restype = c_char_p
LIBRARY.syncbn_self_communicator.restype = c_void_p
INVALID, DIVERGENCE = 2, 3
DTYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.float64: 3}


class Tensor(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("dtype", c_int32),
        ("device", c_int32),
        ("ndim", c_int32),
        ("sizes", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
    ]


class Options(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("channels", c_int64),
        ("name", c_char_p),
        ("eps", c_double),
        ("momentum", c_double),
        ("cumulative_average", c_int32),
        ("statistics", c_int32),
        ("activation_kind", c_int32),
        ("negative_slope", c_double),
    ]


class Forward(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("x", POINTER(Tensor)),
        ("mask", c_void_p),
        ("weight", POINTER(Tensor)),
        ("bias", POINTER(Tensor)),
        ("residual", POINTER(Tensor)),
        ("y", POINTER(Tensor)),
        ("running_mean", POINTER(Tensor)),
        ("running_var", POINTER(Tensor)),
        ("num_batches_tracked", POINTER(c_int64)),
    ]


class Backward(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("dy", POINTER(Tensor)),
        ("x", POINTER(Tensor)),
        ("mask", c_void_p),
        ("weight", POINTER(Tensor)),
        ("bias", POINTER(Tensor)),
        ("dx", POINTER(Tensor)),
        ("dweight", POINTER(Tensor)),
        ("dbias", POINTER(Tensor)),
        ("dresidual", POINTER(Tensor)),
        ("affine", c_int32),
    ]


ALL_REDUCE = ctypes.CFUNCTYPE(c_int32, c_void_p, POINTER(c_int64), c_int64)


class Communicator(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("user_data", c_void_p),
        ("rank", c_int32),
        ("size", c_int32),
        ("all_reduce_sum", ALL_REDUCE),
        ("all_gather", c_void_p),
        ("abandon", c_void_p),
    ]


def sized(kind, **members):
    return kind(struct_size=sizeof(kind), **members)


def tensor(t: torch.Tensor, **changes):
    numbers = c_int64 * t.dim()
    result = Tensor(
        *(t.data_ptr(), DTYPES[t.dtype], 0, t.dim(), numbers(*t.shape), numbers(*t.stride()))
    )
    for name, value in changes.items():
        setattr(result, name, numbers(*value) if isinstance(value, list) else value)
    return pointer(result)


def train(
    x, dy, weight, bias, mean, var, communicator, changes=None, refused_before=0, **with_options
):
    """(status, y, dx, dweight, dbias) of a step; mean and var are updated. changes: to what is said
    about x. refused_before: how many forwards without arguments come before."""
    y, dx, dweight, dbias = map(torch.empty_like, (x, x, weight, bias))
    batches, layer, saved = c_int64(0), c_void_p(), c_void_p()
    defaults = {"channels": x.shape[1], "name": b"layer", "eps": 1e-5, "momentum": 0.1}
    options = sized(Options, **(defaults | with_options))
    status = LIBRARY.syncbn_batch_norm_create(byref(options), communicator, byref(layer))
    assert status == 0, LIBRARY.syncbn_last_error()
    assert LIBRARY.syncbn_saved_create(byref(saved)) == 0
    for _ in range(refused_before):
        assert LIBRARY.syncbn_batch_norm_forward(layer, None, saved, None) == INVALID
    parameters = {"weight": tensor(weight), "bias": tensor(bias)}
    forward = sized(
        Forward,
        x=tensor(x, **(changes or {})),
        y=tensor(y),
        running_mean=tensor(mean),
        running_var=tensor(var),
        num_batches_tracked=pointer(batches),
        **parameters,
    )
    status = LIBRARY.syncbn_batch_norm_forward(layer, byref(forward), saved, None)
    if status == 0:
        backward = sized(
            Backward,
            dy=tensor(dy),
            x=tensor(x),
            dx=tensor(dx),
            dweight=tensor(dweight),
            dbias=tensor(dbias),
            affine=1,
            **parameters,
        )
        status = LIBRARY.syncbn_batch_norm_backward(layer, byref(backward), saved, None)
    LIBRARY.syncbn_saved_destroy(saved)
    LIBRARY.syncbn_batch_norm_destroy(layer)
    return status, y, dx, dweight, dbias


def case(dtype, channels_last=True):
    generator = torch.Generator().manual_seed(5)
    x, dy = torch.randn(2, 6, 7, 3, 5, generator=generator).to(dtype)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    weight, bias = torch.randn(2, 7, generator=generator).to(dtype)
    return x, dy, weight, bias


def by_layer(x, dy, weight, bias):
    layer = syncbn.SyncBatchNorm(7, affine_grad="global", dtype=x.dtype)
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)
    x = x.detach().requires_grad_()
    y = layer(x)
    y.backward(dy)
    return y.detach(), x.grad, layer.weight.grad, layer.bias.grad, *layer.buffers()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_step_exact(dtype):
    x, dy, weight, bias = case(dtype)
    mean, var = torch.zeros(7, dtype=dtype), torch.ones(7, dtype=dtype)
    alone = c_void_p(LIBRARY.syncbn_self_communicator())
    status, *results = train(x, dy, weight, bias, mean, var, alone)
    assert status == 0, LIBRARY.syncbn_last_error()
    expected = by_layer(x, dy, weight, bias)
    for found, wanted in zip((*results, mean, var), expected, strict=False):
        assert torch.equal(found, wanted)


def run_two(steps):
    """steps: two functions of a communicator, each run in a thread that is a rank."""
    barrier, brought, found = threading.Barrier(2), [None, None], [None, None]

    def run(rank):
        def all_reduce(_, words, count):
            brought[rank] = words[:count]
            barrier.wait(30)
            same = len(brought[0]) == len(brought[1])
            total = [a + b for a, b in zip(*brought, strict=same)]
            barrier.wait(30)
            for i, word in enumerate(total):
                words[i] = (word + 2**63) % 2**64 - 2**63
            return 0

        communicator = sized(Communicator, rank=rank, size=2, all_reduce_sum=ALL_REDUCE(all_reduce))
        found[rank] = *steps[rank](byref(communicator)), LIBRARY.syncbn_last_error().decode()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def test_two_ranks_exact():
    x, dy, weight, bias = case(torch.float32)
    buffers = [(torch.zeros(7), torch.ones(7)) for _ in range(2)]
    shares = ((x[:1], dy[:1]), (x[1:], dy[1:]))
    found = run_two(
        [
            lambda communicator, r=r: train(*shares[r], weight, bias, *buffers[r], communicator)
            for r in range(2)
        ]
    )
    assert [f[0] for f in found] == [0, 0], found
    y, dx, dweight, dbias, mean, var, _ = by_layer(x, dy, weight, bias)
    assert torch.equal(torch.cat([f[1] for f in found]), y)
    assert torch.equal(torch.cat([f[2] for f in found]), dx)
    for rank in range(2):
        for f, wanted in zip((*found[rank][3:5], *buffers[rank]), (dweight, dbias, mean, var)):
            assert torch.equal(f, wanted)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"name": b"other"}, "layer: layer on rank 0, other on rank 1"),
        ({"refused_before": 1}, "call: 0 on rank 0, 1 on rank 1"),
        ({"eps": 1e-3}, "eps: 1e-05 on rank 0, 0.001 on rank 1"),
    ],
)
def test_ranks_that_differ_get_an_error(other, text):
    x, dy, weight, bias = case(torch.float32)
    buffers = [(torch.zeros(7), torch.ones(7)) for _ in range(2)]
    found = run_two(
        [
            lambda c: train(x, dy, weight, bias, *buffers[0], c),
            lambda c: train(x, dy, weight, bias, *buffers[1], c, **other),
        ]
    )
    for rank, (status, *_, told) in enumerate(found):
        assert status == DIVERGENCE
        assert text in told
        assert torch.equal(buffers[rank][0], torch.zeros(7)), "nothing is updated"


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"dtype": 99}, "x"),
        ({"device": 7}, "x"),
        ({"device": 1}, "y"),
        ({"ndim": 1}, "x"),
        ({"ndim": -1}, "x"),
        ({"ndim": 2**31 - 1}, "x"),
        ({"data": None}, "x"),
        ({"sizes": None}, "x.sizes"),
        ({"sizes": [6, 8, 3, 5]}, "x"),
        ({"sizes": [5, 7, 3, 5]}, "y"),
        ({"sizes": [-6, 7, 3, 5]}, "x"),
        ({"sizes": [2**62, 7, 2**62, 5]}, "x"),
    ],
    ids=str,
)
def test_a_wrong_field_is_an_error_with_a_text(changes, argument):
    x, dy, weight, bias = case(torch.float32)
    mean, var = torch.zeros(7), torch.ones(7)
    alone = c_void_p(LIBRARY.syncbn_self_communicator())
    found, *_ = train(x, dy, weight, bias, mean, var, alone, changes)
    assert found == INVALID
    text = LIBRARY.syncbn_last_error().decode()
    assert text.startswith("layer, call 0, forward") and f": {argument}: got " in text, text
    assert LIBRARY.syncbn_last_error_layer() == b"layer"
    assert torch.equal(mean, torch.zeros(7)) and torch.equal(var, torch.ones(7))
