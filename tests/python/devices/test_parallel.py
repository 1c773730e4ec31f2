# SPDX-License-Identifier: Apache-2.0
"""SelfDataParallel: models on several devices of one process."""

import collections
import copy
import itertools
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.parallel import scatter_gather
from torch.utils._pytree import tree_flatten

import share_programs
import syncbn
from support import assert_near, assert_same_layers, new_layer
from syncbn.parallel import SelfDataParallel


def nodes_of(tensor):
    """All nodes of the graph behind a tensor."""
    seen, waiting = set(), [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return seen


def within(seconds, function):
    """Fails where a deadlock would hang."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), f"not finished after {seconds} s"


class Residual(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.head = nn.Linear(width, 2)

    def forward(self, x):
        x = torch.relu(self.bn1(self.stem(x)))
        x = torch.relu(x + self.bn2(self.conv(x)))
        return self.head(x.mean((2, 3)))


def residual(dtype=torch.float64):
    torch.manual_seed(4)
    return syncbn.convert_sync_batchnorm(Residual().to(dtype))


def test_one_node_per_layer_and_one_backward_ends():
    model = SelfDataParallel(residual(), ["cpu"] * 8)
    loss = sum(y.sum() for y in model(torch.randn(9, 3, 5, 5, dtype=torch.float64)))
    exchanges = [node for node in nodes_of(loss) if "BatchNorm" in node.name()]
    assert len(exchanges) == 2
    # All devices lead into the node: 8 inputs, weight and bias.
    for node in exchanges:
        assert sum(following is not None for following, _ in node.next_functions) == 10
    within(60, loss.backward)
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("replicate", (False, True))
@pytest.mark.parametrize("sizes", ([3, 3], [1, 0, 5], [1, 1, 1, 1, 1, 1]), ids=str)
def test_whole_model_agrees_with_one_device(sizes, replicate):
    """Three steps in float64. Both compute the same sums in other orders, at most 10^3 terms each:
    1e-10 leaves room for 10^6 roundings of 2^-53, relative to values of about 1."""
    one, many = residual(), residual()
    parallel = SelfDataParallel(many, ["cpu"] * len(sizes), replicate)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (one, many)]
    for seed in range(3):
        x = torch.randn(6, 3, 5, 5, generator=torch.Generator().manual_seed(seed)).double()
        losses = one(x).square().mean(), torch.cat(parallel(x.split(sizes))).square().mean()
        for optimizer, loss in zip(optimizers, losses):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert one.bn1.num_batches_tracked == many.bn1.num_batches_tracked == 3
    assert_near(many, one)


@pytest.mark.parametrize("compiled", (False, True))
def test_replicated_gradients_are_summed_in_device_order_exact(compiled):
    """1, 2^24 and -2^24: only from left to right is the sum in float32 0 and not 1."""
    model = nn.Linear(1, 1, bias=False)
    if compiled:  # the copies are not
        model.compile(backend="eager")
    parallel = SelfDataParallel(model, ["cpu"] * 3, replicate=True)
    sum(y.sum() for y in parallel(torch.tensor([[1.0], [2.0**24], [-(2.0**24)]]))).backward()
    assert model.weight.grad.item() == 0


class Echo(nn.Module):
    def forward(self, *inputs, **named):
        return inputs, named


def test_arguments_are_cut_as_pytorchs_data_parallel_cuts_them_exact(monkeypatch):
    """Where shares are of one size; its own split takes GPUs alone."""

    class Scatter:
        apply = staticmethod(lambda devices, sizes, dim, x: x.chunk(len(devices), dim))

    monkeypatch.setattr(scatter_gather, "Scatter", Scatter)
    x, pair = torch.arange(8.0).view(8, 1), collections.namedtuple("pair", "a b")
    inputs = x, "word", None, [x + 1, 3], (x + 2, {"key": x + 3}), pair(x + 4, 5), [], (), {}
    named = {"key": x + 6, "others": collections.OrderedDict(a=[x], b=2)}
    parallel = SelfDataParallel(Echo(), ["cpu"] * 4)
    for args, kwargs in ((inputs, named), (inputs, {}), ((x,), {}), ((), named)):
        got = tree_flatten(parallel(*args, **kwargs))
        expected = zip(*scatter_gather.scatter_kwargs(args, kwargs, range(4)))
        expected = tree_flatten([(own, others) for own, others in expected])
        assert got[1] == expected[1]
        for a, b in zip(got[0], expected[0]):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a is b
    uneven = parallel(x, key=torch.arange(10))
    assert [len(others["key"]) for _, others in uneven] == [3, 3, 2, 2]
    few = parallel([x[:2]], key=x[:2])
    assert [len(own[0][0]) for own, _ in few] == [1, 1, 0, 0]


@pytest.mark.parametrize("replicate", (False, True))
def test_a_residual_and_a_mask_by_position_and_by_name_exact(replicate):
    layers = [new_layer(3) for _ in range(3)]
    x, residual, mask = torch.randn(7, 3, 4), torch.randn(7, 3, 4), torch.rand(7, 4) < 0.7
    expected = layers[0](x, residual, mask)
    first, second = (SelfDataParallel(own, ["cpu"] * 3, replicate) for own in layers[1:])
    assert torch.equal(torch.cat(first(x, residual, mask)), expected)
    assert torch.equal(torch.cat(second(x, mask=mask, residual=residual)), expected)
    for layer in layers[1:]:
        assert_same_layers(layer, layers[0])


def test_devices_run_in_turns_in_their_order():
    order, model = [], residual()
    for name in ("stem", "conv", "head"):
        module = getattr(model, name)
        module.register_forward_hook(lambda m, i, o, name=name: order.append((name, len(o))))
    threads = threading.active_count()
    SelfDataParallel(model, ["cpu"] * 3)([torch.randn(k, 3, 4, 4).double() for k in (1, 2, 3)])
    assert order == list(itertools.product(("stem", "conv", "head"), (1, 2, 3)))
    assert threading.active_count() == threads


@pytest.mark.parametrize("replicate", (False, True))
def test_evaluation_is_per_device_exact(replicate):
    layer = new_layer(3)
    layer(torch.randn(8, 3, 2))
    before = copy.deepcopy(layer.state_dict())
    model = SelfDataParallel(layer, ["cpu"] * 2, replicate).eval()
    x = torch.randn(5, 3, 2)
    ys = model(x)
    assert [y.shape[0] for y in ys] == [3, 2]
    expected = torch.nn.functional.batch_norm(
        x, layer.running_mean, layer.running_var, layer.weight, layer.bias
    )
    assert torch.equal(torch.cat(ys), expected)
    assert torch.equal(torch.cat(layer([x[:1], x[1:]])), expected)
    assert all(torch.equal(v, before[k]) for k, v in layer.state_dict().items())
    torch.cat(ys).sum().backward()
    assert layer.weight.grad is not None


def test_autocast_reaches_the_devices():
    model = SelfDataParallel(residual(torch.float32), ["cpu"] * 3)
    seen = []
    model.module.bn1.register_forward_hook(lambda m, i, o: seen.append((i[0].dtype, o.dtype)))
    for dtype in (torch.bfloat16, torch.float16):
        seen.clear()
        with torch.autocast("cpu", dtype):
            ys = model(torch.randn(5, 3, 6, 6))
        assert [y.dtype for y in ys] == [dtype] * 3
        assert seen == [(dtype, dtype)] * 3
    sum(y.float().sum() for y in ys).backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    assert not any(y.dtype != torch.float32 for y in model(torch.randn(5, 3, 6, 6)))


class Around(torch.autograd.Function):
    """Runs a layer in its forward, where PyTorch ends gradient and forward mode."""

    @staticmethod
    def forward(ctx, x, layer):
        return layer(x)


def test_modes_of_the_thread_are_as_before():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn = syncbn.SyncBatchNorm(3)

        def forward(self, x):
            return Around.apply(x, self.bn)

    x = torch.randn(6, 3)
    SelfDataParallel(Model(), ["cpu"] * 3)(x)
    assert torch.is_grad_enabled()
    with forward_ad.dual_level():
        assert forward_ad.unpack_dual(forward_ad.make_dual(x, x)).tangent is not None


def test_replicas_of_modules_with_state():
    """Plain layers: the first device's buffers stay; frozen, tied and recurrent parameters."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.plain = nn.BatchNorm1d(3)
            self.sync = syncbn.SyncBatchNorm(3)
            self.frozen = nn.Linear(3, 3).requires_grad_(False)
            self.a = nn.Linear(3, 3, bias=False)
            self.b = nn.Linear(3, 3, bias=False)
            self.b.weight = self.a.weight
            self.lstm = nn.LSTM(3, 3)

        def forward(self, x):
            assert len(list(self.parameters())) == 11
            y = self.b(self.a(self.frozen(self.sync(self.plain(x)))))
            return self.lstm(y)[0]

    torch.manual_seed(7)
    model = Model().double()
    shared = copy.deepcopy(model)
    x = torch.randn(6, 3, dtype=torch.float64)
    ys = SelfDataParallel(model, ["cpu"] * 2, replicate=True)(x)
    zs = SelfDataParallel(shared, ["cpu"] * 2)(x)
    assert all(torch.equal(y, z) for y, z in zip(ys, zs, strict=True))
    for outputs in (ys, zs):
        torch.cat(outputs).square().sum().backward()
    for (name, p), q in zip(model.named_parameters(), shared.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None) == name.startswith("frozen")
        if p.grad is not None:  # two summands of each, in either order
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-12, msg=name)
    # var of the first share alone; the shared module has seen both.
    plain = nn.BatchNorm1d(3).double()
    plain(x[:3])
    assert torch.equal(model.plain.running_var, plain.running_var)
    plain(x[3:])
    assert torch.equal(shared.plain.running_var, plain.running_var)


