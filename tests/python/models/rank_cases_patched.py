# SPDX-License-Identifier: Apache-2.0
"""Layers with a forward on the object: a patch that names a bound method on the layer calls the
class that the layer has now. torch.nn.SyncBatchNorm's converter makes new layers, and drops it."""

import copy
import functools
import pickle
import types
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import syncbn
from rank_cases import raises


def of_the_layer(function):
    """A forward that calls what the layer has under another name."""

    def make(bn):
        bn.my_forward = bn.forward
        return types.MethodType(function, bn)

    return make


def by_closure_and_name(bn):
    bn.my_forward = bn.forward
    return lambda x: (lambda value: bn.my_forward(value))(x)


def by_hook_of_accelerate(bn):
    """As its add_hook_to_module."""
    bn._old_forward = bn.forward

    def new_forward(module, *args, **kwargs):
        return module._old_forward(*args, **kwargs)

    return functools.update_wrapper(functools.partial(new_forward, bn), bn._old_forward)


#: What makes of a layer the forward that it gets; None: it has done so itself.
MAKERS = {
    "the_bound_method_itself": lambda bn: bn.forward,
    "the_function_bound_again": lambda bn: types.MethodType(type(bn).forward, bn),
    "attribute_of_the_layer": of_the_layer(lambda self, x: self.my_forward(x)),
    "named_attribute": of_the_layer(lambda self, x: getattr(self, "my_forward")(x)),  # noqa: B009
    "closure_and_name": by_closure_and_name,
    "hook_of_accelerate": by_hook_of_accelerate,
    "compiled_call": lambda bn: bn.compile(backend="eager"),
}


def patch(bn, name):
    forward = MAKERS[name](bn)
    if forward is not None:
        bn.forward = forward


def x_of(rank):
    return torch.tensor([[0.0], [2.0]]) + 10 * rank


def shared_statistics():
    """Of two ranks' [0, 2, 10, 12]: mean 6, variance 26."""
    world = dist.get_world_size()
    return 1 + 5.0 * (world - 1), 1 + 100 * (world**2 - 1) / 12


def check(net, rank, shared):
    """A training step on fresh statistics: those of both ranks, or of this one."""
    layer = net[0]
    layer.reset_running_stats()
    y = net(x_of(rank))
    mean, var = shared_statistics() if shared else (1.0 + 10 * rank, 1.0)
    expected = (x_of(rank).double() - mean) / (var + 1e-5) ** 0.5
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=2e-6)
    torch.testing.assert_close(layer.running_mean, torch.tensor([0.1 * mean]))
    assert repr(net) and (layer.training, net.eval().training, net.train().training)
    return y


def quietly(function, *args, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return function(*args, **options)


def _case(name):
    def case(rank, world):
        for cls in (nn.BatchNorm1d, nn.SyncBatchNorm):
            net = nn.Sequential(cls(1))
            patch(net[0], name)
            quietly(syncbn.convert_sync_batchnorm, net)
            check(net, rank, shared=True)
            (row,) = syncbn.report(net, strict=True)
            assert (row.group, row.ranks, row.note) == ("world", world, "")
            quietly(syncbn.convert_sync_batchnorm, net)  # again
            y = check(net, rank, shared=True)
            assert torch.equal(y, check(net, rank, shared=True))
            quietly(syncbn.revert_sync_batchnorm, net)
            assert type(net[0]) is cls
            if cls is nn.BatchNorm1d:
                check(net, rank, shared=False)
        # Patched between conversion and its undoing.
        net = syncbn.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(1)))
        patch(net[0], name)
        check(net, rank, shared=True)
        (row,) = syncbn.report(net, strict=True)
        assert (row.group, row.ranks, row.note) == ("world", world, "")
        quietly(syncbn.revert_sync_batchnorm, net)
        check(net, rank, shared=False)
        quietly(syncbn.convert_sync_batchnorm, net)
        check(net, rank, shared=True)

    return case


for _name in MAKERS:
    globals()[f"case_a_patched_layer_is_synchronized_by_{_name}"] = _case(_name)


def plain(bn):
    return lambda x: nn.BatchNorm1d.forward(bn, x)


def beside_a_backup(bn):
    """The former method is there, and nothing calls it."""
    bn.original = bn.forward
    bn.forward = types.MethodType(lambda self, x: nn.BatchNorm1d.forward(self, x), bn)


class Adapter(nn.Module):
    """As LoRA's: a module that takes the place of another one's forward."""

    def __init__(self, bn):
        super().__init__()
        self.org_forward = bn.forward

    def forward(self, x):
        return self.org_forward(x)


