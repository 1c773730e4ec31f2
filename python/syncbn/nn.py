"""Synchronized batch normalization as a module."""

import zlib

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from . import _exchange
from ._tracing import leaf
from .functional import AFFINE_GRADS, train_step

# A graph traced from a layer on its own holds one call of train_step.
torch.fx.wrap("train_step")


class SyncBatchNorm(_BatchNorm):
    """Batch normalization over the batches of all ranks of a process group.

    A drop-in for torch.nn.SyncBatchNorm: same arguments in the same order, same defaults, same
    state_dict as torch.nn.BatchNorm*d; on CPU too, with uneven and empty ranks, and without a
    process group. For given inputs and output gradients the statistics, the output and the input's
    gradient have the same bits whatever the number of ranks (docs/guarantees.md).

    Args:
        num_features: C of an input (N, C, *spatial) of 2 or more dimensions.
        eps: added to the variance.
        momentum: share of the batch in the running statistics; None for cumulative averaging.
        affine: learn weight and bias, (C,) each.
        track_running_stats: keep running statistics; without them evaluation normalizes with the
            local batch, without an exchange.
        process_group: the ranks that share statistics; None for the default group. The module keeps
            its name, so that it can be copied and pickled.
        affine_grad: "share", gradients of weight and bias from this rank's samples, as in PyTorch
            (DDP averages them); or "global", the sums over all ranks, equal on every rank.

    In evaluation mode this is PyTorch's own batch norm operator.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: "_exchange.Group" = None,
        device=None,
        dtype=None,
        *,
        affine_grad: str = "share",
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype
        )
        self._init_sync(_exchange.group_name(process_group), "SyncBatchNorm", affine_grad)

    def _init_sync(self, group_name: str | None, layer_name: str, affine_grad: str) -> None:
        if affine_grad not in AFFINE_GRADS:
            raise ValueError(f"affine_grad: got {affine_grad!r}, expected one of {AFFINE_GRADS}")
        self.process_group_name = group_name
        self.affine_grad = affine_grad
        self.layer_name = layer_name
        self.layer_number = zlib.crc32(layer_name.encode())
        reference = self.weight if self.weight is not None else self.running_mean
        device = None if reference is None else reference.device
        # Which call of the layer this is; all ranks must be at the same one. Not in the state_dict.
        call = torch.zeros(1, dtype=torch.int64, device=device)
        self.register_buffer("_call", call, persistent=False)

    def reset_running_stats(self) -> None:
        super().reset_running_stats()
        if "_call" in self._buffers:  # not yet in the base class's constructor
            self._call.zero_()

    @property
    def process_group(self):
        """The process group, None for the default one."""
        name = self.process_group_name
        return None if name is None else _exchange.resolve(name)

    def _check_input_dim(self, x: Tensor) -> None:
        if x.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {x.dim()}D input)")

    @leaf
    def forward(self, x: Tensor) -> Tensor:
        """x: (N, num_features, *spatial). Returns a tensor like x."""
        if not self.training:
            self._check_input_dim(x)
            return F.batch_norm(
                x,
                self.running_mean,
                self.running_var,
                self.weight,
                self.bias,
                self.running_mean is None and self.running_var is None,
                0.0,
                self.eps,
            )
        return train_step(
            x,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            num_batches_tracked=self.num_batches_tracked,
            call=self._call,
            momentum=self.momentum,
            eps=self.eps,
            group=self.process_group_name,
            affine_grad=self.affine_grad,
            layer_name=self.layer_name,
            layer_number=self.layer_number,
        )

    def extra_repr(self) -> str:
        text = super().extra_repr()
        if self.process_group_name is not None:
            text += f", process_group={self.process_group_name!r}"
        if self.affine_grad != "share":
            text += f", affine_grad={self.affine_grad!r}"
        return text
