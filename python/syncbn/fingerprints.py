# SPDX-License-Identifier: Apache-2.0
"""One hash of what training has come to."""

import ctypes
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

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
    """Copies a tensor's elements, in the order of a contiguous one."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return ctypes.string_at(plain.data_ptr(), plain.nbytes)


def unwrapped(name: str) -> str:
    """Returns a name of a model's part as it is without wrappers."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _parts(value: Any) -> Iterator[bytes]:
    if isinstance(value, nn.Module):
        while hasattr(value, "module") or hasattr(value, "_orig_mod"):
            value = getattr(value, "module", None) or value._orig_mod
        for name, tensor in (*value.named_parameters(), *value.named_buffers()):
            yield from _parts((unwrapped(name), tensor))
    elif isinstance(value, Tensor):
        yield f"{value.dtype} {tuple(value.shape)} ".encode()
        yield bytes_of(value)
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
