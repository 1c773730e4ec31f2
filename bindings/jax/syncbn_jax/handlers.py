# SPDX-License-Identifier: Apache-2.0
"""The handlers of libsyncbn_jax, and what differs between versions of JAX."""

import ctypes
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

_library = ctypes.CDLL(str(Path(__file__).with_name("libsyncbn_jax.so")))
for _name in ("sums", "statistics", "update", "normalize", "gradient_sums", "gradients"):
    for _suffix, _platform in (("cpu", "cpu"), ("cuda", "CUDA")):
        _handler = jax.ffi.pycapsule(getattr(_library, f"syncbn_{_name}_{_suffix}"))
        jax.ffi.register_ffi_target(f"syncbn_{_name}", _handler, platform=_platform)


def enable_x64() -> Any:
    """Types of 64 bits inside of this context, whatever the program has."""
    switch = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
    return switch(True)


def varying(array: jax.Array) -> frozenset[str]:
    """The mesh axes along which its values may differ, as far as shard_map checks them."""
    kind = jax.typeof(array)
    return kind.mat.varying if hasattr(kind, "mat") else kind.vma


def vary(array: jax.Array, axes: Iterable[str]) -> jax.Array:
    """Lets the array's values differ along these axes; sums its gradient over new ones."""
    new = tuple(sorted(set(axes) - varying(array)))
    if not new:
        return array
    cast = lax.pcast(array, new, to="varying") if hasattr(lax, "pcast") else lax.pvary(array, new)
    return cast if varying(cast).issuperset(new) else array  # shard_map does not check them


def call_handler(
    name: str, results: Any, *arrays: jax.Array, aliases: Any = None, **attributes: float
) -> Any:
    """Gives what the handler writes, in arrays like `results`."""
    axes = frozenset().union(*map(varying, arrays))
    options: dict[str, Any] = {}
    if axes and hasattr(lax, "pvary"):
        options["vma"] = axes
    elif axes:
        options["manual_axis_type"] = jax.sharding.ManualAxisType(varying=axes)
        options["sharding"] = NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec())
    types = [jax.ShapeDtypeStruct(like.shape, like.dtype, **options) for like in results]
    numbers = {key: np.asarray(number)[()] for key, number in attributes.items()}  # of 64 bits
    handler = jax.ffi.ffi_call(f"syncbn_{name}", types, input_output_aliases=aliases)
    return handler(*(vary(array, axes) for array in arrays), **numbers)
