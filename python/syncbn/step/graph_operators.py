# SPDX-License-Identifier: Apache-2.0
"""The operators of ops.py and their gradient: a step of a layer each, with rules of its own for
what it saves and updates."""

import math
import struct
import zlib
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from ..exchange import groups
from ..exchange.call import Backward, Call, Peers
from ..operators import info_of, ops, saved_of
from . import training
from .as_operator import operator
from .options import Form, Options, form_of


class _Operator:
    """A training operator, as a step takes its layer: state and options. group: a name; None for
    this rank alone."""

    statistics, negative_slope = "reproducible", 0.0

    def __init__(
        self,
        eps: float,
        momentum: float,
        name: str,
        group: str | None,
        use_global_est: bool,
    ) -> None:
        self.eps, self.momentum, self.use_global_est = eps, momentum, use_global_est
        self.name, self.group = name, group or ""  # no paths are compared
        self.counters: Tensor | None = None
        self.peers = None if group is None else groups.named(group)
        # What ranks must have in common besides epsilon; the momentum's bits, without arithmetic.
        own = struct.pack("<d?", momentum, use_global_est)
        self.number = zlib.crc32(own, zlib.crc32(name.encode()))

    def shared(self) -> dict[str, object]:
        return {
            "epsilon": self.eps,
            "momentum": self.momentum,
            "use_global_est": self.use_global_est,
        }

    def form(self, _: Any) -> Form:
        return form_of(self.number, *_PLAIN._replace(eps=self.eps))

    def reached(self, peers: Peers | None) -> Peers | None:
        return peers

    def call_of(self, x: Tensor, _: Any = None, parts: Sequence[object] = (None,) * 3) -> Call:
        given = sum((part is not None) << bit for bit, part in enumerate(parts))
        names = ("residual", "scale", "bias")
        return Call(self.name, None, "forward", x.shape[1], x.dtype, self, given, names)


#: Of a step with neither an activation nor a residual.
_PLAIN = Options()


def _copy(name: str, estimate: Tensor) -> Tensor:
    """Gives a copy, which PyTorch makes of memory that is not there, too."""
    last = estimate.storage_offset() + (estimate.shape[0] - 1) * estimate.stride(0)
    given, needed = estimate.untyped_storage().nbytes(), (last + 1) * estimate.element_size()
    if given < needed and estimate.shape[0] > 0:
        raise ValueError(f"{name}: got a storage of {given} bytes, expected at least {needed}")
    return estimate.clone(memory_format=torch.contiguous_format)


def _evaluated(x, mean, var, scale, bias, epsilon: float) -> tuple[Tensor, Tensor]:
    """Gives y of given statistics, and these as a forward saves its own, of no elements."""
    y, saved = ops.evaluate(x, mean, var, scale, bias, eps=epsilon)
    info_of(saved).zero_()
    return y, saved


def _updated(averages, batches, saved, momentum: float) -> list[Tensor]:
    """Gives the estimates with the batch in them, which are written over; as they were if it is
    empty or the ranks disagreed. Which is so, and whether the batch is the first, the device
    knows."""
    saved = saved.clone()
    info_of(saved)[:1].clamp_(max=1)  # of a count of 1 the variance is taken as it is, biased
    assigned = [torch.zeros_like(e) for e in averages]
    share = float(1 - Fraction(momentum))  # in whatever mode the process rounds
    ops.update_running_statistics(*averages, None, saved, share)
    ops.update_running_statistics(*assigned, None, saved, 1.0)
    first = (batches.view(()) == 0) & (info_of(saved)[0] > 0)
    return [torch.where(first, a, b) for a, b in zip(assigned, averages)]


