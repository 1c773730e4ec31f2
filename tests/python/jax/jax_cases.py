# SPDX-License-Identifier: Apache-2.0
"""The layer for JAX: every bit against the oracle, JAX's transformations, and what is refused.
test_jax.py runs this file in a process of its own, because JAX counts its devices once."""

import contextlib
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import oracle
import syncbn_jax
from jax_support import (
    MOMENTUM,
    check_equal,
    expected,
    fresh,
    mesh_of,
    on_devices,
    place,
    samples,
    step,
)
from syncbn_jax.handlers import enable_x64

weekly = pytest.mark.weekly
DTYPES = ("float16", "bfloat16", "float32", "float64")


def of_dtype(array, dtype):
    return jnp.asarray(array, jnp.float64 if dtype == "float64" else np.float32).astype(dtype)


@pytest.mark.parametrize(
    "devices", (pytest.param(1, marks=weekly), 2, pytest.param(4, marks=weekly), 8)
)
@pytest.mark.parametrize("axis", (-1, 1))
@pytest.mark.parametrize("dtype", DTYPES)
def test_oracle_exact(dtype, axis, devices):
    """On each number of devices, channels last and second, without and with a mask."""
    x, dy, scale, bias = samples(dtype)
    x, dy = (np.moveaxis(a, -1, axis) for a in (x, dy))
    mask = np.random.default_rng(1).random((8, 6, 7)) < 0.7
    for kept in (None, mask):
        wanted = expected(dtype, x, dy, scale, bias, axis, mask=kept)
        shown = None if kept is None else np.expand_dims(kept, axis)

        def local(x, dy, scale, bias, state, shown=shown):
            own = None
            if shown is not None:
                size = len(shown) // devices
                own = lax.dynamic_slice_in_dim(jnp.asarray(shown), lax.axis_index("a") * size, size)
            return step(x, dy, scale, bias, state, axis_name="a", axis=axis, mask=own)

        affine = (scale.astype(np.float32), bias.astype(np.float32))
        with enable_x64() if dtype == "float64" else contextlib.nullcontext():
            run = on_devices(local, mesh_of(devices), "a")
            found = run(*(of_dtype(a, dtype) for a in (x, dy)), *affine, fresh())
        assert found["y"].dtype == dtype
        check_equal(found, wanted)


def given32():
    x, dy, scale, bias = samples()
    return (*(a.astype(np.float32) for a in (x, dy, scale, bias)), fresh()), expected(
        "float32", x, dy, scale, bias
    )


@pytest.mark.parametrize("axis", (0, 2, -2, np.int64(1)))
def test_any_axis_exact(axis):
    given, wanted = given32()
    x, dy = (np.moveaxis(a, -1, axis) for a in given[:2])
    found = step(x, dy, *given[2:], axis=axis)
    # The samples' axis and the order of the others are those of channels last.
    wanted |= {key: np.moveaxis(wanted[key], -1, axis) for key in ("y", "dx")}
    check_equal(found, wanted)


def test_several_mesh_axes_exact():
    given, wanted = given32()
    for names in (("a", "b"), ("b", "a")):
        run = on_devices(functools.partial(step, axis_name=names), mesh_of(4, 2), names)
        check_equal(run(*given), wanted)


@pytest.mark.parametrize("kind", ("Auto", "Explicit"))
@pytest.mark.parametrize("spec", ("a", ("a", "b")))
def test_plain_jit_of_a_sharded_batch_exact(kind, spec):
    given, wanted = given32()
    kinds = (getattr(jax.sharding.AxisType, kind),) * 2
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=kinds)
    x, dy = (place(mesh, a, spec) for a in given[:2])
    rest = jax.tree.map(lambda a: place(mesh, a), given[2:])
    check_equal(jax.jit(step)(x, dy, *rest), wanted)


