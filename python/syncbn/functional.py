# SPDX-License-Identifier: Apache-2.0
"""Synchronized batch normalization as a function."""

import datetime
from typing import Any

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from . import baton
from .exchange.callers import EngineName, Group, sharing
from .step import masks
from .step.autograd import train_step
from .step.layer_state import Identity
from .step.options import ActivationName, AffineGrad, Options, Statistics, check_options


def sync_batch_norm(
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    process_group: "Group" = None,
    *,
    residual: Tensor | None = None,
    mask: Tensor | None = None,
    affine_grad: AffineGrad = "share",
    activation: ActivationName = "none",
    negative_slope: float = 0.01,
    sync: bool = True,
    statistics: Statistics = "reproducible",
    inplace: bool = False,
    timeout: "float | datetime.timedelta | None" = None,
    engine: EngineName = "auto",
) -> Tensor:
    """Normalizes a batch with the statistics of all ranks of a process group.

    Args:
        x: (N, C, *spatial), float16, bfloat16, float32 or float64, any strides. N may differ
            between ranks and may be 0.
        running_mean, running_var: (C,), any of these dtypes, or None. Training updates them in
            place. Without training they are needed.
        weight, bias: (C,), any of these dtypes, or None for 1 and 0.
        training: False calls torch.nn.functional.batch_norm, without an exchange.
        momentum: the batch's share in the running statistics, in [0, 1].
        eps: added to the variance, at least 0.
        process_group: a group, its name, or a DeviceMesh of one axis. None is the default group,
            or this process alone without torch.distributed.
        residual: added to the normalized values before the activation; x's shape and dtype.
        mask: (N, *spatial), bool or uint8; as for SyncBatchNorm.forward.
        affine_grad, activation, negative_slope, sync, statistics, inplace, timeout, engine: as for
            SyncBatchNorm.

    Returns:
        y, of x's shape, dtype and layout.

    Raises:
        ValueError: an argument is refused, or all ranks together have one value per channel.
        DivergenceError: the ranks did not make the same call.
        ExchangeTimeout, PeerLost: a rank did not come, or has ended.
    """
    state = Identity("sync_batch_norm", sharing(process_group, timeout, engine), counted=False)
    others: dict[str, Any] = {
        "affine_grad": affine_grad,
        "activation": activation,
        "negative_slope": negative_slope,
        "sync": sync,
        "statistics": statistics,
        "inplace": inplace,
    }
    options = Options(eps=eps, momentum=momentum, **others)
    check_options(options)
    tensors = (x, running_mean, running_var, weight, bias, residual, mask)
    if has_torch_function(tensors):  # a tracer's stand-ins: one node of the graph
        return handle_torch_function(
            sync_batch_norm,
            tensors,
            *tensors[:5],
            *(training, momentum, eps, state.sharing.name),
            **{"residual": residual, "mask": mask, "timeout": state.sharing.limit},
            **{"engine": state.sharing.engine, **others},
        )
    if training:
        if baton.running and baton.inside():
            raise RuntimeError(
                "sync_batch_norm: got a call inside syncbn.parallel.SelfDataParallel, where "
                "devices meet at modules; expected a syncbn.SyncBatchNorm"
            )
        return train_step(*tensors[:6], options, state, mask=mask)
    return masks.plain(*tensors, options, momentum)
