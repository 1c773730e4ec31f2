# SPDX-License-Identifier: Apache-2.0
"""The layer of a forking network: variables that a training and an inference operator share."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..exchange import callers
from ..ops import batch_norm_, check_attributes

#: The inputs of an operator besides x, in its order.
VARIABLES = ("estimated_mean", "estimated_var", "scale", "bias", "batches")


@dataclass(frozen=True)
class BatchNormAttributes:
    """The attributes that both operators of a layer share. They are fixed when it is made."""

    use_global_est: bool = False
    epsilon: float = 1e-6
    momentum: float = 0.99
    #: a process group's name; None for the default group
    group: str | None = None


class BatchNorm(nn.Module):
    """The variables of a batch normalization, and the attributes of its operators.

    Args:
        num_features: C of an input (N, C, *spatial).
        use_global_est, epsilon, momentum, group: as for syncbn.ops.batch_norm. The layer has them
            as `attributes`, which are read-only.
        affine: True gives the layer scale and bias, parameters of shape (C,).
        device, dtype: of the parameters and estimates.

    In a Network the layer is two operators. Called as a module, it runs the one for its mode.

    Raises:
        ValueError: epsilon or momentum is refused.
    """

    def __init__(
        self,
        num_features: int,
        use_global_est: bool = False,
        epsilon: float = 1e-6,
        momentum: float = 0.99,
        group: "callers.Group" = None,
        affine: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_attributes(epsilon, momentum)
        self._attributes = BatchNormAttributes(
            use_global_est, epsilon, momentum, callers.group_name(group)
        )
        like: dict[str, Any] = {"device": device, "dtype": dtype}
        self.scale = nn.Parameter(torch.ones(num_features, **like)) if affine else None
        self.bias = nn.Parameter(torch.zeros(num_features, **like)) if affine else None
        self.register_buffer("estimated_mean", torch.zeros(num_features, **like))
        self.register_buffer("estimated_var", torch.ones(num_features, **like))
        self.register_buffer("batches", torch.zeros(1, dtype=torch.int64, device=device))
        self.estimated_mean: Tensor
        self.estimated_var: Tensor
        self.batches: Tensor

    @property
    def attributes(self) -> BatchNormAttributes:
        """The attributes, fixed when the layer was made; setting one raises AttributeError."""
        return self._attributes

    def operator_attributes(self, is_infer: bool, layer_name: str) -> dict[str, Any]:
        """Gives keyword arguments of this layer's operator for training or for inference."""
        return {"is_infer": is_infer, **vars(self.attributes), "layer_name": layer_name}

    def forward(self, x: Tensor) -> Tensor:
        """Returns a tensor like x, which is (N, C, *spatial)."""
        variables = (getattr(self, name) for name in VARIABLES)
        return batch_norm_(
            x, *variables, **self.operator_attributes(not self.training, "BatchNorm")
        ).y

    def extra_repr(self) -> str:
        attributes = ", ".join(f"{k}={v!r}" for k, v in vars(self.attributes).items())
        return f"{self.estimated_mean.numel()}, {attributes}"


class _OfPlain(BatchNorm):
    """The variables of another layer, as they are now: to() and others put new ones there."""

    _NAMES = dict(
        zip(VARIABLES, ("running_mean", "running_var", "weight", "bias", "num_batches_tracked"))
    )

    def __init__(self, layer: _BatchNorm, **attributes: Any) -> None:
        super().__init__(0, **attributes)
        self.layer = layer

    def __getattr__(self, name: str) -> Any:
        if name not in self._NAMES:
            return super().__getattr__(name)
        own = getattr(self.layer, self._NAMES[name])
        return own.view(1) if name == "batches" else own


def from_plain(layer: _BatchNorm, path: str, group: "callers.Group") -> BatchNorm:
    """Makes a BatchNorm of a layer of PyTorch or of syncbn.nn, with its parameters and buffers."""
    if layer.momentum is None:
        raise ValueError(f"momentum of {path}: got None, expected a number in [0, 1]")
    if layer.running_mean is None:
        raise ValueError(
            f"track_running_stats of {path}: got False, expected True; inference needs estimates"
        )
    for option, value in (
        ("affine_grad", "share"),
        ("activation", "none"),
        ("sync", True),
        ("statistics", "reproducible"),
    ):
        if getattr(layer, option, value) != value:
            given = getattr(layer, option)
            raise ValueError(f"{option} of {path}: got {given!r}, expected {value!r}")
    if group is None:
        group = getattr(layer, "process_group", None)
    return _OfPlain(layer, epsilon=layer.eps, momentum=1 - layer.momentum, group=group)
