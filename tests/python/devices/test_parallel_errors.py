# SPDX-License-Identifier: Apache-2.0
"""What several devices of one process refuse, and that nothing changes then."""

import copy
import functools
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import syncbn
from syncbn.parallel import SelfDataParallel


class Branches(nn.Module):
    """The first entry of x tells a device what to do."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (syncbn.SyncBatchNorm(3) for _ in range(2))
        self.swallowed = 0

    def forward(self, x):
        what = x.flatten()[0].item()
        if what == 1:
            return x
        if what == 2:
            raise KeyError("device's own")
        if what == 3:
            with torch.no_grad():
                return self.first(x)
        if what == 6:
            with torch.autocast("cpu", torch.bfloat16):
                return self.first(x)
        if what == 4:
            try:
                x = self.first(x)
            except RuntimeError:
                self.swallowed += 1
            return self.second(x)
        return (self.second if what == 5 else self.first)(x)


def x(what, channels=3):
    return torch.full((2, channels), float(what))


DIVERGED = syncbn.DivergenceError


def unchanged(model, before):
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert model.first.state.call == model.second.state.call == 0


@pytest.mark.parametrize("replicate", (False, True))
@pytest.mark.parametrize(
    "inputs, error, text",
    (
        ([x(0), x(5), x(0)], DIVERGED, "devices 0, 2 at.*'first'.*device 1.*'second'"),
        ([x(0), x(0), x(1)], DIVERGED, "devices 0, 1 at.*'first'.*device 2 finished"),
        ([x(1), x(0), x(0)], DIVERGED, "device 0 finished; devices 1, 2 at.*'first'"),
        ([x(0), x(3), x(0)], DIVERGED, "grad mode True.*device 1.*grad mode False"),
        ([x(0), x(6), x(0)], DIVERGED, "autocast off.*device 1.*cpu torch.bfloat16"),
        ([x(0), x(2), x(0)], KeyError, "device's own"),
        ([x(2), x(0), x(0)], KeyError, "device's own"),
        ([x(4), x(4), x(2)], KeyError, "device's own"),
        ([x(0), x(0, 4), x(0)], ValueError, r"device 1.*got shape \(3,\), expected \(4,\)"),
        ([x(0), x(0).double(), x(0)], ValueError, "got torch.float64, expected torch.float32"),
        ([x(0), x(0), x(0).long()], ValueError, "device 2.*got torch.int64"),
    ),
)
def test_devices_that_disagree_are_one_error(inputs, error, text, replicate):
    model = Branches()
    before = copy.deepcopy(model.state_dict())
    threads = threading.active_count()
    with pytest.raises(error, match=text):
        SelfDataParallel(model, ["cpu"] * 3, replicate)(inputs)
    assert threading.active_count() == threads
    unchanged(model, before)
    # The next step is a good one.
    SelfDataParallel(model, ["cpu"] * 3, replicate)([x(0)] * 3)
    assert model.first.num_batches_tracked == 1


def test_a_model_that_swallows_the_error_ends_too():
    model = Branches()
    with pytest.raises(KeyError):
        SelfDataParallel(model, ["cpu"] * 3)([x(4), x(4), x(2)])
    assert model.swallowed == 2


def test_refused_arguments():
    model = Branches()
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="devices: got none, expected at least one"):
            SelfDataParallel(model)
    with pytest.raises(ValueError, match="devices: got none"):
        SelfDataParallel(model, [])
    with pytest.raises(ValueError, match="devices: got meta"):
        SelfDataParallel(model, ["meta"])
    with pytest.raises(ValueError, match="devices: got cuda, expected"):
        SelfDataParallel(model, ["cuda", "cuda"])
    with pytest.raises(ValueError, match="replicate: got False, expected True"):
        SelfDataParallel(model, ["cpu", "cuda:0"], replicate=False)
    parallel = SelfDataParallel(model, ["cpu", "cpu:0"])
    with pytest.raises(ValueError, match="inputs: got 3, expected a tensor or a list of 2"):
        parallel([x(0)] * 3)
    with pytest.raises(ValueError, match="inputs: got a tensor without axes"):
        parallel(x(0), key=[torch.tensor(1.0)])
    with pytest.raises(ValueError, match="module: got first.weight on meta, expected cpu"):
        SelfDataParallel(Branches().to("meta"), ["cpu"] * 2)(x(0))


def test_a_replica_of_data_parallel_names_the_way_out():
    """torch.nn.DataParallel calls replicas in threads; a replica trains on its share alone."""
    layer = syncbn.SyncBatchNorm(3)
    replica = layer._replicate_for_data_parallel()
    with pytest.raises(RuntimeError, match="expected syncbn.parallel.SelfDataParallel"):
        replica(x(0))
    assert layer.num_batches_tracked == 0
    replica = layer.eval()._replicate_for_data_parallel()
    replica.weight, replica.bias = layer.weight.detach(), layer.bias.detach()
    assert torch.equal(replica(x(0)), layer(x(0)))


@pytest.mark.parametrize("reentrant", (False, True))
@pytest.mark.parametrize("replicate", (False, True))
def test_recomputation_is_refused(reentrant, replicate):
    """It would see one device's samples alone."""

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.bn = nn.Linear(3, 3), syncbn.SyncBatchNorm(3)

        def forward(self, x):
            return checkpoint(lambda x: self.bn(self.linear(x)).tanh(), x, use_reentrant=reentrant)

    model = SelfDataParallel(Checkpointed(), ["cpu"] * 2, replicate)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="activation checkpointing around a synchronized layer"):
        model(torch.randn(4, 3, requires_grad=True))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    # The layer alone still works.
    model.module.bn(torch.randn(4, 3))