def own_arithmetic(bn):
    bn.forward = lambda x: nn.functional.batch_norm(
        x, bn.running_mean, bn.running_var, bn.weight, bn.bias, True
    )


#: They name no attribute that is a bound method of the layer.
LOST = (
    *(own_arithmetic, beside_a_backup),
    lambda bn: setattr(bn, "forward", (lambda old: lambda x: old(x))(bn.forward)),
    lambda bn: setattr(bn, "forward", lambda x, old=bn.forward: old(x)),
    lambda bn: setattr(bn, "forward", torch.compile(bn.forward, backend="eager")),
    lambda bn: setattr(bn, "forward", Adapter(bn).forward),
    lambda bn: setattr(bn, "forward", functools.wraps(bn.forward)(plain(bn))),
    lambda bn: setattr(bn, "_call_impl", plain(bn)),
    lambda bn: setattr(bn, "_compiled_call_impl", plain(bn)),
)


def case_what_cannot_be_rebound_is_warned_of_and_refused(rank, world):
    for lose in LOST:
        net = nn.Sequential(nn.Identity(), nn.Sequential(nn.BatchNorm1d(1)), nn.BatchNorm1d(1))
        lose(net[1][0])
        with pytest.warns(UserWarning, match=r"^1\.0: got a forward on the object") as found:
            syncbn.convert_sync_batchnorm(net)
        assert len(found) == 1, lose
        line = r"\n  1\.0: syncbn\.SyncBatchNorm: the forward on the object is not seen"
        raises(RuntimeError, line, lambda n=net: syncbn.report(n, strict=True))
        row, other = syncbn.report(net)
        assert (row.group, row.ranks, row.engine) == ("", 1, "none")
        assert (other.group, other.ranks) == ("world", world)
        # Whose statistics are local on purpose.
        quietly(syncbn.convert_sync_batchnorm, net, sync=False)
        assert syncbn.report(net, strict=True)[0].note == "sync=False"
        syncbn.revert_sync_batchnorm(net)
        assert type(net[1][0]) is nn.BatchNorm1d


def case_pytorch_s_forward_on_a_synchronized_layer_says_so_once(rank, world):
    """Whoever calls it: here a bound method in a place where nobody looks for it."""
    net = nn.Sequential(nn.BatchNorm1d(1))
    kept = net[0].forward
    syncbn.convert_sync_batchnorm(net)
    with pytest.warns(UserWarning, match="^0: got a training call of PyTorch's forward"):
        kept(x_of(rank))
    quietly(kept, x_of(rank))
    line = "\n  0: syncbn.SyncBatchNorm: a training call of PyTorch's forward$"
    raises(RuntimeError, line, syncbn.report, net, strict=True)
    net.eval()
    quietly(kept, x_of(rank))
    syncbn.revert_sync_batchnorm(net)
    syncbn.convert_sync_batchnorm(net)
    assert syncbn.report(net, strict=True)[0].ranks == world


def case_copies_of_a_patched_layer(rank, world):
    """Whose patches go along with them, as of a plain layer."""
    net = nn.Sequential(nn.BatchNorm1d(1))
    patch(net[0], "attribute_of_the_layer")
    patch(net[0], "the_bound_method_itself")
    del net[0].forward
    net[0].forward = net[0].my_forward
    del net[0].my_forward
    syncbn.convert_sync_batchnorm(net)
    copied = copy.deepcopy(net)
    assert copied[0].forward.__self__ is copied[0]
    check(copied, rank, shared=True)
    assert net[0].running_mean.item() == 0
    (row,) = syncbn.report(copied, strict=True)
    assert row.ranks == world
    del net[0].forward
    check(pickle.loads(pickle.dumps(net)), rank, shared=True)


def case_a_hook_of_accelerate_itself(rank, world):
    hooks = pytest.importorskip("accelerate.hooks")
    net = nn.Sequential(nn.BatchNorm1d(1))
    hooks.add_hook_to_module(net[0], hooks.ModelHook())
    quietly(syncbn.convert_sync_batchnorm, net)
    check(net, rank, shared=True)
    assert syncbn.report(net, strict=True)[0].ranks == world
    hooks.add_hook_to_module(net[0], hooks.ModelHook(), append=True)
    check(net, rank, shared=True)
    hooks.remove_hook_from_module(net[0])
    check(net, rank, shared=True)
    assert syncbn.report(net, strict=True)[0].ranks == world
    hooks.add_hook_to_module(net[0], hooks.ModelHook())
    syncbn.revert_sync_batchnorm(net)
    check(net, rank, shared=False)
    hooks.remove_hook_from_module(net[0])
    check(net, rank, shared=False)