@operator(
    "batch_norm",
    "(Tensor x, Tensor estimated_mean, Tensor estimated_var, Tensor? scale, Tensor? bias, "
    "Tensor batches, bool is_infer, bool use_global_est, float epsilon, float momentum, str layer, "
    "str? group) -> (Tensor y, Tensor batch_mean, Tensor batch_var, Tensor saved_mean, "
    "Tensor saved_var, Tensor saved_batches, Tensor saved)",
)
def _batch_norm(
    x, mean, var, scale, bias, batches, is_infer, use_global_est, epsilon, momentum, layer, group
):
    batches = batches.view(1)
    variables = (("estimated_mean", mean), ("estimated_var", var), ("batches", batches))
    if is_infer:
        y, saved = _evaluated(x, mean, var, scale, bias, epsilon)
        wide = (t.clone() for t in saved[:-2].view(3, -1)[:2])
        return y, *wide, *(_copy(*named) for named in variables), saved
    own: Any = _Operator(epsilon, momentum, layer, group, use_global_est)
    with training.turn_of(own, own, own.peers, x, (None, scale, bias)) as turn:
        try:
            *estimates, batches = [_copy(*named) for named in variables]
        except ValueError as error:
            turn.refused(error)
        own.counters = torch.cat((batches, batches))  # the call's number, and room for the count
        given = training.Given((None,) * 3, own, own, own.peers, 0)
        tensors = (x, scale, bias, None, None)
        _, y, (*_, saved, _, _) = training.forward(turn, given, (False,) * 4, *tensors)
        estimates = _updated(estimates, batches, saved, momentum)
        batch_mean, batch_var, _ = (t.clone() for t in saved[:-2].view(3, -1))
        info = info_of(saved)
        if use_global_est:
            # NaN where the ranks disagreed
            mean, var = (torch.where(info[0] < 0, math.nan, e) for e in estimates)
            y, saved = _evaluated(x, mean, var, scale, bias, epsilon)
    return y, batch_mean, batch_var, *estimates, batches + (info[:1] > 0), saved


@_batch_norm.register_fake
def _(x, mean, var, *_):
    """Gives BatchNormOutputs, and what operators.saved_of() describes, of what normalized."""
    batch = x.new_empty((x.shape[1],), dtype=torch.float64)
    estimates = (x.new_empty((x.shape[1],), dtype=t.dtype) for t in (mean, var))
    counter = x.new_empty((1,), dtype=torch.int64)
    return torch.empty_like(x), batch, batch.clone(), *estimates, counter, saved_of(x)


@operator(
    "batch_norm_backward",
    "(Tensor dy, Tensor x, Tensor? scale, Tensor saved, bool constant, bool needs_x, "
    "ScalarType? scale_dtype, ScalarType? bias_dtype, float epsilon, float momentum, str layer, "
    "str? group) -> (Tensor dx, Tensor dscale, Tensor dbias)",
)
def _batch_norm_backward(
    dy, x, scale, saved, constant, needs_x, scale_dtype, bias_dtype, epsilon, momentum, layer, group
):
    exchanges = needs_x and not constant
    own: Any = _Operator(epsilon, momentum, layer, group if exchanges else None, constant)
    needs = exchanges, scale_dtype is not None, bias_dtype is not None, False
    made, awaited = (None, x.shape[1], x.dtype), Backward(exchanges, False)
    step = training.Step(own, own, own.form(own), own.peers, made, awaited, bias_dtype, needs)
    dx, dscale, dbias, _ = training.backward(step, dy, scale, None, x, saved, None, None)
    if constant and needs_x:
        dx = torch.empty_like(x)
        given = (dy, x, saved, scale, None, None, None, step.form.constants, False)
        ops.backward_finish(*given, (dx, None, None, None), (None,) * 3, 1)
    return tuple(x.new_empty(0) if g is None else g for g in (dx, dscale, dbias))


@_batch_norm_backward.register_fake
def _(dy, x, scale, saved, constant, needs_x, *dtypes_and_others):
    """Gives dx like x; dscale and dbias [C] of this rank's samples; each empty if nobody asks."""
    return (
        torch.empty_like(x) if needs_x else x.new_empty((0,)),
        *(
            x.new_empty((0 if dtype is None else x.shape[1],), dtype=dtype)
            for dtype in dtypes_and_others[:2]
        ),
    )