def test_calls_that_no_device_may_make():
    layer = syncbn.SyncBatchNorm(3)

    class Calls(nn.Module):
        def __init__(self, function):
            super().__init__()
            self.function = function

        def forward(self, x):
            return self.function(x)

    inner = SelfDataParallel(layer, ["cpu"] * 2)
    for function, text in (
        (lambda x: layer([x, x]), "got a list of inputs inside SelfDataParallel"),
        (inner, "got a call inside another one"),
        (
            lambda x: syncbn.functional.sync_batch_norm(x, training=True),
            "expected a syncbn.SyncBatchNorm",
        ),
    ):
        with pytest.raises(RuntimeError, match=text):
            SelfDataParallel(Calls(function), ["cpu"] * 2)(torch.randn(4, 3))
    assert layer.num_batches_tracked == 0


class Inner(nn.Module):
    """A backward inside forward: how, and of what, the entries tell."""

    def __init__(self, how):
        super().__init__()
        self.how, self.linear = how, nn.Linear(3, 3)
        self.first, self.second = (syncbn.SyncBatchNorm(3) for _ in range(2))

    def forward(self, x):
        x = x.detach().requires_grad_()
        return x + self.how(self, x)


def gradient(y, x, **options):
    return torch.autograd.grad(y.pow(3).sum(), x, **options)[0]


def by_backward(model, x):
    model.first(x).pow(3).sum().backward()
    return x.grad


def by_hook(model, x):
    handle = model.first.register_forward_hook(lambda _, inputs, y: gradient(y, inputs[0]))
    try:
        return model.first(x)
    finally:
        handle.remove()


def in_checkpoint(model, x, reentrant, outside):
    if outside:

        def segment(x):
            with torch.enable_grad():
                return gradient(model.first(model.linear(x)), x, retain_graph=True)

        return checkpoint(segment, x, use_reentrant=reentrant)
    y = checkpoint(lambda x: model.first(model.linear(x)).tanh(), x, use_reentrant=reentrant)
    y.square().sum().backward()
    return x.grad


INNER = {
    "grad": lambda m, x: gradient(m.first(x), x),
    "retain_graph": lambda m, x: gradient(m.first(x), x, retain_graph=True),
    "create_graph": lambda m, x: gradient(m.first(x), x, create_graph=True),
    "two layers": lambda m, x: gradient(m.second(m.linear(m.first(x))), x, retain_graph=True),
    "second layer": lambda m, x: gradient(
        m.second(m.linear(m.first(x).detach())), m.linear.weight
    ).sum(),
    "backward": by_backward,
    "hook": by_hook,
    "in a function": lambda m, x: torch.autograd.functional.jacobian(lambda x: m.first(x).sum(), x),
    **{
        f"checkpoint, {reentrant}, {outside}": functools.partial(
            in_checkpoint, reentrant=reentrant, outside=outside
        )
        for reentrant in (False, True)
        for outside in (False, True)
    },
}


@pytest.mark.parametrize("replicate", (False, True))
@pytest.mark.parametrize("how", INNER)
def test_a_backward_inside_a_devices_forward_is_refused(how, replicate):
    """It has the gradients of one device alone; those of the others were taken for 0."""
    model = Inner(INNER[how])
    layer = "second" if how in ("two layers", "second layer") else "first"
    threads = threading.active_count()
    kept = how.startswith("checkpoint") and how != "checkpoint, True, True"
    text = "call in a checkpointed segment" if kept else "backward pass inside"
    with pytest.raises(RuntimeError, match=f"^{layer}: got a {text}"):
        SelfDataParallel(model, ["cpu"] * 3, replicate)(torch.randn(6, 3))
    assert threading.active_count() == threads
    assert all(p.grad is None for p in model.first.parameters())
    # One device is the whole.
    if not how.startswith("checkpoint"):
        SelfDataParallel(Inner(INNER[how]), ["cpu"])(torch.randn(6, 3))


def test_a_backward_through_an_earlier_step_is_refused_inside_forward():
    """Of a list, or of the step before, that a device keeps."""
    layer = syncbn.SyncBatchNorm(3)
    x = torch.randn(4, 3, requires_grad=True)
    kept = layer([x, x])
    model = Inner(lambda *_: gradient(kept[0], x, retain_graph=True))
    with pytest.raises(RuntimeError, match="got a backward pass inside the forward of"):
        SelfDataParallel(model, ["cpu"] * 2)(torch.randn(4, 3))
    sum(kept).sum().backward()


@pytest.mark.parametrize("replicate", (False, True))
def test_a_backward_that_meets_no_layer_is_allowed_inside_forward(replicate):
    """Before a layer, beside it, and of a weight; what comes out are those of one device."""

    def how(model, x):
        inner = gradient(model.linear(x), x, retain_graph=True)
        frozen = model.second.eval()(x)
        (of_weight,) = torch.autograd.grad(model.linear.weight.square().sum(), model.linear.weight)
        return model.first(x) * of_weight.sum() + inner + gradient(frozen, x)

    models = [Inner(how) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    x = torch.randn(6, 3)
    ys = SelfDataParallel(models[0], ["cpu"] * 3, replicate)(x)
    expected = models[1](x)
    torch.cat(ys).square().sum().backward()
    expected.square().sum().backward()
    assert torch.equal(torch.cat(ys), expected)
    torch.testing.assert_close(models[0].first.weight.grad, models[1].first.weight.grad)
