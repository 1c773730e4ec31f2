# SPDX-License-Identifier: Apache-2.0
"""What the cases for JAX share: samples, a training step, devices, and the oracle's answers."""

import hashlib
import os

DEVICES = 8
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("XLA_FLAGS", f"--xla_force_host_platform_device_count={DEVICES}")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

import oracle  # noqa: E402
import syncbn_jax  # noqa: E402

MOMENTUM = 0.75  # 1 - 0.75 is exact, so that PyTorch's momentum is 0.25


def samples(dtype="float32", shape=(8, 6, 7, 5), seed=0):
    """x, dy, scale and bias; x and dy of values of the dtype, channels last."""
    rng = np.random.default_rng(seed)
    x = oracle.round_to(rng.standard_normal(shape) * 3 + 7, dtype)
    dy = oracle.round_to(rng.standard_normal(shape), dtype)
    affine = [oracle.round_to(rng.standard_normal(shape[-1]), "float32") for _ in range(2)]
    return x, dy, *affine


def fresh(channels=5):
    return {"mean": np.zeros(channels, np.float32), "var": np.ones(channels, np.float32)}


def step(x, dy, scale, bias, state, function=syncbn_jax.batch_norm, **options):
    """y, the gradients of x, scale and bias, and the new state, in one dict."""

    def loss(x, scale, bias):
        y, new = function(x, scale, bias, state, momentum=MOMENTUM, **options)
        return jnp.sum(y * dy, dtype=y.dtype), (y, new)

    gradients, (y, new) = jax.grad(loss, (0, 1, 2), has_aux=True)(x, scale, bias)
    return {"y": y, **dict(zip(("dx", "dscale", "dbias"), gradients)), **new}


def mesh_of(*sizes, names=("a", "b", "c")):
    """Auto axes over so many devices."""
    devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    return jax.sharding.Mesh(devices, names[: len(sizes)])


def on_devices(function, mesh, names, **options):
    """The step over a mesh: samples are divided along `names`, the rest is the same everywhere."""
    shared, divided = PartitionSpec(), PartitionSpec(names)
    out = dict.fromkeys(("dscale", "dbias", "mean", "var"), shared)
    return jax.jit(
        jax.shard_map(
            function,
            mesh=mesh,
            in_specs=(divided, divided, shared, shared, shared),
            out_specs={"y": divided, "dx": divided, **out},
            **options,
        )
    )


def place(mesh, array, *spec):
    return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))


def expected(dtype, x, dy, scale, bias, axis=-1, eps=1e-5, mask=None):
    """The oracle's step; x and dy with their channels at `axis`."""
    x, dy = (np.moveaxis(a, axis, 1) for a in (x, dy))
    masks = [mask]
    forward = oracle.forward([x], dtype, scale, bias, eps, masks=masks)
    backward = oracle.backward([dy], [x], dtype, forward, scale, bias, masks=masks)
    state = fresh(x.shape[1])
    mean, var, _ = oracle.update_running(state["mean"], state["var"], 0, forward, 1 - MOMENTUM)
    y, dx = (np.moveaxis(a, 1, axis) for a in (forward.ys[0], backward.dxs[0]))
    parameters = {"dscale": backward.dweight, "dbias": backward.dbias}
    return {"y": y, "dx": dx, **parameters, "mean": mean, "var": var}


def check_equal(found, wanted):
    for name, value in wanted.items():
        got = np.asarray(found[name]).astype(np.float64)
        assert got.shape == np.shape(value), name
        np.testing.assert_array_equal(got, np.asarray(value, np.float64), err_msg=name)
        assert (np.signbit(got) == np.signbit(value))[~np.isnan(got)].all(), name


def digest(*arrays):
    """One hash of all bytes."""
    content = b"".join(np.ascontiguousarray(np.asarray(a)).tobytes() for a in arrays)
    return hashlib.sha256(content).hexdigest()[:16]
