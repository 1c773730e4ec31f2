"""Synchronized batch normalization as a module."""

import datetime
import zlib
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from . import _baton, _devices, _groups, _mask
from ._layer import Layer, check_dtype, check_num_features, check_options, check_strided
from ._tracing import leaf
from ._training import train_step
from .functional import finish

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
        activation: "none", "relu" or "leaky_relu", applied to the normalized values in the same
            pass, after the residual that forward may be given.
        negative_slope: of leaky_relu.
        sync: False switches the exchange off: statistics of this rank alone.
        statistics: "reproducible", whose bits do not depend on the number of ranks; or "welford",
            mean and variance of each rank, merged (docs/welford.md).
        inplace: with leaky_relu, write the output over the input in training, and recover the
            input in backward: within a bound, not with the same bits; weights for which the bound
            is too large are refused (docs/activation.md). Without an activation it has no effect.
        timeout: seconds, or a timedelta, that an exchange waits for the slowest rank before
            ExchangeTimeout; None for 5 minutes.
        engine: "auto" takes shared memory between processes of one node, if all ranks can have it;
            "process_group" never does.

    In evaluation mode this is PyTorch's own batch norm operator (then its own addition and
    activation).
    """

    def __init_subclass__(cls, **options) -> None:
        super().__init_subclass__(**options)
        if "forward" in vars(cls):  # one call for a tracer, which would else record the inner one
            cls.forward = leaf(cls.forward)

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: "_groups.Group" = None,
        device=None,
        dtype=None,
        *,
        affine_grad: str = "share",
        activation: str = "none",
        negative_slope: float = 0.01,
        sync: bool = True,
        statistics: str = "reproducible",
        inplace: bool = False,
        timeout: "float | datetime.timedelta | None" = None,
        engine: str = "auto",
    ) -> None:
        check_num_features(num_features)
        if dtype is not None:
            check_dtype("dtype", dtype)
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype
        )
        sharing = _groups.sharing(process_group, timeout, engine)
        self._init_sync(sharing, "SyncBatchNorm", device)
        self.affine_grad = affine_grad
        self.activation = activation
        self.negative_slope = negative_slope
        self.sync = sync
        self.statistics = statistics
        self.inplace = inplace
        check_options(self.layer())

    def _init_sync(self, sharing: _groups.Sharing, layer_name: str, device=None) -> None:
        """What a layer has besides a plain one; the options at their defaults. device: of a layer
        that has neither parameters nor running statistics."""
        self.sharing = sharing
        self.affine_grad = "share"
        self.activation = "none"
        self.negative_slope = 0.01
        self.sync = True
        self.statistics = "reproducible"
        self.inplace = False
        self.layer_name = layer_name
        self.layer_number = zlib.crc32(layer_name.encode())
        reference = self.weight if self.weight is not None else self.running_mean
        device = device if reference is None else reference.device
        # Which call of the layer this is; all ranks must be at the same one. Not in the state_dict.
        call = torch.zeros(1, dtype=torch.int64, device=device)
        self.register_buffer("_call", call, persistent=False)
        # What report() shows of the last call: the global count, and the fingerprint.
        self.register_buffer("_count", torch.zeros(1, dtype=torch.int64, device=device), False)

    def reset_running_stats(self) -> None:
        super().reset_running_stats()
        if "_call" in self._buffers:  # not yet in the base class's constructor
            self._call.zero_()
            self._count.zero_()

    @property
    def process_group(self):
        """The process group, None for the default one."""
        name = self.sharing.name
        return None if name is None else _groups.resolve(name)

    def _check_input_dim(self, x: Tensor) -> None:
        if not isinstance(x, Tensor):
            check_strided("input", x)
        if x.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {x.dim()}D input)")

    def layer(self) -> Layer:
        """What is constant over calls, as the functions take it."""
        return Layer(
            self.layer_name,
            self.layer_number,
            self.sharing,
            self.sync,
            self.eps,
            self.momentum,
            self.affine_grad,
            self.activation,
            self.negative_slope,
            self.statistics,
            self.inplace,
        )

    def _follow(self, x: object) -> None:
        """Moves the counters of a layer without parameters and running statistics to a device: if
        it was made of a layer in a model that is there already, nothing told it."""
        if self.weight is None and self.running_mean is None and self._call.device.type == "cpu":
            if isinstance(x, Tensor) and x.is_cuda:
                self._call, self._count = self._call.to(x.device), self._count.to(x.device)

    @leaf
    def forward(
        self,
        input: Tensor | Sequence[Tensor],
        residual: Tensor | Sequence[Tensor] | None = None,
        mask: Tensor | Sequence[Tensor | None] | None = None,
    ) -> Tensor | list[Tensor]:
        """input: (N, num_features, *spatial). residual: like it, added before the activation.
        mask: (N, *spatial), bool or uint8; elements where it is False count neither in statistics
        nor in gradients, and are 0 in the output and in the gradients of input and residual.
        Returns a tensor like input.

        With a list or tuple of tensors, one per device of this process, returns the list of their
        outputs; in training the statistics are those of all of them (and of all ranks).
        """
        if isinstance(input, (list, tuple)):
            return _devices.forward(self, input, residual, mask)
        if self.training:
            if _baton.running and _baton.inside():
                return _baton.wait(self, input, residual, mask)
            if not torch.compiler.is_compiling():
                _devices.check_alone(self)
                self._follow(input)
            return train_step(
                input,
                self.running_mean,
                self.running_var,
                self.weight,
                self.bias,
                residual,
                self.layer(),
                num_batches_tracked=self.num_batches_tracked,
                call=self._call,
                mask=mask,
                last_count=self._count,
            )
        self._check_input_dim(input)
        local_batch = self.running_mean is None and self.running_var is None

        def normalize(x: Tensor) -> Tensor:
            statistics = (self.running_mean, self.running_var)
            parameters = self._evaluation_parameters()
            return F.batch_norm(x, *statistics, *parameters, local_batch, 0.0, self.eps)

        if mask is None:
            return finish(normalize(input), residual, self.layer())
        y = _mask.evaluate(normalize, input, mask, local_batch)
        return _mask.counting(finish(y, residual, self.layer()), mask)

    def _evaluation_parameters(self) -> tuple[Tensor | None, Tensor | None]:
        """weight and bias for PyTorch's operator, which wants them of the buffers' type. Under
        FSDP2's mixed precision they are not."""
        parameters, mean = (self.weight, self.bias), self.running_mean
        if mean is None or self.weight is None or self.weight.dtype == mean.dtype:
            return parameters
        return tuple(None if p is None else p.to(mean.dtype) for p in parameters)

    def __prepare_scriptable__(self):
        # A scriptable layer in this place would take this one's place in the user's model too.
        raise RuntimeError(
            f"{self.layer_name}: torch.jit.script cannot compile a synchronized layer; expected "
            "torch.jit.trace of the model in evaluation mode, or a copy of the model without such "
            "layers: syncbn.revert_sync_batchnorm(copy.deepcopy(model)) or syncbn.fold(model)"
        )

    def extra_repr(self) -> str:
        text = super().extra_repr()
        if self.sharing.name is not None:
            text += f", process_group={self.sharing.name!r}"
        for name, default in (
            ("affine_grad", "share"),
            ("activation", "none"),
            ("sync", True),
            ("statistics", "reproducible"),
            ("inplace", False),
        ):
            value = getattr(self, name)
            if value != default:
                text += f", {name}={value!r}"
        if self.activation == "leaky_relu":
            text += f", negative_slope={self.negative_slope}"
        return text