def test_devices_without_statistics_in_common_get_the_sum_of_gradients():
    """scale is one for the whole mesh, statistics only along an axis of it."""
    given, _ = given32()
    x, dy, scale, bias, state = given
    parts = [step(x[i : i + 4], dy[i : i + 4], scale, bias, state) for i in (0, 4)]
    mesh, names = mesh_of(2, 2), ("a", "b")

    def local(*arrays):
        found = step(*arrays, axis_name="b")
        new = {key: lax.pmean(found[key], "a") for key in ("mean", "var")}
        return found | new

    found = on_devices(local, mesh, names)(*given)
    check_equal(found, {key: np.concatenate([p[key] for p in parts]) for key in ("y", "dx")})
    check_equal(found, {key: parts[0][key] + parts[1][key] for key in ("dscale", "dbias")})


def test_a_batch_that_all_devices_have_exact():
    """Its gradient is the sum over the devices, as of everything that they have in common."""
    given, _ = given32()
    x, dy = (a[:2] for a in given[:2])
    copies = [np.concatenate([a] * 4) for a in (x, dy)]
    wanted = step(*copies, *given[2:])
    run = jax.shard_map(
        lambda *arrays: step(*arrays, axis_name="a"),
        mesh=mesh_of(4),
        in_specs=(P(), P("a"), P(), P(), P()),
        out_specs={"y": P("a"), **dict.fromkeys(("dx", "dscale", "dbias", "mean", "var"), P())},
    )
    found = jax.jit(run)(x, copies[1], *given[2:])
    check_equal(found, wanted | {"dx": 4 * wanted["dx"][:2]})


def test_groups_of_devices_exact():
    given, _ = given32()
    x, dy, scale, bias, state = given
    groups = [[0, 3], [1, 2]]

    def local(x, dy, *rest):
        found = step(x, dy, *rest, axis_name="a", axis_index_groups=groups)
        return {key: found[key] for key in ("y", "dx")}

    run = jax.shard_map(
        local, mesh=mesh_of(4), in_specs=(P("a"), P("a"), P(), P(), P()), out_specs=P("a")
    )
    with jax.numpy_rank_promotion("raise"):
        found = jax.jit(run)(*given)
    for group in groups:
        own = np.concatenate([np.arange(2 * i, 2 * i + 2) for i in group])
        wanted = step(x[own], dy[own], scale, bias, state)
        for key in ("y", "dx"):
            check_equal({key: found[key][own]}, {key: wanted[key]})


def test_parameters_that_devices_own_get_their_share_exact():
    """As where shard_map does not check axes: the user sums gradients, as with flax."""
    given, wanted = given32()
    x, dy, scale, bias, state = given
    parts = [[a[i : i + 2].transpose(0, 3, 1, 2) for i in (0, 2, 4, 6)] for a in (x, dy)]
    forward = oracle.forward(parts[0], "float32", scale, bias)
    shares = oracle.backward(parts[1], parts[0], "float32", forward, scale, bias)
    wanted |= {"dscale": np.stack(shares.dweight_shares), "dbias": np.stack(shares.dbias_shares)}

    def local(x, dy, names="a"):
        found = step(x, dy, scale, bias, state, axis_name=names)
        return {key: found[key][None] if found[key].ndim == 1 else found[key] for key in wanted}

    split = {"mesh": mesh_of(4), "in_specs": P("a"), "out_specs": P("a")}
    found = jax.jit(jax.shard_map(local, **split, check_vma=False))(x, dy)
    of_state = {key: np.stack([wanted[key]] * 4) for key in ("mean", "var")}
    check_equal(found, wanted | of_state)
    rows = (a.reshape(4, 2, *a.shape[1:]) for a in (x, dy))
    found = jax.pmap(local, axis_name="a", devices=jax.devices()[:4])(*rows)
    joined = {key: np.asarray(a).reshape(-1, *a.shape[2:]) for key, a in found.items()}
    check_equal(joined, wanted | of_state)


