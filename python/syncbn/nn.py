# SPDX-License-Identifier: Apache-2.0
"""Synchronized batch normalization as a module."""

import datetime
import functools
import sys
import warnings
from collections.abc import Sequence
from operator import is_
from typing import Any, NoReturn, TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrize

from . import baton, devices, recognition
from .exchange import callers
from .recognition import leaf
from .step import masks
from .step.autograd import train_step
from .step.layer_state import UNNAMED, LayerState
from .step.options import (
    ADDED_OPTIONS,
    ActivationName,
    AffineGrad,
    Options,
    Statistics,
    activation_of,
    check_dtype,
    check_module,
    check_num_features,
    check_options,
    check_strided,
)

#: A model that stays of its type.
Model = TypeVar("Model", bound=nn.Module)

# A graph traced from a layer on its own holds one call of train_step.
torch.fx.wrap("train_step")


class SyncBatchNorm(nn.SyncBatchNorm):
    """A batch norm layer over the batches of all ranks of a process group.

    A drop-in for torch.nn.SyncBatchNorm. It has the same arguments in the same order, the same
    defaults, and the state_dict of torch.nn.BatchNorm*d. It also works on CPU, with uneven and
    empty ranks, and without a process group. For given inputs and output gradients the statistics,
    the output and the input's gradient have the same bits for any number of ranks
    (docs/guarantees.md).

    Args:
        num_features: C of an input (N, C, *spatial) of 2 or more dimensions.
        eps: added to the variance, at least 0.
        momentum: the batch's share in the running statistics, in [0, 1]. None: cumulative
            averaging.
        affine: learn weight and bias, (C,) each.
        track_running_stats: keep running statistics. Without them evaluation normalizes with the
            statistics of the local batch, without an exchange.
        process_group: the ranks that share statistics: a group, its name, or a DeviceMesh of one
            axis. None: the default group. The module stores the group's name, so it can be copied
            and pickled. Training is an error if this rank is not a member of the group.
        device, dtype: of the parameters and buffers; float16, bfloat16, float32 or float64.
        affine_grad: "share": the gradients of weight and bias are sums over this rank's samples,
            as in PyTorch (DDP averages them). "global": they are sums over all ranks' samples,
            equal on every rank.
        activation: "none", "relu" or "leaky_relu". It is applied in the same pass, after the
            residual.
        negative_slope: slope of leaky_relu.
        sync: False switches the exchange off. Statistics are then those of this rank.
        statistics: "reproducible": the bits do not depend on the number of ranks. "welford": the
            mean and variance of each rank are merged (docs/options.md).
        inplace: with leaky_relu, training writes the output over the input. Backward recovers the
            input within a bound, not with the same bits. Weights for which the bound is too large
            are refused (docs/options.md). Without an activation it has no effect.
        timeout: how long an exchange waits for the slowest rank before it raises ExchangeTimeout:
            seconds, or a timedelta. None: the process group's own limit.
        engine: "auto" uses shared memory between processes of one node, if all ranks can have it.
            "process_group" never does.
        bias: False leaves the layer without a bias, as in PyTorch from 2.15 on.

    In evaluation mode the layer calls PyTorch's own operators: batch norm, then the addition of the
    residual and the activation.

    Raises:
        ValueError: an argument is refused.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "forward" in vars(cls):  # one call for a tracer, which would else record the inner one
            cls.forward = leaf(cls.forward)  # type: ignore[method-assign]  # on purpose

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: "callers.Group" = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        affine_grad: AffineGrad = "share",
        activation: ActivationName = "none",
        negative_slope: float = 0.01,
        sync: bool = True,
        statistics: Statistics = "reproducible",
        inplace: bool = False,
        timeout: "float | datetime.timedelta | None" = None,
        engine: callers.EngineName = "auto",
        bias: bool = True,
        **unknown: NoReturn,
    ) -> None:
        for name in unknown:
            allowed = "negative_slope" if name == "slope" else "an option of SyncBatchNorm"
            raise TypeError(f"{name}: got an argument of that name, expected {allowed}")
        check_num_features(num_features)
        if dtype is not None:
            check_dtype("dtype", dtype)
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype
        )
        if not bias:  # PyTorch before 2.15 does not take the argument
            self.register_parameter("bias", None)
        sharing = callers.sharing(process_group, timeout, engine)
        options = affine_grad, activation, negative_slope, sync, statistics, inplace
        self._init_sync(UNNAMED, sharing, **dict(zip(ADDED_OPTIONS, options)))
        check_options(self.options())

    affine_grad: AffineGrad
    activation: ActivationName
    negative_slope: float
    sync: bool
    statistics: Statistics
    inplace: bool

    def _init_sync(self, name: str, sharing: callers.Sharing, **options: Any) -> None:
        """Gives a layer what it has besides a plain one; options at their defaults if not given."""
        cls = parametrize.type_before_parametrizations(self)
        recognition.register(cls, whole=cls is SyncBatchNorm)
        self.state = LayerState(name, sharing)
        for option, value in (ADDED_OPTIONS | options).items():
            setattr(self, option, value)

    def share(self, sharing: callers.Sharing) -> None:
        """Exchanges with others from now on, beginning at call 0."""
        if sharing != self.state.sharing:
            self.state = LayerState(self.state.identity.name, sharing)

    def reset_parameters(self) -> None:
        # As PyTorch's, which before 2.15 expects a bias beside a weight.
        self.reset_running_stats()
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @classmethod
    def convert_sync_batchnorm(cls, module: Model, process_group: "callers.Group" = None) -> Model:
        """Calls syncbn.convert_sync_batchnorm(module, process_group).

        For code that is written for torch.nn.SyncBatchNorm. Called on a subclass, it makes layers
        of this class, as PyTorch's method does.
        """
        # By the package's name: conversion is made of this class.
        return sys.modules[__package__].convert_sync_batchnorm(module, process_group)

    @property
    def process_group(self) -> Any:
        """The process group; None for the default one. Setting it keeps timeout and engine."""
        name = self.state.sharing.name
        if name == callers.OUTSIDE:
            return dist.GroupMember.NON_GROUP_MEMBER
        return None if name is None else callers.resolve(name)

    @process_group.setter
    def process_group(self, group: "callers.Group") -> None:
        if "state" in vars(self):  # not yet in the base class's constructor
            self.share(self.state.sharing._replace(name=callers.group_name(group)))

    def _check_input_dim(self, x: Tensor) -> None:
        if self.training and self.sync:  # PyTorch's forward asks, the one of this class does not
            self.state.evaded = True
            _warn_of_theirs(self.state.name)
        if not isinstance(x, Tensor):
            check_strided("input", x)
        if x.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {x.dim()}D input)")

    def options(self) -> Options:
        """Gives what is constant over calls, as the functions take it."""
        momentum = self.momentum
        if isinstance(momentum, Tensor) and momentum.numel() == 1:  # as PyTorch's operator takes it
            momentum = momentum.item()
        own = (
            *(self.sync, self.eps, momentum, self.affine_grad, self.activation),
            *(self.negative_slope, self.statistics, self.inplace),
        )
        if torch.compiler.is_compiling():
            return Options(*own)
        kept = self.state.options
        if kept is None or not all(map(is_, own, kept)):
            self.state.options = kept = Options(*own)
        return kept

    @overload
    def forward(
        self, input: Tensor, residual: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor: ...

    @overload
    def forward(
        self,
        input: Sequence[Tensor],
        residual: Sequence[Tensor] | None = None,
        mask: Sequence[Tensor | None] | None = None,
    ) -> list[Tensor]: ...

    @leaf
    def forward(self, input: Any, residual: Any = None, mask: Any = None) -> Any:
        """Normalizes the input and, in training, updates the running statistics.

        Args:
            input: (N, num_features, *spatial), float16, bfloat16, float32 or float64, any strides.
                In training N may differ between ranks and may be 0. Or a list of tensors, one for
                each device of this process, which share statistics with each other and with all
                ranks.
            residual: like input; added before the activation.
            mask: (N, *spatial), bool or uint8. Elements where it is False count neither in
                statistics nor in gradients. They are 0 in the output and in the gradients of input
                and residual.

        Returns:
            A tensor like input; for a list of inputs the list of their outputs.

        Raises:
            ValueError: an argument is refused, or all ranks together have one value per channel.
            DivergenceError: the ranks did not make the same call.
            ExchangeTimeout, PeerLost: a rank did not come, or has ended.
        """
        if isinstance(input, (list, tuple)):
            return devices.forward(self, input, residual, mask)
        if self.training:
            if baton.running and baton.inside():
                return baton.wait(self, input, residual, mask)
            if not torch.compiler.is_compiling():
                if self.state.had_list or "_is_replica" in self.__dict__:
                    devices.check_alone(self)
            mean, var, batches = self._tracked()
            weight, bias = self._affine()
            # A graph traced from this layer alone cannot hold an object.
            state = self.state.identity if isinstance(input, torch.fx.Proxy) else self.state
            given = (input, mean, var, weight, bias, residual, self.options(), state)
            return train_step(*given, num_batches_tracked=batches, mask=mask)
        self._check_input_dim(input)
        local_batch = self.running_mean is None and self.running_var is None
        # Unused here, but an exported graph may be trained further.
        momentum = 0.0 if self.momentum is None else self.momentum
        tensors = (*self._evaluation_statistics(input), *self._evaluation_parameters())
        return masks.plain(input, *tensors, residual, mask, self.options(), momentum, local_batch)

    def _evaluation_statistics(self, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Copies them where backward takes them: DDP writes to the buffers in the next forward."""
        statistics = (self.running_mean, self.running_var)
        if torch.compiler.is_compiling() or torch.jit.is_tracing() or not torch.is_grad_enabled():
            return statistics
        if not any(t is not None and t.requires_grad for t in (x, self.weight, self.bias)):
            return statistics
        mean, var = (None if t is None else t.clone() for t in statistics)
        return mean, var

    def _tracked(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gives what training updates: nothing if track_running_stats was switched off later,
        though evaluation goes on with the statistics that are there, as in PyTorch."""
        if not self.track_running_stats:
            return None, None, None
        try:  # without the search that attributes of modules take
            own = self._buffers
            return own["running_mean"], own["running_var"], own["num_batches_tracked"]
        except KeyError:  # they are something else in this copy
            return self.running_mean, self.running_var, self.num_batches_tracked

    def _affine(self) -> tuple[Tensor | None, Tensor | None]:
        try:  # as in _tracked()
            return self._parameters["weight"], self._parameters["bias"]
        except KeyError:
            return self.weight, self.bias

    def _evaluation_parameters(self) -> tuple[Tensor | None, Tensor | None]:
        """Gives weight and bias to PyTorch's operator, which wants them of the buffers' type. Under
        FSDP2's mixed precision they are not."""
        parameters, mean = (self.weight, self.bias), self.running_mean
        if mean is None or self.weight is None or self.weight.dtype == mean.dtype:
            return parameters
        weight, bias = (None if p is None else p.to(mean.dtype) for p in parameters)
        return weight, bias

    def __prepare_scriptable__(self) -> NoReturn:
        # A scriptable layer in this place would take this one's place in the user's model too.
        raise RuntimeError(
            f"{self.state.name}: torch.jit.script cannot compile a synchronized layer; expected "
            "torch.jit.trace of the model in evaluation mode, or a copy of the model without such "
            "layers: syncbn.revert_sync_batchnorm(copy.deepcopy(model))"
        )

    def extra_repr(self) -> str:
        text = super().extra_repr()
        if self.bias is None and self.weight is not None and "bias=" not in text:
            text += ", bias=False"  # PyTorch from 2.15 on says so itself
        if self.state.sharing.name is not None:
            text += f", process_group={self.state.sharing.name!r}"
        for name, default in ADDED_OPTIONS.items():
            value = getattr(self, name)
            if value != default and name != "negative_slope":
                text += f", {name}={value!r}"
        if activation_of(self.activation).slope is None:
            text += f", negative_slope={self.negative_slope}"
        return text


@functools.cache
def _warn_of_theirs(name: str) -> None:
    warnings.warn(
        f"{name}: got a training call of PyTorch's forward, whose statistics are those of one "
        "rank; expected a call of the layer, or of a method that was bound after conversion",
        stacklevel=4,
    )


def layers_of(module: nn.Module) -> list[tuple[str, SyncBatchNorm]]:
    """Gives the synchronized layers of a module, which is checked, with their paths."""
    check_module(module)
    return [(n, m) for n, m in module.named_modules() if isinstance(m, SyncBatchNorm)]


def device_of(layer: SyncBatchNorm) -> torch.device:
    """Tells where the layer lies; if it has no tensors of a batch norm, where it was last
    called."""
    reference = layer.weight if layer.weight is not None else layer.running_mean
    return layer.state.call.device if reference is None else reference.device


recognition.install(SyncBatchNorm)
