# SPDX-License-Identifier: Apache-2.0
"""The layer beside flax.nnx.BatchNorm: arguments, variables, checkpoints, results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, serialization
from jax.sharding import PartitionSpec as P

import syncbn_jax
from jax_support import check_equal, mesh_of, samples

X = samples()[0].astype(np.float32)
ARGUMENTS = (
    {},
    {"axis": 1, "num_features": 6},
    {"momentum": 0.5, "epsilon": 1e-2},
    {"use_bias": False},
    {"use_scale": False},
    {"use_scale": False, "use_bias": False},
    {"dtype": jnp.bfloat16},
    {"dtype": jnp.float16, "param_dtype": jnp.float16},
    {"scale_init": nnx.initializers.constant(3), "bias_init": nnx.initializers.normal()},
    {"use_fast_variance": False},
)


def pair(**arguments):
    arguments = {"num_features": 5} | arguments
    kinds = (syncbn_jax.BatchNorm, nnx.BatchNorm)
    return [kind(**arguments, rngs=nnx.Rngs(0)) for kind in kinds]


def values(layer):
    leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(layer)))
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def run(layer, x, **options):
    """y, and the gradients of what flax calls Param."""

    def loss(layer, x):
        y = layer(x, **options)
        return (y.astype(jnp.float32) * jnp.cos(x)).sum(), y

    (_, y), gradients = nnx.value_and_grad(loss, has_aux=True)(layer, x)
    return y, gradients


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
def test_takes_the_place_of_flaxs(arguments):
    """As near as flax's own rounding, in the dtype of flax. The running variance is unbiased."""
    ours, flaxs = pair(**arguments)
    assert isinstance(ours, nnx.BatchNorm)
    assert jax.tree.structure(values(ours)) == jax.tree.structure(values(flaxs))
    (y, got), (wanted, gradients) = run(ours, X), run(flaxs, X)
    assert y.dtype == wanted.dtype
    room = 4 * float(jnp.finfo(y.dtype).eps) + 1e-4  # flax's variance has errors of 1e-5
    assert np.abs(np.float32(y) - np.float32(wanted)).max() < room * np.abs(wanted).max()
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(gradients), strict=True):
        assert a.dtype == b.dtype
        scale = room * np.abs(np.float32(b)).max() + 1e-2 * (y.dtype != jnp.float32)
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=room, atol=scale)
    n = X.size // ours.num_features
    kept = ours.momentum * 1.0  # of the variance's initial 1
    np.testing.assert_allclose(ours.mean[...], flaxs.mean[...], rtol=1e-4)
    wanted = (flaxs.var[...] - kept) * n / (n - 1) + kept
    np.testing.assert_allclose(ours.var[...], wanted, rtol=1e-4)


def test_evaluation_is_flaxs_exact():
    ours, flaxs = pair()
    for layer in (ours, flaxs):
        layer.mean[...], layer.var[...] = jnp.arange(5.0), jnp.arange(1.0, 6.0)
    for use in ({"use_running_average": True}, {}):
        if not use:
            ours.eval(), flaxs.eval()
        check_equal({"y": ours(X, **use)}, {"y": flaxs(X, **use)})
    with pytest.raises(ValueError, match="No `use_running_average` argument"):
        pair(use_running_average=None)[0](X)


def test_a_checkpoint_of_flaxs_loads():
    """Through the state, and through the bytes that flax.serialization makes of it."""
    ours, flaxs = pair(scale_init=nnx.initializers.normal())
    run(flaxs, X)
    nnx.update(ours, nnx.state(flaxs))
    check_equal(values(ours), values(flaxs))
    run(flaxs, X)
    content = serialization.to_bytes(nnx.to_pure_dict(nnx.state(flaxs)))
    state = nnx.state(ours)
    nnx.replace_by_pure_dict(state, serialization.from_bytes(nnx.to_pure_dict(state), content))
    nnx.update(ours, state)
    check_equal(values(ours), values(flaxs))


def test_a_model_trains_on_devices_as_on_one_exact():
    """Under nnx.jit on one device, and as a pure function in shard_map on four."""

    class Model(nnx.Module):
        def __init__(self, axis_name):
            self.first, self.second = (
                syncbn_jax.BatchNorm(5, axis_name=axis_name, name=name, rngs=nnx.Rngs(0))
                for name in ("first", "second")
            )

        def __call__(self, x):
            return self.second(jax.nn.relu(self.first(x)), mask=x[..., :1] > 3)

    one = Model(None)
    y, gradients = nnx.jit(run)(one, X)
    graph, state = nnx.split(Model("a"))

    def local(state, x):
        model = nnx.merge(graph, state)
        y, gradients = run(model, x)
        return y, gradients, nnx.state(model)

    out = (P("a"), P(), P())
    f = jax.shard_map(local, mesh=mesh_of(4), in_specs=(P(), P("a")), out_specs=out)
    y4, gradients4, state4 = jax.jit(f)(state, X)
    leaves = lambda *trees: dict(enumerate(map(np.asarray, jax.tree.leaves(trees))))  # noqa: E731
    check_equal(leaves(y4, gradients4, state4), leaves(y, gradients, nnx.state(one)))
    syncbn_jax.check(state4)
    second = state4["second"]["var"]
    broken = jax.tree.map(lambda leaf: jnp.full_like(leaf, -jnp.inf), second)
    state4["second"]["var"] = broken
    with pytest.raises(syncbn_jax.DivergenceError, match="^second: the devices"):
        syncbn_jax.check(state4)
