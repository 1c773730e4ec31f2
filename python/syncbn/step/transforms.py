# SPDX-License-Identifier: Apache-2.0
"""Transforms and tracers of PyTorch around a training step: those that have no exchange are
refused. What a rank does with them it does alone. So it takes part in no exchange for the refusal,
and the other ranks, who wait for a step of training, find it there if it goes on."""

import sys
from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import forward_ad

from ..exchange import groups, whereabouts
from ..exchange.call import Call
from ..exchange.callers import Sharing

in_transform = torch._C._are_functorch_transforms_active


def refuse(text: str) -> NoReturn:
    """Raises it on this rank; who waits for this rank in vain will quote it."""
    error = NotImplementedError(text)
    whereabouts.refuse(error)
    raise error


def _name(who: Any) -> str:
    """A function's name as it is; a layer's path."""
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
    """The tool that writes this call down in PyTorch's own operators, if one does: it keeps no
    others."""
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
