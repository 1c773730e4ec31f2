# SPDX-License-Identifier: Apache-2.0
"""What PyTorch may have around a step: transforms and tracers, of which those without an exchange
are refused, profiles, streams, and tensors of classes other than its own.

What a rank does in a transform it does alone. So it takes part in no exchange for the refusal, and
the other ranks, who wait for a step of training, find it there if it goes on.
"""

import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._functorch import is_legacy_batchedtensor
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad, profiler
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.overrides import handle_torch_function, has_torch_function

from ..exchange import callers, failing, groups
from ..exchange.call import Call, Peers
from ..exchange.callers import Sharing
from .options import check_plain, check_strided

_Function = TypeVar("_Function", bound=Callable[..., Any])

in_transform = torch._C._are_functorch_transforms_active


def refuse(text: str) -> NoReturn:
    """Raises it on this rank; who waits for this rank in vain will quote it."""
    failing.refuse(NotImplementedError(text))
    raise NotImplementedError(text)


def _name(who: Any) -> str:
    """Gives a function's name as it is; a layer's path."""
    if isinstance(who, str):
        return who
    return who.find_path() if hasattr(who, "find_path") else who.name


def check_transforms(state: Any, tensors: Iterable[tuple[str, object]]) -> None:
    """Refuses forward-mode AD and the transforms of torch.func, for which there is no exchange.
    tensors: by name."""
    if torch.compiler.is_compiling():
        return
    if in_transform():
        refuse(
            f"{_name(state)}: got a training call inside a transform of torch.func (vmap, grad, "
            "jvp, ...), expected one outside; derivatives come from torch.autograd, also second "
            "ones, and evaluation mode takes all transforms"
        )
    if forward_ad._current_level < 0:
        return
    for argument, tensor in tensors:
        if isinstance(tensor, Tensor) and forward_ad.unpack_dual(tensor).tangent is not None:
            refuse(
                f"{argument}: got a tensor with a forward-mode tangent in training of "
                f"{_name(state)}, expected none; forward-mode AD works in evaluation mode"
            )


@torch.compiler.assume_constant_result
def tracer() -> str | None:
    """Gives the tool that writes this call down in PyTorch's own operators, if one does: it keeps
    no others."""
    onnx = sys.modules.get("torch.onnx")  # PyTorch imports it where it is first named
    if onnx is not None and onnx.is_in_onnx_export():
        return "torch.onnx.export"
    return "torch.jit.trace" if torch.jit.is_tracing() else None


def refuse_tracing(who: Any, sharing: Sharing | None, devices: int = 1) -> None:
    """Refuses a tracer of a call between ranks or devices, which it cannot hold. who: a layer's
    state, or a function's name. sharing: None where nobody is exchanged with."""
    tool = tracer()
    if tool is None:
        return
    if devices > 1:
        refuse(f"{_name(who)}: got {tool} of several devices, expected one")
    ranks = 1 if sharing is None else groups.size(sharing)
    if ranks > 1:
        refuse(
            f"{_name(who)}: got {tool} of an exchange between {ranks} ranks, expected evaluation "
            "mode; torch.export takes training steps"
        )


def is_fake(x: object, parameter: Tensor | None) -> bool:
    """Tells whether x has a shape and no values: a tensor of a mode that traces, or a meta tensor,
    if the layer is on meta, too. parameter: of the layer, if it has any."""
    if not isinstance(x, Tensor):
        return False
    if x.is_meta:
        return parameter is None or parameter.is_meta
    return isinstance(x, FakeTensor) or _in_mode_of_fakes()


def is_traced() -> bool:
    """Tells whether make_fx, as of torch.export, writes down what is called."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def _in_mode_of_fakes() -> bool:
    if torch._C._len_torch_dispatch_stack() == 0:
        return False
    return is_traced() or detect_fake_mode() is not None


def has_no_values(module: object = None) -> bool:
    """Tells whether what is done now, with that model, is without values, so that it exchanges
    nothing: in a mode that makes tensors fake, or traces; or all tensors of the model are fake or
    on meta."""
    if _in_mode_of_fakes():
        return True
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL) is not None:
        return True
    if not isinstance(module, nn.Module):
        return False
    tensors = itertools.chain(module.parameters(), module.buffers())
    found = {t.is_meta or isinstance(t, FakeTensor) for t in tensors}
    return found == {True}


def check_not_batched(call: Call, gradient: Tensor) -> None:
    """Refuses a backward of many gradients at once, of which each would take an exchange."""
    if torch.compiler.is_compiling() or not (
        # torch.autograd has a vmap of its own
        is_legacy_batchedtensor(gradient) or in_transform()
    ):
        return
    refuse(
        f"{call}: got a backward inside vmap (is_grads_batched=True, vectorize=True, ...), "
        "expected one gradient at a time"
    )


def fits(dy: Tensor | None, x: Tensor) -> bool:
    """Tells whether it is a plain gradient in x's layout; mostly, and quickly."""
    return (
        type(dy) is Tensor
        and dy.layout is torch.strided
        and dy.stride() == x.stride()
        and dy.dtype is x.dtype
        and not is_legacy_batchedtensor(dy)
        and not in_transform()
    )


def fitting(dy: Tensor, x: Tensor, alone: bool) -> Tensor:
    """Gives a gradient in x's layout. alone: there is one rank."""
    check_plain(alone, gradient=dy)
    return like(dy, x)


def like(tensor: Tensor, x: Tensor) -> Tensor:
    """Gives the tensor in x's layout."""
    check_strided("gradient", tensor)
    if tensor.stride() == x.stride() and tensor.dtype == x.dtype:
        return tensor
    if tensor.shape != x.shape or tensor.dtype != x.dtype:  # x.data is another since forward
        raise ValueError(
            f"input: got {x.dtype} of shape {tuple(x.shape)}, expected {tensor.dtype} of shape "
            f"{tuple(tensor.shape)} still"
        )
    return torch.empty_like(x).copy_(tensor)