@pytest.mark.parametrize("replicate", (False, True))
def test_each_device_has_random_numbers_of_its_own_exact(replicate):
    """Device k those of torch.manual_seed(seed + k), in all models and steps after the seed."""
    x, dropout = torch.ones(6, 5), nn.Dropout(0.5)
    models = [SelfDataParallel(dropout, ["cpu"] * k, replicate) for k in (2, 3)]
    torch.manual_seed(9)
    steps, after = [model(x) for model in (*models, *models)], torch.rand(3)
    for k in range(3):
        torch.manual_seed(9 + k)
        for ys in steps:
            if k < len(ys):
                assert torch.equal(ys[k], dropout(torch.ones_like(ys[k])))
        if k == 0:
            assert torch.equal(after, torch.rand(3))


def test_compiled_models_meet_at_their_layers_exact():
    x = torch.randn(6, 3, 5, 5).double()
    expected = SelfDataParallel(residual(), ["cpu"] * 3)(x)
    compiled = torch.compile(residual(), backend="aot_eager")
    compiled(x)  # compiled for one device first
    ys = SelfDataParallel(compiled, ["cpu"] * 3)(x)
    assert all(torch.equal(y, z) for y, z in zip(ys, expected, strict=True))


@pytest.mark.parametrize("name", ("Kept", "patched", "Recurrent", "WrittenBuffers"))
def test_programs_that_hold_modules_are_those_of_the_device_exact(name):
    """Each device has its parameters wherever the program finds the module. With two devices the
    sum of a gradient has one order; buffers are the first device's."""
    found = []
    for replicate in (False, True):
        torch.manual_seed(2)
        network, _ = share_programs.made(share_programs.EQUAL[name])
        network = syncbn.convert_sync_batchnorm(network)
        model = SelfDataParallel(network, ["cpu"] * 2, replicate)
        x = torch.randn(6, 4).split(3)
        sum(y.square().sum() for y in model(x)).backward()
        found.append([p.grad for p in network.parameters() if p.requires_grad])
        if replicate and name == "WrittenBuffers":
            assert network.n == 1 and not torch.equal(network.wide, torch.zeros(8))
    if name != "WrittenBuffers":
        assert all(map(torch.equal, *found))


def test_copies_and_pickles():
    model = SelfDataParallel(residual(), ["cpu"] * 2)
    x = torch.randn(4, 3, 5, 5).double()
    others = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    expected = model(x)
    for other in others:
        assert all(torch.equal(y, z) for y, z in zip(other(x), expected, strict=True))
        assert list(other.state_dict()) == [f"module.{key}" for key in residual().state_dict()]
