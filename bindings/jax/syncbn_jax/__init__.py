# SPDX-License-Identifier: Apache-2.0
"""Synchronized batch normalization for JAX, with the bits of syncbn (docs/jax.md)."""

from typing import Any

import jax
import numpy as np

from .function import batch_norm

__all__ = ["BatchNorm", "DivergenceError", "batch_norm", "check"]


class DivergenceError(RuntimeError):
    """The devices of one exchange did not make the same call."""


def check(state: Any) -> None:
    """Raises DivergenceError if devices did not make the same call of a layer.

    Their outputs were NaN then, on all devices. Call it where a program looks at its loss: it waits
    for the devices. `state` is a tree of running statistics under flax's names, or an nnx.State.
    """
    layers = []
    for path, var in jax.tree_util.tree_leaves_with_path(state):
        keys = [str(getattr(key, "key", getattr(key, "name", key))) for key in path]
        if "var" in keys:
            shards = getattr(var, "addressable_shards", None)  # all that this process has
            parts = [var] if shards is None else [shard.data for shard in shards]
            marked = any(np.isneginf(np.asarray(p, np.float64)).any() for p in parts)
            layers.append((".".join(keys[: keys.index("var")]) or "state", marked))
    if not layers:
        raise ValueError("state: got a tree without a running variance")
    if differ := ", ".join(name for name, marked in layers if marked):
        raise DivergenceError(
            f"{differ}: the devices did not make the same call: layer, call number, "
            "features, epsilon and dtype must be equal on all of them"
        )


def __getattr__(name: str) -> Any:
    if name != "BatchNorm":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .layer import BatchNorm  # the function needs no flax

    return BatchNorm