@torch.compiler.assume_constant_result
def _is_profiled() -> bool:
    """Tells whether a profile is taken; what is compiled has no guard on it."""
    return profiler._is_profiler_enabled


def recorded(name_of: Callable[..., str], suffix: str = "") -> Callable[[_Function], _Function]:
    """The function is a range of a profile, "syncbn::", the layer's name and the suffix. name_of
    finds the layer's name among the function's arguments."""

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not _is_profiled() or torch.compiler.is_compiling():
                return function(*args, **kwargs)
            with profiler.record_function(f"syncbn::{name_of(*args)}{suffix}"):
                return function(*args, **kwargs)

        return cast(_Function, wrapper)

    return decorate


class Streams:
    """The current streams of the CUDA devices that the tensors of a node on several devices lie on.

    For backward the autograd engine makes one of them current, that of the node's first device. On
    the others the current stream is another one, mostly the default stream, for which the engine
    orders gradients alone. So what forward saved is waited for here. The caching allocator is told
    which streams use memory of another one: it would give it away before they are done.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        devices = {t.device for t in tensors if t.is_cuda}
        self._of = {device: torch.cuda.current_stream(device) for device in devices}

    def enter(self, tensors: Iterable[Tensor | None]) -> None:
        """Begins a backward that reads these tensors."""
        now = {device: torch.cuda.current_stream(device) for device in self._of}
        for device, stream in self._of.items():
            if now[device] != stream:
                now[device].wait_stream(stream)
        _record(tensors, now)

    def leave(self, results: Iterable[Tensor | None]) -> None:
        """Ends it, with what it gives: the engine hands that to forward's streams."""
        _record(results, self._of)


def _record(tensors: Iterable[Tensor | None], streams: dict) -> None:
    for tensor in tensors:
        if tensor is not None and tensor.device in streams:
            tensor.record_stream(streams[tensor.device])


def plain(tensor: Any) -> Any:
    """Gives the same without its class, if operators do not ask that: a class's __torch_function__
    would be asked in the middle of a step, and would make views of what operators give."""
    if not isinstance(tensor, Tensor) or type(tensor) in (Tensor, nn.Parameter):
        return tensor
    if torch.compiler.is_compiling():  # which cannot trace as_subclass()
        return tensor.view_as(tensor)
    dispatches = type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
    return tensor if dispatches else tensor.as_subclass(Tensor)


def like_operators(y: Tensor, *tensors: Tensor | None) -> Tensor:
    """Gives y, of plain tensors, as an operator on these would have given it: of their class."""
    given = tuple(t for t in tensors if t is not None)
    if not has_torch_function(given):
        return y
    return handle_torch_function(lambda *tensors: tensors[-1], given, *given, y)


def has_dtensor(tensors: Sequence[object]) -> bool:
    """Tells whether one of them is a DTensor."""
    return any(isinstance(t, DTensor) for t in tensors)


def _refuse_placements(name: str, tensor: Any, expected: str) -> None:
    raise ValueError(
        f"{name}: got a DTensor with placements {tensor.placements}, expected {expected}; or this "
        "rank's part, to_local()"
    )


def _is_split(x: Any, peers: Peers | None) -> list[bool]:
    """Tells of each axis of the input's mesh whether samples are split along it. It must hold the
    same samples on ranks that do not share statistics with this one, and others on those that
    do."""
    split = [placement.is_shard(0) for placement in x.placements]
    place = zip(split, x.device_mesh.get_coordinate())
    ranks = x.device_mesh.mesh[tuple(slice(None) if s else own for s, own in place)]
    shared = [dist.get_rank()]
    if peers is not None:
        shared = callers.global_ranks(callers.resolve(peers.group_name))
    copied = all(s or type(p) is Replicate for s, p in zip(split, x.placements))
    if not copied or sorted(ranks.flatten().tolist()) != sorted(shared):
        expected = f"Shard(0) over ranks {shared}, which share statistics, and Replicate()"
        _refuse_placements("input", x, expected)
    return split


def parts(
    samples: dict[str, Any], shared: dict[str, Any], peers: Peers | None, shares: bool
) -> dict[str, Any]:
    """This rank's parts, of DTensors whose samples are split over the ranks of a layer: these bring
    their own samples to the layer anyway. samples: input, residual and mask. shared: parameters and
    buffers. shares: the gradients of parameters are sums over this rank's samples."""
    x, found = samples["input"], {}
    distributed = isinstance(x, DTensor)
    split = _is_split(x, peers) if distributed else []
    for name, tensor in (samples | shared).items():
        found[name] = tensor
        if not isinstance(tensor, DTensor):
            continue
        if not distributed or tensor.device_mesh != x.device_mesh:
            _refuse_placements(name, tensor, "a plain tensor, or the input on the same mesh")
        if name in samples:
            if tensor.placements != x.placements:
                _refuse_placements(name, tensor, f"the input's {x.placements}")
            found[name] = tensor.to_local()
            continue
        if any(type(p) is not Replicate for p in tensor.placements):
            _refuse_placements(name, tensor, "Replicate() on all axes of the mesh")
        sums = [Partial() if s and shares else Replicate() for s in split]
        with torch.set_grad_enabled(torch.is_grad_enabled() and tensor.requires_grad):
            found[name] = tensor.to_local(grad_placements=sums)
    return found


def as_dtensor(y: Tensor, x: Any) -> Tensor:
    """Gives an output, of the part of x, as a DTensor as x is one."""
    if not isinstance(x, DTensor):
        return y
    return DTensor.from_local(
        y, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()
    )
