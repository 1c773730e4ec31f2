# SPDX-License-Identifier: Apache-2.0
"""Transforms of PyTorch around a training step: those that have no exchange are refused."""

import contextlib
import sys

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad

from ..exchange import groups, transports
from ..exchange.call import Call
from ..exchange.groups import Sharing


def check_transforms(state, **tensors: Tensor | None) -> None:
    """Refuses forward-mode AD and the transforms of torch.func, for which there is no exchange."""
    if torch.compiler.is_compiling():
        return
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            f"{state.name}: got a training call inside a transform of torch.func (vmap, grad, jvp, "
            "...), expected one outside; derivatives come from torch.autograd, also second ones, "
            "and evaluation mode takes all transforms"
        )
    if forward_ad._current_level < 0:
        return
    for name, tensor in tensors.items():
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(
                f"{name}: got a tensor with a forward-mode tangent in training of {state.name}, "
                "expected none; forward-mode AD works in evaluation mode"
            )


@torch.compiler.assume_constant_result
def tracer() -> str | None:
    """The tool that writes this call down in PyTorch's own operators, if one does: it keeps no
    others."""
    onnx = sys.modules.get("torch.onnx")  # PyTorch imports it where it is first named
    if onnx is not None and onnx.is_in_onnx_export():
        return "torch.onnx.export"
    return "torch.jit.trace" if torch.jit.is_tracing() else None


def refuse_tracing(who: str, sharing: Sharing | None, devices: int = 1) -> None:
    """Refuses a tracer of a call between ranks or devices, which it cannot hold. Takes no part in
    an exchange: the other ranks do not trace. sharing: None where nobody is exchanged with."""
    tool = tracer()
    if tool is None:
        return
    if devices > 1:
        raise NotImplementedError(f"{who}: got {tool} of several devices, expected one")
    ranks = 1 if sharing is None else groups.size(sharing)
    if ranks > 1:
        raise NotImplementedError(
            f"{who}: got {tool} of an exchange between {ranks} ranks, expected evaluation mode; "
            "torch.export takes training steps"
        )


def outside_transforms() -> contextlib.AbstractContextManager:
    """Inside it tensors are real, so that a rank which refuses can tell the others."""
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return contextlib.nullcontext()
    return temporarily_clear_interpreter_stack()


def check_not_batched(step, call: Call, gradient: Tensor, x: Tensor) -> None:
    """Refuses a backward of many gradients at once, of which each would take an exchange.

    step: the training step, whose input was x.
    """
    if torch.compiler.is_compiling() or not (
        # torch.autograd has a vmap of its own
        is_legacy_batchedtensor(gradient) or torch._C._are_functorch_transforms_active()
    ):
        return
    error = NotImplementedError(
        f"{call}: got a backward inside vmap (is_grads_batched=True, vectorize=True, ...), "
        "expected one gradient at a time"
    )
    with outside_transforms():
        transports.reject(step.peers if step.exchanges else None, call, error, x=x)
    raise error
