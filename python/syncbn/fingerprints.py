# SPDX-License-Identifier: Apache-2.0
"""One hash of what training has come to."""

import ctypes
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

#: Classes of wrappers, and the attribute in which each has what it wraps.
_WRAPPED_BY = {
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "syncbn.shares.Shares": "module",
}
#: What wrappers put in front of a module's names.
_WRAPPERS = ("module.", "_orig_mod.")


def fingerprint(*objects: Any) -> str:
    """Returns a hash of the bits of models, optimizers and tensors, 64 hexadecimal digits.

    Args:
        objects: modules, with their parameters and buffers by name, whatever device or wrapper
            (DistributedDataParallel, torch.compile, syncbn.Shares) they are in; optimizers and
            others with a state_dict(); tensors; lists and dictionaries of them; numbers and
            strings.

    Raises:
        ValueError: an object is of no such kind.
    """
    digest = hashlib.sha256()
    for part in _parts(objects):
        digest.update(part)
    return digest.hexdigest()


def bytes_of(tensor: Tensor) -> bytes:
    """Copies a tensor's elements, in the order of a contiguous one. Those of a DTensor are on all
    ranks, which call this together."""
    plain = tensor.detach()
    if hasattr(plain, "full_tensor"):
        plain = plain.full_tensor()
    kind = type(plain)
    if plain.layout != torch.strided or plain.is_nested or plain.is_meta:
        got = "nested" if plain.is_nested else str(plain.layout)
        got = "meta" if plain.is_meta else got
        raise ValueError(f"objects: got a {got} tensor, expected one whose elements lie in memory")
    if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise ValueError(
            f"objects: got a {kind.__name__}, which keeps its elements elsewhere, expected the "
            "tensors in it"
        )
    plain = plain.as_subclass(Tensor).resolve_conj().resolve_neg().cpu().contiguous()
    return ctypes.string_at(plain.data_ptr(), plain.nbytes)


def unwrapped(name: str) -> str:
    """Returns a name of a model's part as it is without wrappers."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def inner(module: nn.Module) -> nn.Module:
    """Gives what a wrapper wraps; a model may have an attribute of such a name itself."""
    for kind in type(module).__mro__:
        if attribute := _WRAPPED_BY.get(f"{kind.__module__}.{kind.__qualname__}"):
            return inner(getattr(module, attribute))
    return module


def _parts(value: Any) -> Iterator[bytes]:
    if isinstance(value, nn.Module):
        value = inner(value)
        for name, tensor in (*value.named_parameters(), *value.named_buffers()):
            yield from _parts((unwrapped(name), tensor))
    elif isinstance(value, Tensor):
        elements = bytes_of(value)
        yield f"{value.dtype} {tuple(value.shape)} ".encode()
        yield elements
    elif isinstance(value, Mapping):
        yield b"{"
        for key, item in value.items():
            yield from _parts((key, item))
        yield b"}"
    elif isinstance(value, (list, tuple)):
        yield b"["
        for item in value:
            yield from _parts(item)
        yield b"]"
    elif value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        yield f"{type(value).__name__} {value!r} ".encode()
    elif hasattr(value, "state_dict"):
        yield from _parts(value.state_dict())
    else:
        raise ValueError(
            f"objects: got {type(value).__name__}, expected modules, optimizers, tensors, numbers "
            "and collections of them"
        )
