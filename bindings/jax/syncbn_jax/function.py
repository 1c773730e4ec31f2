# SPDX-License-Identifier: Apache-2.0
"""Batch normalization over all devices of mesh axes, as a function."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from .handlers import call_handler, enable_x64, vary, varying

_DTYPES = ("float16", "bfloat16", "float32", "float64")


class _Options(NamedTuple):
    names: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...] | None
    axis: int
    momentum: float
    epsilon: float
    layer: int
    ranks: int


def batch_norm(
    x: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    state: Mapping[str, jax.Array],
    *,
    axis_name: str | Sequence[str] | None = None,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    axis: int = -1,
    momentum: float = 0.99,
    epsilon: float = 1e-5,
    mask: jax.Array | None = None,
    name: str = "",
    call: jax.Array | int = 0,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Normalizes x with the statistics of the samples of all devices.

    The bits of y, the new state and the gradients do not depend on how samples are divided among
    devices (docs/numerics.md). The new state has no gradient. vmap, forward mode and second
    derivatives are refused.

    Args:
        x: 2 to 12 axes of float16, bfloat16, float32 or float64, like y.
        scale, bias: shape (C,) and any of these dtypes, or None.
        state: {"mean": ..., "var": ...}, shape (C,): the running statistics.
        axis_name: the mesh axes of shard_map or pmap whose devices share statistics. None: x as it
            is here, under plain jit all of it, whatever its sharding.
        axis_index_groups: equally large groups of the devices of one mesh axis; each is alone.
        axis: that of the C channels. The first other axis has the samples. Nothing is copied.
        momentum: what the running statistics keep, as in flax; PyTorch's is 1 - momentum. The
            running variance is unbiased, as PyTorch's.
        epsilon: added to the variance.
        mask: bool, broadcast to x, the same for all channels; false where an element does not
            count. There y is 0, and no gradient passes.
        name, call: the layer's name and the number of this call, which all devices compare.

    Returns:
        y and the new state. If devices did not make the same call, y is NaN on all of them, and
        check(state) raises DivergenceError. An argument that is not allowed is a ValueError.
    """
    names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name or ())
    groups = tuple(map(tuple, axis_index_groups)) if axis_index_groups else None
    call = jnp.asarray(call)
    ranks = _check(x, scale, bias, state, names, groups, axis, momentum, epsilon, call)
    axis = int(axis) % x.ndim
    mask = None if mask is None else _elements_of(mask, x, axis)
    text = repr((name, names, groups, scale is None, bias is None))
    layer = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)
    options = _Options(names, groups, axis, float(momentum), float(epsilon), layer, ranks)
    # A parameter's gradient is of the parameter's own type. Along mesh axes whose devices share no
    # statistics JAX sums it.
    axes = frozenset().union(*(varying(a) for a in (x, mask, call) if a is not None))
    outer = axes.union(names) if groups else axes.difference(names)
    outer = outer.union(*(varying(a) for a in (scale, bias) if a is not None))
    scale, bias = (None if a is None else vary(a, outer) for a in (scale, bias))
    return _train(vary(x, axes.union(names)), scale, bias, dict(state), mask, call, options)


def _dtype_number(array: Any) -> int:  # the core's
    return _DTYPES.index(array.dtype.name)


def _expect(fine: bool, argument: str, given: object, expected: str) -> None:
    if not fine:
        raise ValueError(f"{argument}: got {given}, expected {expected}")


def _check_array(name: str, array: Any, dtypes: tuple[str, ...], shape: Any = None) -> None:
    dtype = getattr(array, "dtype", type(array).__name__)
    _expect(str(dtype) in dtypes, name, dtype, f"an array of {' or '.join(dtypes)}")
    _expect(shape in (None, array.shape), name, f"shape {array.shape}", f"{shape}")


