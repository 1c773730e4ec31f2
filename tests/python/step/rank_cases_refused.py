# SPDX-License-Identifier: Apache-2.0
"""What a rank refuses, and what the others learn; run by test_distributed.py as rank_cases.py is.

torch.nn.SyncBatchNorm raises on this rank, before or after its exchange; the others wait or go on.
"""

import contextlib
import copy
import gc
import importlib.util
import io
import re
import warnings
import weakref
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import syncbn
from bad_input_table import CASES, MASKED, C, X, operator
from rank_cases import diverges, raises, refused, unchanged
from support import new_layer
from syncbn.ops import batch_norm_
from syncbn.parallel import all_reduce


def _step(layer):
    x = X.clone().requires_grad_()
    y = layer(x)
    y.backward(X.cos())
    return y.detach(), x.grad, *(b.clone() for b in layer.buffers())


#: Of the table: what raises before the layer has a group, what changes the layer itself, and what
#: only the batches of all ranks decide.
APART = r"new |call |counter|masked|.*one value|function [04-7]|operator (9|2[34])"


def case_bad_input_is_an_error_on_every_rank(rank, world):
    """Rank 0 makes the calls of the table of test_bad_input.py, the others good ones."""
    scale = DTensor.from_local(torch.ones(4), init_device_mesh("cpu", (world,)))
    own = (
        ("operator", operator(x=MASKED), "^x: got "),
        ("operator", operator(scale=scale), "scale"),
    )
    good = {"list": lambda layer: layer([X, X]), "operator": operator()}
    expected = _step(new_layer(C, activation="leaky_relu"))
    for name, call, text in (*CASES, *own):
        if re.match(APART, name):
            continue
        layer = new_layer(C, activation="leaky_relu")
        options, make = dict(layer.__dict__), good.get(name.split()[0], lambda layer: layer(X))
        refused(rank, layer, text.removeprefix("^"), partial(call, layer), partial(make, layer))
        layer.__dict__.update(options)
        assert all(map(torch.equal, _step(layer), expected)), name


def case_the_operator_counts_no_refused_batch(rank, world):
    layer, counter = new_layer(C), torch.tensor([2])
    one = operator(x=X[:1, :, 0] if rank == 0 else X[:0], batches=counter)
    raises(ValueError, "1 value per channel", one, layer)
    unchanged(layer, new_layer(C).state_dict())
    assert counter.item() == 2
    operator(batches=counter)(layer)
    assert counter.item() == 3


def case_a_destroyed_group_changes_nothing_and_can_be_replaced(rank, world):
    group = dist.new_group(list(range(world)))
    layer = syncbn.SyncBatchNorm(4, process_group=group)
    layer(X)
    before = copy.deepcopy(layer.state_dict())
    name = group.group_name
    dist.barrier()
    dist.destroy_process_group(group)
    for _ in range(2):
        text = f"^process_group: no process group named '{name}' in this process; was it destroyed"
        raises(RuntimeError, text, layer, X)
        unchanged(layer, before)
    syncbn.set_group(layer)
    layer(X)
    assert layer.num_batches_tracked == 2


def _tangent(call, x):
    with forward_ad.dual_level():
        call(forward_ad.make_dual(x, x))


def _onnx(call, x, dynamo):
    model = nn.Sequential(call, nn.ReLU())
    mode = torch.onnx.TrainingMode.PRESERVE
    torch.onnx.export(model, (x,), io.BytesIO(), dynamo=dynamo, training=mode, verbose=False)


def _alone(layer, x):
    """What one rank may do by itself, and no exchange can go through: (error, its text, the call).

    Of torch.nn.SyncBatchNorm a trace would keep the sums of the first batch as constants or fail
    inside torch.distributed.
    """
    path, traced = layer.state.name, "got torch.jit.trace of an exchange between . ranks, expected"
    options = {"process_group": layer.process_group, "timeout": layer.state.sharing.limit}

    def function(x):
        return syncbn.functional.sync_batch_norm(x, training=True, **options)

    def operator(x):
        zero, one = torch.zeros(4), torch.ones(4)
        return batch_norm_(x, zero, one, None, None, torch.tensor(1)).y

    cases = [
        (f"^{path}: {traced}", lambda: torch.jit.trace(layer, x)),
        (f"^{path}: {traced}", lambda: torch.jit.trace(nn.Sequential(layer, nn.ReLU()), x)),
        (f"^sync_batch_norm: {traced}", lambda: torch.jit.trace(function, x)),
        (f": {traced}", lambda: torch.jit.trace(operator, x)),
        (f"all_reduce: {traced}", lambda: torch.jit.trace(all_reduce, x)),
        ("several devices", lambda: torch.jit.trace(lambda x: layer([x, x])[0], x)),
        ("transform of torch.func", lambda: torch.func.grad(lambda x: layer(x).sum())(x)),
        ("transform of torch.func", lambda: torch.func.vmap(layer)(torch.stack((x, x)))),
        ("transform of torch.func", lambda: torch.func.vmap(function)(torch.stack((x, x)))),
        ("transform of torch.func", lambda: torch.func.jacrev(lambda x: layer([x, x]))(x)),
        ("^input: got a tensor with a forward-mode", lambda: _tangent(layer, x)),
        ("^input: got a tensor with a forward-mode", lambda: _tangent(function, x)),
        ("^inputs.0.: got a tensor with a forward", lambda: _tangent(lambda x: layer([x, x]), x)),
        (f"^{path}: got torch.onnx.export of an", lambda: _onnx(layer, x, dynamo=False)),
    ]
    if importlib.util.find_spec("onnxscript"):
        cases.append((f"{path}: got torch.onnx.export of an", lambda: _onnx(layer, x, dynamo=True)))
    return cases


