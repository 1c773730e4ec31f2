# SPDX-License-Identifier: Apache-2.0
"""Tensors of other classes: of a library that keeps its own data with a tensor, and others."""

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


class Named(Tensor):
    """As fastai's and MONAI's: what an operator gives has the class and the data of its input."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        given = [a for a in args if isinstance(a, Named) and hasattr(a, "origin")]
        if isinstance(result, Named) and given:
            result.origin = given[0].origin
        return result


def named(x: Tensor, origin: str = "scan 7") -> Tensor:
    x = x.as_subclass(Named)
    x.origin = origin
    return x


class Bare(Tensor):
    """Without anything of its own."""


class Lost(Tensor):
    """As torchvision's tv_tensors: what an operator gives is a plain tensor."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if not all(issubclass(cls, each) for each in types):
            return NotImplemented
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs or {})
        return result.as_subclass(Tensor) if isinstance(result, cls) else result


class Wrapper(Tensor):
    """Holds another tensor, on which each operator runs."""

    @staticmethod
    def __new__(cls, held):
        options = {"strides": held.stride(), "dtype": held.dtype, "device": held.device}
        self = Tensor._make_wrapper_subclass(cls, held.shape, **options)
        self.held = held.detach()
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        given = tree_map(lambda t: t.held if isinstance(t, Wrapper) else t, (args, kwargs or {}))
        wrap = lambda t: cls(t) if isinstance(t, Tensor) else t  # noqa: E731
        return tree_map(wrap, func(*given[0], **given[1]))


class Closed(Tensor):
    """Takes no operator."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return NotImplemented


#: Makers by name.
CLASSES = {
    "named": named,
    "bare": lambda x: x.as_subclass(Bare),
    "lost": lambda x: x.as_subclass(Lost),
    "wrapper": Wrapper,
}