def wrapped(policy):
    def function(x, scale, bias, state, **options):
        train = lambda x, scale, bias: syncbn_jax.batch_norm(x, scale, bias, state, **options)  # noqa: E731
        return jax.checkpoint(train, policy=policy)(x, scale, bias)

    return function


def test_checkpoint_exact_and_its_exchanges():
    given, wanted = given32()
    keep = jax.checkpoint_policies.save_only_these_names("syncbn")
    functions = {syncbn_jax.batch_norm: 2, wrapped(None): 3, wrapped(keep): 2}
    for function, number in functions.items():
        local = lambda *a, f=function: step(*a, function=f, axis_name="a")  # noqa: E731
        run = on_devices(local, mesh_of(4), "a")
        check_equal(run(*given), wanted)
        assert run.lower(*given).as_text().count("stablehlo.all_reduce") == number


def test_scan_exact_in_a_program_of_32_bits():
    """Two steps in one scan, whose residuals JAX stacks."""
    given, _ = given32()
    x, dy, scale, bias, state = given

    def local(x, dy, scale, bias, state):
        def loss(x, scale, bias):
            def body(state, x):
                assert jnp.arange(3).dtype == jnp.int32
                y, state = syncbn_jax.batch_norm(
                    x, scale, bias, state, axis_name="a", momentum=MOMENTUM
                )
                return state, y

            new, ys = lax.scan(body, state, jnp.stack([x, x * 2]))
            return (ys[1] * dy).sum(), (ys[1], new)

        gradients, (y, new) = jax.grad(loss, (0, 1, 2), has_aux=True)(x, scale, bias)
        return {"y": y, **dict(zip(("dx", "dscale", "dbias"), gradients)), **new}

    found = on_devices(local, mesh_of(4), "a")(*given)
    one = step(x, dy, scale, bias, state)
    two = step(x * 2, dy, scale, bias, {key: one[key] for key in ("mean", "var")})
    check_equal(found, two | {"dx": two["dx"] * 2})
    assert found["y"].dtype == jnp.float32


def test_empty_and_single():
    x = jnp.zeros((0, 5))
    y, state = syncbn_jax.batch_norm(x, None, None, fresh())
    assert y.shape == (0, 5)
    check_equal(state, fresh())
    y, state = syncbn_jax.batch_norm(jnp.ones((1, 5)), None, None, fresh(), momentum=0)
    check_equal({"y": y} | state, {"y": np.zeros((1, 5)), "mean": np.ones(5), "var": np.zeros(5)})


