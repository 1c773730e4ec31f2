# SPDX-License-Identifier: Apache-2.0
"""Transforms of PyTorch around a training step: those that have no exchange are refused."""

import contextlib

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad

from ..exchange import transports
from ..exchange.call import Call
from . import layer_paths


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


def refuse_tracing(state, options, x: Tensor) -> None:
    """Refuses torch.jit.trace of a training call with an exchange, which a trace cannot hold."""
    tracing = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]  # not in the stubs
    try:
        peers = state.peers(options)
        if peers is None:
            return
        error = NotImplementedError(
            f"{state.name}: got torch.jit.trace of a training call on {peers.ranks} ranks, "
            "expected evaluation mode; torch.export takes training steps"
        )
        peers = layer_paths.way(state, peers)
        call = state.call_of(x, options)
        transports.reject(peers, call, error, x=x, counter=state.call)
    finally:
        torch._C._set_tracing_state(tracing)  # type: ignore[attr-defined]  # nor here
    raise error


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
