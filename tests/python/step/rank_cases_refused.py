# SPDX-License-Identifier: Apache-2.0
"""What a rank refuses, and what the others learn; run by test_distributed.py as rank_cases.py is.

torch.nn.SyncBatchNorm raises on this rank, before or after its exchange; the others wait or go on.
"""

import copy
import importlib.util
import io
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad

import syncbn
from rank_cases import raises, unchanged
from syncbn.ops import batch_norm_
from syncbn.parallel import all_reduce


def case_refused_input_is_an_error_on_every_rank(rank, world):
    layer = syncbn.SyncBatchNorm(4)
    before = copy.deepcopy(layer.state_dict())
    x = torch.randn(3, 4)
    sparse = x.to_sparse()
    # Named as the error names it; also what has no strided memory, or is no tensor at all.
    for name, *bad in (
        ("running_mean", torch.randn(3, 5)),
        ("input", torch.ones(3, 4, dtype=torch.int64)),
        ("input", torch.randn(4)),
        ("input", sparse),
        ("input", torch.nested.nested_tensor([torch.randn(4), torch.randn(2)])),
        ("input", None),
        ("input", x.numpy()),
        ("input", x.to("meta")),
        ("residual", x, sparse),
        ("residual", x, x.numpy()),
        ("mask", x, None, torch.ones(3, dtype=torch.bool).to_sparse()),
    ):
        if rank == 0:
            raises(ValueError, f"^{name}: got .*, expected", lambda bad=bad: layer(*bad))
        else:
            # The others are told why.
            text = f"a rank refused its input: rank 0: .*ValueError: {name}: got "
            raises(syncbn.DivergenceError, text, lambda: layer(x))
        unchanged(layer, before)
    layer(x)


def case_refused_parameters_and_buffers_are_an_error_on_every_rank(rank, world):
    x = torch.randn(3, 4)
    for name in ("weight", "bias", "running_mean", "running_var"):
        for bad in (torch.ones(4, dtype=torch.int32), torch.ones(4).to_sparse()):
            layer = syncbn.SyncBatchNorm(4)
            if rank == 0:
                good = getattr(layer, name)
                kind = nn.Parameter if name in layer._parameters else lambda t, _: t
                setattr(layer, name, kind(bad, False))
                raises(ValueError, f"^{name}: got .*, expected", lambda layer=layer: layer(x))
                setattr(layer, name, good)
            else:
                text = f"rank 0: .*ValueError: {name}: got "
                raises(syncbn.DivergenceError, text, lambda layer=layer: layer(x))
            unchanged(layer, syncbn.SyncBatchNorm(4).state_dict())
            layer(x)


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
        raises(NotImplementedError, "", lambda: torch.jit.trace(layer, x))
    else:
        text = r"rank 0: in no exchange.*refused .* NotImplementedError: .*got torch.jit.trace"
        raises((syncbn.ExchangeTimeout, syncbn.PeerLost), text, lambda: layer(x))
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
            raises(ValueError, "^(input|residual|mask): got", lambda bad=bad: layer(*bad))
        dist.barrier()  # the others come to their call after this
        if rank != 0:
            text = "a rank refused its input: rank 0: .*ValueError: .*: got"
            raises(syncbn.DivergenceError, text, lambda: layer(x))
        unchanged(layer, before)
        if rank == 0:  # two in a row, and the next exchange
            for _ in range(2):
                raises(ValueError, "^input: got", lambda: layer(x.double()[0]))
        else:
            for _ in range(2):
                raises(syncbn.DivergenceError, "rank 0: .*ValueError: input", lambda: layer(x))
        assert torch.equal(layer(x), reference(x))
        unchanged(layer, reference.state_dict())
        if rank == 0:
            raises(ValueError, r"^x\[0\]: got int", lambda: all_reduce([1]))
        dist.barrier()
        if rank != 0:
            raises(syncbn.DivergenceError, r"rank 0: .*x\[0\]: got int", lambda: all_reduce(x))
        all_reduce(x)