def test_devices_that_differ_get_nan_and_an_error():
    """In one program only the number of the call can differ."""
    given, _ = given32()

    def local(*arrays):
        return step(*arrays, axis_name="a", call=lax.axis_index("a") // 3)

    found = on_devices(local, mesh_of(4), "a")(*given)
    for key in ("y", "dx", "dscale", "dbias", "mean"):
        assert np.isnan(found[key]).all(), key
    state = {"block": {"bn": {key: found[key] for key in ("mean", "var")}}}
    with pytest.raises(syncbn_jax.DivergenceError, match=r"^block\.bn: the devices did not make"):
        syncbn_jax.check(state)
    nan = np.full(given[0].shape, np.nan, np.float32)
    for x, momentum in itertools.product((given[0], nan), (0, 0.5, 1)):  # steps without a check
        later = state["block"]["bn"]
        for _ in range(2):
            _, later = syncbn_jax.batch_norm(x, None, None, later, momentum=momentum)
        with pytest.raises(syncbn_jax.DivergenceError, match="^state: "):
            syncbn_jax.check(later)
    syncbn_jax.check(syncbn_jax.batch_norm(nan, None, None, fresh())[1])  # data, not devices
    with pytest.raises(ValueError, match="a tree without a running variance"):
        syncbn_jax.check({"y": nan})


X, C = np.ones((4, 3, 5), np.float32), np.ones(5, np.float32)
REFUSED = {
    "x: got int32, expected an array of float16 or": {"x": X.astype(np.int32)},
    "x: got shape (5,), expected 2 to 12 axes": {"x": C},
    "x: got shape (4, 0), expected at least one channel": {"x": np.ones((4, 0), np.float32)},
    "axis: got 3, expected one of the 3 axes of x": {"axis": 3},
    "axis: got (1, 2), expected one of the 3 axes of x": {"axis": (1, 2)},
    "scale: got shape (3,), expected (5,)": {"scale": np.ones(3, np.float32)},
    "bias: got complex64, expected an array": {"bias": C.astype(np.complex64)},
    "state: got list, expected a dict with mean and var": {"state": [C, C]},
    "var: got shape (4,), expected (5,)": {"state": {"mean": C, "var": C[:4]}},
    "momentum: got 1.5, expected a finite number from 0 to 1": {"momentum": 1.5},
    "epsilon: got nan, expected a finite number": {"epsilon": float("nan")},
    "epsilon: got inf, expected a finite number": {"epsilon": float("inf")},
    "epsilon: got -1e-05, expected": {"epsilon": -1e-5},
    "mask: got float32, expected an array of bool": {"mask": np.ones((4, 3, 1), np.float32)},
    "mask: got shape (4, 3, 5), expected one that can be broadcast to (4, 3, 1)": {
        "mask": np.ones((4, 3, 5), bool)
    },
    "call: got float32 of shape (), expected an integer": {"call": 0.5},
    "axis_index_groups: got axis_name (), expected one axis": {"axis_index_groups": [[0]]},
}


@pytest.mark.parametrize("text", REFUSED)
def test_bad_arguments_are_refused_when_tracing(text):
    given = {"x": X, "scale": C, "bias": C, "state": fresh()} | REFUSED[text]
    with pytest.raises(ValueError, match=re.escape(text)):
        jax.eval_shape(lambda: syncbn_jax.batch_norm(**given))


def test_groups_that_are_none_are_refused():
    for groups in ([[0, 1], [2]], [[0], [1], [2, 3]], [[0, 1], [1, 2]]):

        def local(x, groups=groups):
            return syncbn_jax.batch_norm(
                x, None, None, fresh(), axis_name="a", axis_index_groups=groups
            )[0]

        with pytest.raises(ValueError, match="axis_index_groups: got .* equal groups of all 4"):
            jax.shard_map(local, mesh=mesh_of(4), in_specs=P("a"), out_specs=P("a"))(X)


def test_transformations_that_are_refused():
    normalize = lambda x: syncbn_jax.batch_norm(x, None, None, fresh())[0]  # noqa: E731
    slope = jax.grad(lambda x: (normalize(x) ** 2).sum())
    for text, refused in {
        "vmap is only supported": lambda: jax.vmap(normalize)(X[None]),
        "cannot be differentiated": lambda: jax.grad(lambda x: (slope(x) ** 2).sum())(X),
        "forward-mode": lambda: jax.jvp(normalize, (X,), (X,)),
        "unbound axis name": lambda: syncbn_jax.batch_norm(
            X, None, None, fresh(), axis_name="nowhere"
        ),
    }.items():
        with pytest.raises((ValueError, TypeError, NotImplementedError, NameError), match=text):
            refused()


def test_the_state_has_no_gradient():
    total = lambda x: syncbn_jax.batch_norm(x, None, None, fresh())[1]["mean"].sum()  # noqa: E731
    check_equal({"dx": jax.grad(total)(X)}, {"dx": np.zeros_like(X)})


def test_a_large_mean_loses_nothing():
    """flax computes E[x^2] - E[x]^2."""
    x = (1e4 + np.random.default_rng(0).standard_normal((64, 8))).astype(np.float32)
    y, _ = syncbn_jax.batch_norm(x, None, None, fresh(8))
    np.testing.assert_allclose(np.asarray(y, np.float64).std(0), 1, atol=1e-4)
