# SPDX-License-Identifier: Apache-2.0
"""A training step as one static graph: torch.compile without graph breaks, and torch.fx."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd

import syncbn
from syncbn.functional import sync_batch_norm
from syncbn.step.autograd import train_step


class Net(nn.Module):
    """Three synchronized layers, one of them used in a residual branch."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.bn1 = syncbn.SyncBatchNorm(6)
        self.conv2 = nn.Conv2d(6, 6, 3, padding=1, groups=2)
        self.bn2 = syncbn.SyncBatchNorm(6, momentum=None)
        self.head = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4), syncbn.SyncBatchNorm(4)
        )

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        return self.head(F.relu(self.bn2(self.conv2(x)) + x))


LAYERS = ("bn1", "bn2", "head.3")


def new_net():
    torch.manual_seed(11)
    return Net()


def train(model, parameters, seed=0, samples=4, steps=3):
    """The outputs of each step; SGD with momentum changes the parameters in place."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    outputs = []
    for _ in range(steps):
        x = torch.randn(samples, 3, 6, 6, generator=generator)
        optimizer.zero_grad()
        y = model(x)
        y.square().sum().backward()
        optimizer.step()
        outputs.append(y.detach())
    return outputs


def assert_same_training(model, reference, **options):
    """Outputs, gradients, parameters and buffers after some steps have the same bits."""
    expected = train(reference, list(reference.parameters()), **options)
    got = train(model, list(model.parameters()), **options)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    ours, theirs = dict(model.named_parameters()), dict(reference.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, parameter in ours.items():
        assert torch.equal(parameter, theirs[name]), name
        assert torch.equal(parameter.grad, theirs[name].grad), f"gradient of {name}"
    ours, theirs = model.state_dict(), reference.state_dict()
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


class Graphs:
    """A backend that runs graphs as they are and counts them and the layers' steps in them."""

    def __init__(self):
        self.forward, self.backward = [], []
        self.backend = aot_autograd(
            fw_compiler=self._keep(self.forward), bw_compiler=self._keep(self.backward)
        )

    @staticmethod
    def _keep(counts):
        def compiler(graph, _):
            names = [str(node.target) for node in graph.graph.nodes]
            counts.append(sum("training_step" in name for name in names))
            return make_boxed_func(graph.forward)

        return compiler


class LeafTracer(fx.Tracer):
    def is_leaf_module(self, m, module_qualified_name):
        return isinstance(m, syncbn.SyncBatchNorm) or super().is_leaf_module(
            m, module_qualified_name
        )


def traced_by_subclass(model):
    return fx.GraphModule(model, LeafTracer().trace(model))


TRACERS = (fx.symbolic_trace, traced_by_subclass)


def test_compiled_step_is_one_graph_exact():
    graphs, model, reference = Graphs(), new_net(), new_net()
    # Compiled in place, so that parameters keep their names.
    model.compile(backend=graphs.backend, fullgraph=True)
    assert_same_training(model, reference)
    assert len(graphs.forward) == len(graphs.backward) == 1


@pytest.mark.parametrize("trace", TRACERS)
def test_traced_model_trains_exact(trace):
    model, reference = new_net(), new_net()
    traced = trace(model)
    calls = [node.target for node in traced.graph.nodes if node.op == "call_module"]
    assert [target for target in calls if target in LAYERS] == list(LAYERS)
    assert_same_training(traced, reference)
    # The graph's modules are the model's own.
    assert traced.bn1 is model.bn1


@pytest.mark.parametrize("trace", TRACERS)
def test_mode_is_not_part_of_the_graph(trace):
    model = new_net()
    traced = trace(model)
    train(traced, list(traced.parameters()))
    x = torch.randn(2, 3, 6, 6)
    traced.eval()
    before = copy.deepcopy(traced.state_dict())
    assert not model.bn1.training and torch.equal(traced(x), model(x))
    assert all(torch.equal(value, before[name]) for name, value in traced.state_dict().items())
    evaluated = trace(new_net().eval()).train()
    assert_same_training(evaluated, new_net())


def test_tracers_that_follow_calls_see_the_layer():
    """What feature extractors rely on: call_module runs, and the node knows its module."""
    called = []

    class Follower(fx.Tracer):
        def call_module(self, m, forward, args, kwargs):
            called.append(self.path_of_module(m))
            return super().call_module(m, forward, args, kwargs)

    graph = Follower().trace(new_net())
    assert [name for name in called if name in LAYERS] == list(LAYERS)
    for node in graph.nodes:
        if node.target in LAYERS:
            path, kind = list(node.meta["nn_module_stack"].values())[-1]
            assert (path, kind) == (node.target, syncbn.SyncBatchNorm)


class Halves(nn.Module):
    """Two devices of one process, as the layer takes them: a list of inputs, and of residuals."""

    def __init__(self):
        super().__init__()
        self.bn = syncbn.SyncBatchNorm(3)

    def forward(self, x):
        return torch.cat(self.bn([x[:1], x[1:]], residual=[x[:1], x[1:]]))


def test_list_of_inputs_is_one_call_exact():
    model, x = Halves(), torch.randn(4, 3, 2)
    traced = fx.symbolic_trace(copy.deepcopy(model))
    assert [n.target for n in traced.graph.nodes if n.op == "call_module"] == ["bn"]
    assert not any(n.op == "get_attr" for n in traced.graph.nodes)
    for mode in (True, False):
        assert torch.equal(traced.train(mode)(x), model.train(mode)(x))
    assert torch.equal(traced.bn.running_var, model.bn.running_var)


def test_traced_model_compiles_copies_and_pickles_exact():
    traced = fx.symbolic_trace(new_net())
    for other in (copy.deepcopy(traced), pickle.loads(pickle.dumps(traced))):
        assert_same_training(other, new_net())
    graphs = Graphs()
    traced.compile(backend=graphs.backend, fullgraph=True)
    assert_same_training(traced, new_net())
    assert len(graphs.forward) == len(graphs.backward) == 1


def test_layer_on_its_own_exact():
    layer, reference = syncbn.SyncBatchNorm(3), syncbn.SyncBatchNorm(3)
    traced = fx.symbolic_trace(layer)
    steps = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert steps.count(train_step) == 1
    for seed in range(3):
        x = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(traced(x), reference(x))
    for name, value in reference.named_buffers():
        assert torch.equal(dict(layer.named_buffers())[name], value), name


def test_function_exact():
    class Function(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([1.0, -2.0, 0.5]))
            self.register_buffer("mean", torch.zeros(3))
            self.register_buffer("var", torch.ones(3))

        def forward(self, x):
            y = sync_batch_norm(x, self.mean, self.var, self.weight, training=True) + 1
            return sync_batch_norm(y, self.mean, self.var, training=False)

    traced = fx.symbolic_trace(Function())
    assert sum(node.target is sync_batch_norm for node in traced.graph.nodes) == 2
    assert_same_training(traced, Function())
