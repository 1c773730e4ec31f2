# SPDX-License-Identifier: Apache-2.0
"""Tensors of other classes than PyTorch's own. A class sees a step as one operator, inside of which
tensors are plain. Of a DTensor whose samples are split over the ranks of a layer, a step takes this
rank's part: these ranks bring their own samples to the layer anyway."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from ..exchange import callers
from ..exchange.call import Peers

if dist.is_available():
    from torch.distributed.tensor import DTensor, Partial, Replicate


def plain(tensor: Any) -> Any:
    """The same without its class, if operators do not ask that: a class's __torch_function__ would
    be asked in the middle of a step, and would make views of what operators give."""
    if not isinstance(tensor, Tensor) or type(tensor) in (Tensor, nn.Parameter):
        return tensor
    if torch.compiler.is_compiling():  # which cannot trace as_subclass()
        return tensor.view_as(tensor)
    dispatches = type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
    return tensor if dispatches else tensor.as_subclass(Tensor)


def like_operators(y: Tensor, *tensors: Tensor | None) -> Tensor:
    """y, of plain tensors, as an operator on these would have given it: of their class."""
    given = tuple(t for t in tensors if t is not None)
    if not has_torch_function(given):
        return y
    return handle_torch_function(_last, given, *given, y)


def _last(*tensors: Tensor) -> Tensor:
    return tensors[-1]


def has_dtensor(tensors: Sequence[object]) -> bool:
    """Whether one of them is a DTensor."""
    return dist.is_available() and any(isinstance(t, DTensor) for t in tensors)


def _refuse(name: str, tensor: Any, expected: str) -> None:
    raise ValueError(
        f"{name}: got a DTensor with placements {tensor.placements}, expected {expected}; or this "
        "rank's part, to_local()"
    )


def _is_split(x: Any, peers: Peers | None) -> list[bool]:
    """For each axis of the input's mesh, whether samples are split along it. It must hold the same
    samples on ranks that do not share statistics with this one, and others on those that do."""
    split = [placement.is_shard(0) for placement in x.placements]
    place = zip(split, x.device_mesh.get_coordinate())
    ranks = x.device_mesh.mesh[tuple(slice(None) if s else own for s, own in place)]
    shared = [dist.get_rank()]
    if peers is not None:
        shared = callers.global_ranks(callers.resolve(peers.group_name))
    copied = all(s or type(p) is Replicate for s, p in zip(split, x.placements))
    if not copied or sorted(ranks.flatten().tolist()) != sorted(shared):
        expected = f"Shard(0) over ranks {shared}, which share statistics, and Replicate()"
        _refuse("input", x, expected)
    return split


def parts(
    samples: dict[str, Any], shared: dict[str, Any], peers: Peers | None, shares: bool
) -> dict[str, Any]:
    """This rank's parts. samples: input, residual and mask. shared: parameters and buffers. shares:
    the gradients of parameters are sums over this rank's samples."""
    x, found = samples["input"], {}
    distributed = isinstance(x, DTensor)
    split = _is_split(x, peers) if distributed else []
    for name, tensor in (samples | shared).items():
        found[name] = tensor
        if not isinstance(tensor, DTensor):
            continue
        if not distributed or tensor.device_mesh != x.device_mesh:
            _refuse(name, tensor, "a plain tensor, or the input on the same mesh")
        if name in samples:
            if tensor.placements != x.placements:
                _refuse(name, tensor, f"the input's {x.placements}")
            found[name] = tensor.to_local()
            continue
        if any(type(p) is not Replicate for p in tensor.placements):
            _refuse(name, tensor, "Replicate() on all axes of the mesh")
        sums = [Partial() if s and shares else Replicate() for s in split]
        with torch.set_grad_enabled(torch.is_grad_enabled() and tensor.requires_grad):
            found[name] = tensor.to_local(grad_placements=sums)
    return found


def as_dtensor(y: Tensor, x: Any) -> Tensor:
    """An output, of the part of x, as a DTensor as x is one."""
    if not isinstance(x, DTensor):
        return y
    return DTensor.from_local(
        y, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()
    )