def _check(x, scale, bias, state, names, groups, axis, momentum, epsilon, call) -> int:
    """Refuses what is not allowed. Returns how many devices share statistics."""
    _check_array("x", x, _DTYPES)
    _expect(2 <= x.ndim <= 12, "x", f"shape {x.shape}", "2 to 12 axes")
    fine = isinstance(axis, (int, np.integer)) and -x.ndim <= axis < x.ndim
    _expect(fine, "axis", axis, f"one of the {x.ndim} axes of x")
    _expect(x.shape[axis] > 0, "x", f"shape {x.shape}", "at least one channel")
    fine = isinstance(state, Mapping) and {"mean", "var"} <= set(state)
    _expect(fine, "state", type(state).__name__, "a dict with mean and var")
    of_channels = {"scale": scale, "bias": bias, "mean": state["mean"], "var": state["var"]}
    for name, array in of_channels.items():
        if array is not None or name in state:
            _check_array(name, array, _DTYPES, (x.shape[axis],))
    for name, number, most in (("momentum", momentum, 1), ("epsilon", epsilon, 1e300)):
        fine = isinstance(number, (int, float, np.number)) and 0 <= number <= most
        _expect(fine, name, number, f"a finite number from 0 to {most}, known when tracing")
    fine = call.shape == () and jnp.issubdtype(call.dtype, jnp.integer)
    _expect(fine, "call", f"{call.dtype} of shape {call.shape}", "an integer")
    devices = math.prod(map(lax.axis_size, names))
    if groups:
        _expect(len(names) == 1, "axis_index_groups", f"axis_name {names}", "one axis")
        fine = len(set(map(len, groups))) == 1 and sorted(sum(groups, ())) == [*range(devices)]
        _expect(fine, "axis_index_groups", groups, f"equal groups of all {devices} devices")
        devices = len(groups[0])
    _expect(devices <= 2048, "axis_name", f"{devices} devices", "at most 2048")
    given = f"{x.size // x.shape[axis]} elements per channel on each of {devices} devices"
    _expect(x.size // x.shape[axis] * devices <= 2**36, "x", given, "at most 2^36 in all")
    return devices


def _elements_of(mask: Any, x: Any, axis: int) -> jax.Array:
    """The mask in the shape of x without the axis of channels."""
    _check_array("mask", mask, ("bool",))
    shape = (1,) * (x.ndim - mask.ndim) + mask.shape
    wanted = x.shape[:axis] + (1,) + x.shape[axis + 1 :]
    fine = len(shape) == x.ndim and all(n in (1, size) for n, size in zip(shape, wanted))
    _expect(fine, "mask", f"shape {mask.shape}", f"one that can be broadcast to {wanted}")
    return jnp.squeeze(jnp.broadcast_to(mask.reshape(shape), wanted), axis)


def _absent(array: Any, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.zeros((0,), dtype) if array is None else array


def _sum(words: jax.Array, names: Sequence[str], groups: Any = None) -> jax.Array:
    if not groups:
        return lax.psum(words, tuple(names)) if names else words
    # Under shard_map psum has no groups: each group has a row, and each device reads its own.
    members = np.array([[i in group for i in range(sum(map(len, groups)))] for group in groups])
    here = np.arange(members.shape[1], dtype=np.int32)[None] == lax.axis_index(names[0])
    own = lax.convert_element_type((members & here).any(1, keepdims=True), words.dtype)
    return (own * lax.psum(own * words[None], names)).sum(0)


def _message(x: jax.Array, axis: int) -> list[jax.ShapeDtypeStruct]:
    words = 8 + x.shape[axis] * (6, 19, 19, 83)[_dtype_number(x)]  # docs/numerics.md, section 2
    return [jax.ShapeDtypeStruct((words,), jnp.int64)]


def _bits(numbers: int) -> jax.ShapeDtypeStruct:  # of 64 bits, outside of enable_x64
    return jax.ShapeDtypeStruct((2 * numbers,), jnp.uint32)


def _forward(x, scale, bias, state, mask, call, o):
    elements, old = _absent(mask, jnp.bool_), (state["mean"], state["var"])
    how = {"dtype": _dtype_number(x), "ranks": o.ranks, "eps": o.epsilon}
    with enable_x64():
        call = lax.convert_element_type(call, jnp.int64)
        places = {"axis": o.axis, "layer": o.layer, "eps": o.epsilon}
        (message,) = call_handler("sums", _message(x, o.axis), x, elements, call, **places)
        merged = _sum(message, o.names, o.groups)
        kept = call_handler("statistics", [_bits(3 * x.shape[o.axis]), _bits(2)], merged, **how)
    stats, info = (checkpoint_name(a, "syncbn") for a in kept)
    affine = (_absent(scale), _absent(bias))
    (y,) = call_handler("normalize", [x], x, elements, *affine, stats, axis=o.axis)
    aliases = {2: 0, 3: 1}
    new = call_handler("update", old, stats, info, *old, aliases=aliases, factor=1 - o.momentum)
    # Devices that disagree leave a variance that no samples have, and that stays.
    marks, marked = {"mean": jnp.nan, "var": -jnp.inf}, (info[1] >> 31 == 1) | jnp.isneginf(old[1])
    state = {key: jnp.where(marked, marks[key], a) for key, a in zip(marks, new)}
    return (y, state), (x, scale, bias, mask, stats, info)


def _backward(o, kept, gradients):
    x, scale, bias, mask, *of_forward = kept
    dy, elements, none = gradients[0], _absent(mask, jnp.bool_), _absent(None)
    coefficients, how = _bits(3 * x.shape[o.axis]), {"axis": o.axis, "ranks": o.ranks}
    with enable_x64():
        given = (dy, x, elements, *of_forward)
        (message,) = call_handler("gradient_sums", _message(x, o.axis), *given, axis=o.axis)
        merged = _sum(message, o.names, o.groups)
        samples = (dy, x, elements, _absent(scale), none, merged, *of_forward)
        dx, *_ = call_handler("gradients", [x, none, none, coefficients], *samples, **how)
        # A parameter that is equal on all devices of an axis has there the gradient of all their
        # samples. Elsewhere it is that of the device's own.
        parameter = next((a for a in (scale, bias) if a is not None), x)
        equal = [name for name in o.names if name in varying(x) - varying(parameter)]
        own = merged if len(equal) == len(o.names) and not o.groups else _sum(message, equal)
        empty = jnp.zeros([n if i == o.axis else 0 for i, n in enumerate(x.shape)], x.dtype)
        results = [empty, _absent(scale), _absent(bias), coefficients]
        parameters = (empty, empty, _absent(None, jnp.bool_), none, own, merged, *of_forward)
        _, *both, _ = call_handler("gradients", results, *parameters, **how)
    return dx, *(None if a is None else d for a, d in zip((scale, bias), both)), None, None, None


_train = jax.custom_vjp(lambda *arguments: _forward(*arguments)[0], nondiff_argnums=(6,))
_train.defvjp(_forward, _backward)
