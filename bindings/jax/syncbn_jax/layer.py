# SPDX-License-Identifier: Apache-2.0
"""The layer, for flax.nnx."""

from typing import Any

import jax
from flax import nnx
from flax.nnx.nn import dtypes

from .function import batch_norm

_OPTIONS = ("axis_name", "axis_index_groups", "axis", "momentum", "epsilon", "name")


class BatchNorm(nnx.BatchNorm):
    """The layer flax.nnx.BatchNorm with the training step of batch_norm. Arguments, variables and
    evaluation are those of nnx.BatchNorm; use_fast_variance means nothing, because sums are
    exact."""

    def __init__(self, num_features: int, *, name: str = "", **options: Any) -> None:
        super().__init__(num_features, **options)
        self.name = name

    def __call__(
        self, x: Any, use_running_average: bool | None = None, *, mask: Any = None, call: Any = 0
    ) -> jax.Array:
        evaluates = self.use_running_average if use_running_average is None else use_running_average
        if evaluates or evaluates is None:  # flax's text says what to do about the second
            return super().__call__(x, use_running_average, mask=mask)
        scale, bias = (None if v is None else v[...] for v in (self.scale, self.bias))
        mean, var = self.mean[...], self.var[...]
        # The parameters stay in their own type: y is rounded once.
        promote = getattr(self, "promote_dtype", dtypes.promote_dtype)  # new in flax 0.11
        x, *_ = promote((x, mean, var, scale, bias), dtype=self.dtype)
        options = {key: getattr(self, key) for key in _OPTIONS} | {"mask": mask, "call": call}
        y, state = batch_norm(x, scale, bias, {"mean": mean, "var": var}, **options)
        self.mean[...], self.var[...] = state["mean"], state["var"]
        return y
