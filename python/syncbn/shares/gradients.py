# SPDX-License-Identifier: Apache-2.0
"""Gradients of shares, and their mean over all."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from ..exchange.tree import Tree

#: Bytes of gradients of one share that travel together.
_BUCKET = 25 << 20


def gather(kept: list[Tensor | None], gradients: Sequence[Tensor | None]) -> None:
    """Adds gradients to those of a share, in the order of the calls."""
    for i, gradient in enumerate(gradients):
        if gradient is not None:
            own = kept[i]
            kept[i] = gradient if own is None else own + gradient


def _buckets(parameters: Sequence[Tensor]) -> Iterator[list[int]]:
    """Positions of parameters whose gradients travel together: neighbours of one dtype."""
    bucket: list[int] = []
    room = _BUCKET
    for i, p in enumerate(parameters):
        if bucket and (room < p.nbytes or p.dtype != parameters[bucket[0]].dtype):
            yield bucket
            bucket, room = [], _BUCKET
        bucket.append(i)
        room -= p.nbytes
    if bucket:
        yield bucket


def reduce(
    kept: list[list[Tensor | None]], parameters: Sequence[nn.Parameter], tree: Tree, shares: int
) -> None:
    """Exchanges gradients of each share of this process, and adds the means over all to the
    parameters' .grad. The last in kept are exact sums over all shares already."""
    *of_shares, exact = kept
    for bucket in _buckets(parameters):
        some = [parameters[i] for i in bucket]
        sizes = [p.numel() for p in some]
        rest = -(sum(sizes) + len(sizes)) % tree.processes  # equal slices: no copy there
        flat = []
        for own in of_shares:
            gradients = [own[i] for i in bucket]
            parts = [
                torch.zeros_like(p).flatten() if g is None else g.flatten()
                for p, g in zip(some, gradients)
            ]
            there = [float(g is not None) for g in gradients] + [0.0] * rest
            flat.append(torch.cat([*parts, parts[0].new_tensor(there)]))
            for i in bucket:
                own[i] = None
        total = tree.total(flat)
        del flat
        *sums, there = total.split([*sizes, len(bucket) + rest])
        for p, all_shares, any_share in zip(some, sums, there.tolist()):
            if any_share:  # else no share used it
                _add(p, all_shares.view(p.shape), shares)
    for p, of_layers in zip(parameters, exact):
        if of_layers is not None:
            _add(p, of_layers, shares)


def _add(parameter: nn.Parameter, total: Tensor, shares: int) -> None:
    """Adds the mean over shares to the gradient, which is of the parameter's layout."""
    if parameter.grad is None:
        parameter.grad = torch.empty_like(parameter, requires_grad=False)
        torch.div(total, shares, out=parameter.grad)
    else:
        parameter.grad.add_(total.div_(shares))
