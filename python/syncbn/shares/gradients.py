# SPDX-License-Identifier: Apache-2.0
"""Gradients of shares, and their mean over all."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from ..exchange.sums import NONE, Parties, mean_of

#: Bytes of gradients that travel together, in float64.
_BUCKET = 50 << 20


def _buckets(parameters: Sequence[Tensor], exponents: Sequence[int]) -> Iterator[list[int]]:
    """Positions of parameters that have a gradient, of which those of a bucket travel together."""
    bucket: list[int] = []
    room = _BUCKET
    for i, p in enumerate(parameters):
        if exponents[i] == NONE:
            continue
        size = 8 * p.numel() << p.is_complex()
        if bucket and room < size:
            yield bucket
            bucket, room = [], _BUCKET
        bucket.append(i)
        room -= size
    if bucket:
        yield bucket


def add_means(
    parameters: Sequence[nn.Parameter],
    kept: Sequence[list[Tensor | None]],
    exact: Sequence[Tensor | None],
    exponents: Sequence[int],
    parties: Parties,
) -> None:
    """Adds the means over all shares to the parameters' .grad. kept: of each share of this process
    its gradients, which are emptied. exact: what is the sum over all shares already. exponents: of
    the largest gradient of each parameter in any share."""
    for bucket in _buckets(parameters, exponents):
        # Zeros where no share of this process has one, and another has.
        own = [
            [g for each in kept if (g := each[i]) is not None]
            or [torch.zeros_like(parameters[i], requires_grad=False)]
            for i in bucket
        ]
        for each in kept:
            for i in bucket:
                each[i] = None
        totals = parties.total("step", own, [exponents[i] for i in bucket])
        rooms = [_room(summands[0]) for summands in own]
        del own
        for i, total, room in zip(bucket, totals, rooms):
            _add(parameters[i], mean_of(total, parties.shares, room))
    for p, of_layers in zip(parameters, exact):
        if of_layers is not None:
            _add(p, of_layers.div_(parties.shares))


def _room(gradient: Tensor) -> Tensor:
    """Gives the gradient's memory for the mean, or new memory if another tensor lies in it, too:
    autograd may give several parameters views of one tensor."""
    storage = gradient.untyped_storage()
    uses = torch._C._storage_Use_Count(storage._cdata)
    if gradient.is_contiguous() and uses == 2:  # by the gradient and by `storage`
        return gradient.detach()
    return torch.empty_like(gradient, requires_grad=False, memory_format=torch.contiguous_format)


def _add(parameter: nn.Parameter, mean: Tensor) -> None:
    """Adds the mean over shares to the gradient, which is of the parameter's layout."""
    if parameter.grad is not None:
        parameter.grad += mean
    elif mean.stride() == parameter.stride():
        parameter.grad = mean
    else:
        parameter.grad = torch.empty_like(parameter, requires_grad=False).copy_(mean)
