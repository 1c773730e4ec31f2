# SPDX-License-Identifier: Apache-2.0
"""The same network, trained in PyTorch and in JAX, has the same bits in both."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from jax.sharding import PartitionSpec as P
from torch import nn

import syncbn
import syncbn_jax
from jax_support import MOMENTUM, check_equal, mesh_of, samples

STEPS = 12
RATE = 2.0**-6  # so that a fused multiply and add rounds as the two do


class InTorch(nn.Module):
    """Two layers with an activation and a residual: between the layers nothing rounds more than
    once, so that both frameworks give the layers equal inputs."""

    def __init__(self):
        super().__init__()
        options = {"momentum": 1 - MOMENTUM, "affine_grad": "global"}
        self.first, self.second = (syncbn.SyncBatchNorm(5, **options) for _ in range(2))

    def forward(self, x):
        return self.second(torch.relu(self.first(x)) + x)


class InJax(nnx.Module):
    def __init__(self):
        options = {"momentum": MOMENTUM, "axis_name": "a", "rngs": nnx.Rngs(0)}
        self.first, self.second = (syncbn_jax.BatchNorm(5, **options) for _ in range(2))

    def __call__(self, x):
        return self.second(jax.nn.relu(self.first(x)) + x)


def train_in_torch(x, target):
    model = InTorch()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    x, target = (torch.from_numpy(a).movedim(-1, 1) for a in (x, target))
    for _ in range(STEPS):
        optimizer.zero_grad()
        y = model(x)
        (y * target).sum().backward()
        optimizer.step()
    names = {"weight": "scale", "bias": "bias", "running_mean": "mean", "running_var": "var"}
    found = {"y": y.detach().movedim(1, -1)}
    for layer in ("first", "second"):
        for theirs, ours in names.items():
            found[f"{layer}.{ours}"] = getattr(getattr(model, layer), theirs).detach()
    return {key: value.numpy() for key, value in found.items()}


def train_in_jax(x, target, devices):
    graph, state = nnx.split(InJax())

    def local(state, x, target):
        model = nnx.merge(graph, state)

        def loss(model):
            y = model(x)
            return (y * target).sum(), y

        (_, y), gradients = nnx.value_and_grad(loss, has_aux=True)(model)
        parameters = nnx.state(model, nnx.Param)
        nnx.update(model, jax.tree.map(lambda p, g: p - RATE * g, parameters, gradients))
        return nnx.state(model), y

    specs = {"in_specs": (P(), P("a"), P("a")), "out_specs": (P(), P("a"))}
    step = jax.jit(jax.shard_map(local, mesh=mesh_of(devices), **specs))
    for _ in range(STEPS):
        state, y = step(state, x, target)
    layers = nnx.to_pure_dict(state)
    found = {f"{layer}.{key}": a for layer, of in layers.items() for key, a in of.items()}
    return {"y": y, **found}


@pytest.mark.parametrize("devices", (1, 4))
def test_trains_as_in_pytorch_exact(devices):
    x, target, *_ = (a.astype(np.float32) for a in samples(shape=(8, 6, 7, 5)))
    check_equal(train_in_jax(x, target, devices), train_in_torch(x, target))


@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
def test_a_large_layer_is_pytorchs_exact(dtype):
    """Large enough for all threads, and for several devices' messages."""
    rng = np.random.default_rng(3)
    x, dy = (rng.standard_normal((16, 28, 28, 96)).astype(np.float32) for _ in range(2))
    layer = syncbn.SyncBatchNorm(96, affine_grad="global")
    given = torch.from_numpy(x).to(getattr(torch, dtype)).movedim(-1, 1).requires_grad_()
    y = layer(given)
    y.backward(torch.from_numpy(dy).to(y.dtype).movedim(-1, 1))
    wanted = {"y": y.detach(), "dx": given.grad}
    wanted = {key: a.movedim(1, -1).double().numpy() for key, a in wanted.items()}
    wanted |= {"dscale": layer.weight.grad.numpy(), "dbias": layer.bias.grad.numpy()}

    def local(x, dy):
        state = {"mean": jnp.zeros(96), "var": jnp.ones(96)}
        train = lambda *a: syncbn_jax.batch_norm(*a, state, axis_name="a")[0]  # noqa: E731
        y, pull = jax.vjp(train, x, jnp.ones(96), jnp.zeros(96))
        return dict(zip(("y", "dx", "dscale", "dbias"), (y, *pull(dy))))

    divided = dict.fromkeys(("y", "dx"), P("a")) | dict.fromkeys(("dscale", "dbias"), P())
    run = jax.shard_map(local, mesh=mesh_of(2), in_specs=P("a"), out_specs=divided)
    check_equal(jax.jit(run)(*(jnp.asarray(a, dtype) for a in (x, dy))), wanted)
