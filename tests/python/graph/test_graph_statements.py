# SPDX-License-Identifier: Apache-2.0
"""Forking networks of models that write in place, assert, or pass their mode to a function."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from syncbn.functional import sync_batch_norm
from syncbn.graph import BatchNorm, Network
from syncbn.ops import batch_norm_


class Model(nn.Module):
    """A convolution, a batch normalization and a buffer, for the forward of a subclass."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv1d(3, 4, 1)
        self.bn = BatchNorm(4)
        self.relu = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.5, inplace=True)
        self.register_buffer("calls", torch.zeros(1))


class Methods(Model):
    def forward(self, x):
        h = self.conv(x)
        h.relu_()
        y = self.bn(h)
        y.clamp_(min=0)
        return y


class BeforeTheFork(Model):
    def forward(self, x):
        h = self.conv(x)
        h.mul_(0.5)
        return self.bn(h) + h


class OverView(Model):
    def forward(self, x):
        h = self.conv(x)
        h[:, 0].zero_()
        y = self.bn(h)
        y.flatten(1)[:, 1:3].fill_(7.0)
        return y


class ModulesWithoutResult(Model):
    def forward(self, x):
        h = self.conv(x)
        self.relu(h)
        y = self.bn(h)
        F.leaky_relu(y, 0.5, True)
        scale = y.detach().clone()
        torch.mul(scale, 2, out=scale)
        return y + scale


class CommonWrittenInBranch(Model):
    """h is common, but what it holds after the write is a branch's."""

    def forward(self, x):
        h = self.conv(x)
        h = h.detach()
        y = self.bn(h * 1)
        h.mul_(y.detach().mean((0, 2), keepdim=True))
        later = h + 1
        return y * later


class CommonWrittenByDropout(Model):
    def forward(self, x):
        h = self.conv(x)
        view = h.transpose(1, 2)
        self.drop(h)
        return self.bn(view.transpose(1, 2)) + h


class Buffers(Model):
    """calls is written at each step, before and after the fork."""

    def forward(self, x):
        self.calls.add_(1)
        y = self.bn(self.conv(x)) * 1 + self.calls
        self.calls.add_(y.detach().mean())
        return y + self.calls


class Sequential(Model):
    """As in torchvision: the module's result is used."""

    def forward(self, x):
        h = self.relu(self.conv(x))
        return self.relu(self.bn(h) + h)


MODELS = (
    Methods,
    BeforeTheFork,
    OverView,
    ModulesWithoutResult,
    CommonWrittenInBranch,
    CommonWrittenByDropout,
    Buffers,
    Sequential,
)


def samples(seed=0, channels=3):
    return torch.randn(6, channels, 5, generator=torch.Generator().manual_seed(seed)) + 1


def run(function, x):
    torch.manual_seed(5)
    return function(x)


def assert_same_state(a, b):
    for (name, value), other in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        assert torch.equal(value, other), name


@pytest.mark.parametrize("kind", MODELS)
def test_statements_that_write_exact(kind):
    model, reference = kind(), kind()
    net = Network(model)
    assert_same_state(model, reference)  # tracing writes nothing
    for seed in range(3):
        x = samples(seed)
        y, expected = run(net.train, x), run(reference.train(), x)
        assert torch.equal(y, expected)
        y.sum().backward()
        expected.sum().backward()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            assert p.grad is None or torch.equal(p.grad, q.grad)
        for _ in range(2):
            with torch.no_grad():
                assert torch.equal(run(net.infer, x), run(reference.eval(), x))
        assert_same_state(model, reference)


class Assigns(Model):
    def forward(self, x):
        self.calls = self.calls + 1
        return self.bn(self.conv(x))


class AssignsBySum(Model):
    def forward(self, x):
        self.calls += 1
        return self.bn(self.conv(x))


@pytest.mark.parametrize("kind", (Assigns, AssignsBySum))
def test_assignment_to_a_buffer_is_refused(kind):
    model = nn.Sequential(kind())
    calls = model[0].calls
    with pytest.raises(ValueError, match="model: got an assignment to the buffer '0.calls', expec"):
        Network(model)
    assert model[0].calls is calls and calls.item() == 0


class Asserting(Model):
    def forward(self, x):
        torch._assert(x.shape[0] > 2, "too few")
        y = self.bn(self.conv(x))
        torch._assert(y.max() < 1e6, "too large")
        return y


def test_assertions_run():
    model = Asserting()
    net = Network(model)
    for function in (net.train, net.infer):
        with pytest.raises(AssertionError, match="too few"):
            function(samples()[:2])
    assert model.bn.batches.item() == 0
    with torch.no_grad():
        model.bn.bias.fill_(1e7)
    for function in (net.train, net.infer):
        with pytest.raises(AssertionError, match="too large"):
            function(samples())


class Function(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("var", torch.ones(3))

    def forward(self, x):
        options = {"activation": "leaky_relu", "negative_slope": 0.5, "timeout": 60}
        others = {"sync": False, "engine": "process_group", "training": self.training}
        return sync_batch_norm(x + 1, self.mean, self.var, residual=x, **options, **others)


class Operator(Function):
    def __init__(self):
        super().__init__()
        self.register_buffer("batches", torch.tensor([0]))

    def forward(self, x):
        variables = (self.mean, self.var, None, None, self.batches)
        return batch_norm_(x + 1, *variables, is_infer=not self.training).y


@pytest.mark.parametrize("traced_in_training", (True, False))
@pytest.mark.parametrize("kind", (Function, Operator, lambda: BatchNorm(3)))
def test_functions_of_this_package_fork_exact(kind, traced_in_training):
    model, reference = kind().train(traced_in_training), kind()
    net = Network(model)
    for seed in range(2):
        x = samples(seed)
        before = copy.deepcopy(model.state_dict())
        assert torch.equal(net.infer(x), reference.eval()(x))
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name]), name
        assert torch.equal(net.train(x), reference.train()(x))
        assert_same_state(model, reference)


def test_copy_of_an_incomplete_network_is_refused():
    net = Network()
    net.input()
    with pytest.raises(RuntimeError, match="the network has no output yet"):
        copy.deepcopy(net)
