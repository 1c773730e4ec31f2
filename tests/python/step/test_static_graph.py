# SPDX-License-Identifier: Apache-2.0
"""A training step as one static graph: torch.compile without graph breaks, and torch.fx."""

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd

import syncbn
from support import assert_same_layers


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
    assert_same_layers(model, reference)


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


@pytest.mark.parametrize("tracer", (fx.Tracer, LeafTracer))
def test_traced_model_trains_exact(tracer):
    model, reference = new_net(), new_net()
    traced = fx.GraphModule(model, tracer().trace(model))
    calls = [node.target for node in traced.graph.nodes if node.op == "call_module"]
    assert [target for target in calls if target in LAYERS] == list(LAYERS)
    assert_same_training(traced, reference)
    # The graph's modules are the model's own.
    assert traced.bn1 is model.bn1
