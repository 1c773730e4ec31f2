# SPDX-License-Identifier: Apache-2.0
"""Forking networks: what is common, what a target computes, shared variables, immutability."""

import copy
import inspect
import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import syncbn
from support import Operators
from syncbn.graph import BatchNorm, Network, batch_norm_layer


class Model(nn.Module):
    """A residual connection over the fork, dropout, and a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1)
        self.bn1 = BatchNorm(4)
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1)
        self.bn2 = BatchNorm(4, use_global_est=True, momentum=0.5)
        self.drop = nn.Dropout(0.5)
        self.fc = nn.Linear(4, 2)
        self.shift = nn.Parameter(torch.ones(2))

    def forward(self, x):
        first = self.conv1(x)
        h = F.relu(self.bn1(first))
        h = self.bn2(self.conv2(h)) + first
        h = F.dropout(h, 0.25, self.training)
        return self.fc(self.drop(h).mean((2, 3))) + self.shift


def images(seed=0, n=4):
    return torch.randn(n, 3, 6, 6, generator=torch.Generator().manual_seed(seed))


def counted(function) -> dict[str, int]:
    with Operators() as operators:
        function()
    names = [f"{n} is_infer={a[6]}" if n == "batch_norm" else n for n, a in operators.calls]
    interesting = ("convolution", "addmm", "bernoulli_", "batch_norm", "nll_loss_forward")
    return {n: names.count(n) for n in sorted(set(names)) if n.startswith(interesting)}


def test_runs_only_what_the_target_depends_on():
    net = Network(Model(), loss=F.cross_entropy)
    x, target = images(), torch.tensor([0, 1, 0, 1])
    assert counted(lambda: net.train(x, target=target)) == {
        "addmm": 1,
        "batch_norm is_infer=False": 2,
        "convolution": 2,
        "bernoulli_": 2,
        "nll_loss_forward": 1,
    }
    assert counted(lambda: net.infer(x)) == {
        "addmm": 1,
        "batch_norm is_infer=True": 2,
        "convolution": 2,
    }
    assert counted(lambda: net.run("conv1", x)) == {"convolution": 1}
    assert counted(lambda: net.run("bn1_infer", x)) == {
        "batch_norm is_infer=True": 1,
        "convolution": 1,
    }


def test_both_branches_are_the_model_in_its_two_modes_exact():
    model = Model()
    expected = copy.deepcopy(model)
    net = Network(model)
    model.eval()  # the network does not look at the modes of the modules
    for step in range(3):
        x = images(step)
        torch.manual_seed(step)
        y = net.train(x)
        torch.manual_seed(step)
        want = expected.train()(x)
        assert torch.equal(y, want)
        y.square().sum().backward()
        want.square().sum().backward()
        assert torch.equal(net.infer(x), expected.eval()(x))
    for (name, value), other in zip(
        model.state_dict().items(), expected.state_dict().values(), strict=True
    ):
        assert torch.equal(value, other), name
    for (name, value), other in zip(
        model.named_parameters(), expected.named_parameters(), strict=True
    ):
        assert torch.equal(value.grad, other[1].grad), name
    assert not any(module.training for module in model.modules())
    assert not net.infer(x).requires_grad


def test_prints_the_fork():
    model = nn.Sequential()
    for name, module in (
        ("conv1", nn.Conv2d(3, 4, 3)),
        ("bn1", BatchNorm(4)),
        ("relu", nn.ReLU()),
    ):
        model.add_module(name, module)
    variables = "bn1.estimated_mean, bn1.estimated_var, bn1.scale, bn1.bias, bn1.batches"
    options = "use_global_est=False, epsilon=1e-06, momentum=0.99"
    assert str(Network(model, loss=F.mse_loss)) == (
        "common:\n"
        "  input_1 = input\n"
        "  conv1 = Conv2d(input_1)\n"
        "train:\n"
        f"  bn1_train = batch_norm_(conv1, {variables}, is_infer=False, {options})\n"
        "  bn1_train_y = bn1_train.y\n"
        "  relu_train = ReLU(bn1_train_y)\n"
        "  target = input\n"
        "  loss = mse_loss(relu_train, target)\n"
        "  return loss\n"
        "infer:\n"
        f"  bn1_infer = batch_norm_(conv1, {variables}, is_infer=True, {options})\n"
        "  bn1_infer_y = bn1_infer.y\n"
        "  relu_infer = ReLU(bn1_infer_y)\n"
        "  return relu_infer"
    )


def test_attributes_cannot_be_changed():
    model = Model()
    net = Network(model)
    with pytest.raises(AttributeError, match="epsilon"):
        model.bn1.attributes.epsilon = 1.0
    with pytest.raises(AttributeError, match="attributes"):
        model.bn1.attributes = model.bn2.attributes
    node = next(node for node in net.graph.nodes if node.name == "bn1_train")
    with pytest.raises(TypeError, match="immutable"):
        node.kwargs["is_infer"] = True


def test_the_loop_of_the_design():
    model = Model()
    data = [(images(i), torch.tensor([0, 1, 1, 0])) for i in range(3)]
    net = Network(model, loss=F.cross_entropy, data=data)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    test_image = images(9, n=1)
    outputs = []
    for pass_id in range(5):
        optimizer.zero_grad()
        net.train().backward()
        optimizer.step()
        if pass_id % 2 == 0:
            outputs.append(net.infer(test_image))
    assert model.bn1.batches.item() == 5  # the data started again
    assert not torch.equal(outputs[0], outputs[1]) and outputs[0].shape == (1, 2)


def test_built_node_by_node_exact():
    torch.manual_seed(0)
    linear, scale, bias = nn.Linear(5, 3), nn.Parameter(torch.rand(3)), nn.Parameter(torch.rand(3))
    net = Network()
    x = net.input()
    hidden = net.append(linear, x, name="fc1")
    normal = batch_norm_layer(net, hidden, "bn", scale, bias, momentum=0.75)
    skip = net.append(operator.add, torch.relu(normal), hidden)
    net.output(net.append(F.dropout, skip * 2, 0.5, True))
    data = torch.randn(7, 5)
    layer = BatchNorm(3, momentum=0.75)
    layer.scale, layer.bias = scale, bias
    with torch.no_grad():
        hidden = linear(data)
        torch.manual_seed(1)
        expected = F.dropout((torch.relu(layer(hidden)) + hidden) * 2, 0.5, True)
        torch.manual_seed(1)
        assert torch.equal(net.train(data), expected)
        expected = (torch.relu(layer.eval()(hidden)) + hidden) * 2
        assert torch.equal(net.infer(x=data), expected)
    assert torch.equal(net.module.bn.estimated_var, layer.estimated_var)
    assert {id(p) for p in net.parameters()} == {id(p) for p in (*linear.parameters(), scale, bias)}
    # As in the design document of batch_norm_op.
    arguments = inspect.signature(batch_norm_layer).parameters.values()
    assert [a.name for a in arguments][:5] == ["net", "input", "output", "scale", "bias"]
    names = {"use_global_est": False, "epsilon": 1e-6, "momentum": 0.99}
    assert list(names.items()) == [(a.name, a.default) for a in arguments][5:8]


def plain_model():
    torch.manual_seed(2)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, eps=1e-3, momentum=0.25), nn.ReLU())


@pytest.mark.parametrize(
    "convert", (lambda m: m, syncbn.convert_sync_batchnorm), ids=("plain", "sync")
)
def test_converted_layers_exact(convert):
    model = convert(plain_model())
    reference = syncbn.convert_sync_batchnorm(copy.deepcopy(model))
    net = Network(model, convert=True)
    kind = type(model[1])
    x, later = images(), images(1)
    y = net.train(x)
    assert torch.equal(y, reference(x))
    # The model keeps its layer, whose buffers are the variables; the first batch is assigned.
    assert type(model[1]) is kind and model[1].num_batches_tracked == 1
    hidden = model[0](x).detach()
    biased = syncbn.ops.batch_norm(
        hidden, *(torch.zeros(4, dtype=torch.float64),) * 2, None, None, torch.tensor([0])
    )
    assert torch.equal(model[1].running_mean, biased.batch_mean.float())
    assert torch.equal(model[1].running_var, biased.batch_var.float())
    # Then momentum is PyTorch's, the share of the batch.
    net.train(later)
    new = syncbn.ops.batch_norm(
        model[0](later).detach(), biased.saved_mean, biased.saved_var, None, None, torch.tensor([0])
    )
    expected = 0.75 * biased.batch_mean.float().double() + 0.25 * new.batch_mean
    # Rounded to float32 once, after operations in float64.
    bound = 2.0**-23 * expected.abs()
    assert ((model[1].running_mean.double() - expected).abs() <= bound).all()
    assert net.infer(x).shape == y.shape


@pytest.mark.parametrize(
    "module",
    (
        nn.Dropout(0.5),
        nn.RReLU(),
        nn.InstanceNorm1d(4, track_running_stats=True),
        nn.Sequential(nn.Dropout(0.5)),
    ),
    ids=lambda m: type(m).__name__,
)
def test_forks_before_the_batch_norm_where_modes_differ_exact(module):
    model = nn.Sequential(nn.Conv1d(4, 4, 1), module, BatchNorm(4))
    net = Network(model)
    assert [
        n.name for n in net.graph.nodes if n.op == "call_module" and n.meta["branch"] is None
    ] == ["_0"]
    x = torch.randn(3, 4, 5)
    expected = copy.deepcopy(model)
    torch.manual_seed(3)
    y = net.train(x)
    torch.manual_seed(3)
    assert torch.equal(y, expected(x))
    assert torch.equal(net.infer(x), expected.eval()(x))
    assert all(m.training for m in model.modules())


def refused(text, function, *args, **options):
    with pytest.raises(ValueError, match=text):
        function(*args, **options)


def test_refused_runs():
    model, x = Model(), images()
    net = Network(model)
    refused("data: got none, expected a source of batches", net.train)
    refused("data: got no batch, expected at least one", Network(Model(), data=[]).train)
    refused("target: got 'bn3', expected 'train', 'infer' or a node's name", net.run, "bn3", x)
    refused(r"inputs of 'infer': got 0 by position and \[\] by name, expected", net.infer)
    refused(r"got 2 by position and \[\] by name, expected \['x'\]", net.infer, x, x)
    refused(r"got 1 by position and \['x'\] by name, expected \['x'\]", net.infer, x, x=x)
    refused(r"got 0 by position and \['y'\] by name, expected \['x'\]", net.infer, y=x)
    assert model.bn1.batches.item() == 0


def test_refused_models():
    class Named(nn.Module):
        def forward(self, target):
            return target

    no_average = nn.Sequential(nn.BatchNorm1d(2, momentum=None))
    summed = nn.Sequential(syncbn.SyncBatchNorm(2, affine_grad="global"))
    untracked = nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False))
    text = "model: got BatchNorm2d at '1', expected syncbn.graph.BatchNorm, or convert=True"
    refused(text, Network, plain_model())
    refused("momentum of 0: got None, expected a number", Network, no_average, convert=True)
    refused("track_running_stats of 0: got False, expected", Network, untracked, convert=True)
    refused("affine_grad of 0: got 'global', expected 'share'", Network, summed, convert=True)
    refused("loss: got one for a network with an input", Network, Named(), loss=F.mse_loss)
    refused(r"momentum: got 2.0, expected a number in \[0, 1\]", BatchNorm, 3, momentum=2.0)
    refused("epsilon: got -1.0, expected a finite number", BatchNorm, 3, epsilon=-1.0)


def test_refused_building():
    net = Network()
    x, one = net.input(), nn.Parameter(torch.ones(3))
    refused("name: got 'x', expected one that is not taken", net.input)
    refused("scale: got .*Tensor.*, expected", batch_norm_layer, net, x, "y", torch.ones(3), one)
    text = r"bias: got shape \(2,\), expected a parameter"
    refused(text, batch_norm_layer, net, x, None, one, nn.Parameter(torch.ones(2)))
    text = "output: got Parameter, expected a name, or None"
    refused(text, batch_norm_layer, net, x, one, one, one)
    net.append(nn.ReLU(), x, name="relu")
    text = "name: got 'relu', expected one that is not taken"
    refused(text, net.append, nn.ReLU(), x, name="relu")
    with pytest.raises(RuntimeError, match="the network has no output yet"):
        net.infer(torch.ones(1))
    net.output(x)
    with pytest.raises(RuntimeError, match="the network is complete"):
        net.append(nn.ReLU(), x)


@pytest.mark.parametrize("assign", (False, True))
@pytest.mark.parametrize("make, convert", ((Model, False), (plain_model, True)))
def test_a_network_is_a_module_exact(make, convert, assign):
    """Its state goes to another one, also to another dtype, whichever tensors hold it then."""
    first, second = (Network(make(), convert=convert) for _ in range(2))
    with torch.no_grad():
        for p in second.parameters():
            p.add_(1)
    assert list(first.state_dict()) == [f"module.{name}" for name in first.module.state_dict()]
    assert {id(p) for p in first.parameters()} == {id(p) for p in first.module.parameters()}
    first.train(images())
    second.load_state_dict(first.state_dict(), assign=assign)
    assert torch.equal(second.infer(images()), first.infer(images()))
    assert first.double() is first and second.module.double() is second.module
    for seed in range(2):
        ys = []
        for net in (first, second):
            torch.manual_seed(seed)
            ys.append(net.train(images(seed).double()))
        assert torch.equal(*ys) and ys[0].dtype == torch.float64
    for (name, value), other in zip(first.state_dict().items(), second.state_dict().values()):
        assert torch.equal(value, other), name
        assert value.is_floating_point() == (value.dtype == torch.float64)


def test_a_call_runs_the_branch_of_the_mode_exact():
    data = [(images(k), torch.tensor([0, 1, 0, 1])) for k in range(2)]
    net, other = (Network(Model(), loss=nn.CrossEntropyLoss(), data=data) for _ in range(2))
    other.load_state_dict(net.state_dict())
    outer = nn.Sequential(net)
    for seed in range(2):
        losses = []
        for train in (outer.train()[0], other.train):
            torch.manual_seed(seed)
            losses.append(train())
        assert torch.equal(*losses)
    assert outer.eval()[0] is net and not net.training and not net.module.bn1.training
    y = net(images(5))
    assert torch.equal(y, other.infer(images(5))) and y.requires_grad
    assert net.train(True) is net and net.module.bn1.training
    assert torch.equal(net.module.bn1.batches, torch.tensor([2]))