def case_what_one_rank_does_alone_is_refused_at_once_and_disturbs_nobody(rank, world):
    """Before the group's first exchange and between two steps of training."""
    x, z = torch.randn(3, 4), torch.randn(3, 4)
    warnings.simplefilter("ignore")
    for steps in (0, 3):
        layer = syncbn.SyncBatchNorm(4, timeout=29.5 + steps)  # in a group of its own
        reference = syncbn.SyncBatchNorm(4)
        for module in (layer, reference):
            for _ in range(steps):
                module(x)
        before, call = copy.deepcopy(layer.state_dict()), layer.state.call.clone()
        if rank == 0:
            for text, refused in _alone(layer, x):
                kinds = (NotImplementedError, RuntimeError)  # the exporter has one of its own
                raises(kinds, text, refused)
                unchanged(layer, before)
                assert torch.equal(layer.state.call, call)
        dist.barrier()  # to which this rank has come without the others
        y = layer(z)
        assert torch.equal(y, reference(z))
        unchanged(layer, reference.state_dict())
        assert torch.jit.trace(copy.deepcopy(layer).eval(), x)(x).shape == x.shape


def case_who_waits_for_a_rank_that_refused_hears_why(rank, world):
    layer, x = syncbn.SyncBatchNorm(4, timeout=1.625), torch.randn(3, 4)
    layer(x)
    if rank == 0:
        raises(NotImplementedError, "", torch.jit.trace, layer, x)
    else:
        text = r"rank 0: in no exchange.*refused .* NotImplementedError: .*got torch.jit.trace"
        raises((syncbn.ExchangeTimeout, syncbn.PeerLost), text, layer, x)
    dist.barrier()


def case_a_refused_argument_waits_for_nobody_and_is_told(rank, world):
    """Each refusal is one call of the layer: the others hear of it in theirs."""
    layer, x = syncbn.SyncBatchNorm(4), torch.randn(3, 4)
    reference = copy.deepcopy(layer)
    layer(x)
    reference(x)
    for bad in ([x.int()], [x, x[:, :3]], [x, None, x]):
        before = copy.deepcopy(layer.state_dict())
        if rank == 0:
            raises(ValueError, "^(input|residual|mask): got", layer, *bad)
        dist.barrier()  # the others come to their call after this
        if rank != 0:
            text = "a rank raised an error: rank 0: .*ValueError: .*: got"
            diverges(text, layer, x)
        unchanged(layer, before)
        if rank == 0:  # two in a row, and the next exchange
            for _ in range(2):
                raises(ValueError, "^input: got", layer, x.double()[0])
        else:
            for _ in range(2):
                diverges("rank 0: .*ValueError: input", layer, x)
        assert torch.equal(layer(x), reference(x))
        unchanged(layer, reference.state_dict())
        if rank == 0:
            raises(ValueError, r"^x\[0\]: got int", all_reduce, [1])
        dist.barrier()
        if rank != 0:
            diverges(r"rank 0: .*x\[0\]: got int", all_reduce, x)
        all_reduce(x)


def case_an_error_keeps_nothing_of_its_step(rank, world):
    """The step's tensors go with the error, without the garbage collector. So what surrounds a
    step ends with it, too: a checkpoint that is given up leaves hooks for saved tensors until then.
    """
    stem, block = syncbn.SyncBatchNorm(4), syncbn.SyncBatchNorm(4)
    alone = syncbn.SyncBatchNorm(4, sync=False)
    single = torch.randn(3, 4, requires_grad=True)

    def backward_of_too_many(x):
        y = alone(single * x.mean())
        y.grad_fn.register_prehook(lambda dys: (dys[0].new_empty(3, 5),))
        y.sum().backward()

    steps = {
        "other layers": lambda x: (stem if rank == 0 else block)(x),
        "refused": lambda x: stem(x if rank != 0 else x.int()),
        "checkpointed": lambda x: checkpoint(
            stem, x if rank != 0 else x[:, :3], use_reentrant=False
        ),
        "traced": lambda x: torch.jit.trace(stem, x) if rank == 0 else None,
        "alone": backward_of_too_many,
    }

    def fails(step):
        x = torch.randn(3, 4)
        gone = weakref.ref(x)
        with contextlib.suppress(Exception):
            step(x)
        return gone

    stem(torch.randn(3, 4))
    block(torch.randn(3, 4))
    gc.collect()
    gc.disable()
    try:
        kept = [what for what, step in steps.items() if fails(step)() is not None]
    finally:
        gc.enable()
    assert not kept, kept
    dist.barrier()
    checkpoint(stem, torch.randn(3, 4, requires_grad=True), use_reentrant=False).sum().backward()
