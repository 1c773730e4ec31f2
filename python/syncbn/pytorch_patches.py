# SPDX-License-Identifier: Apache-2.0
"""What this package changes in PyTorch: two exceptions for its own layers, for code that asks for
torch.nn.SyncBatchNorm (docs/design.md). All other layers go through PyTorch's own functions."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel


class _Without:
    """A module without its layers of a class, for code that looks at modules()."""

    def __init__(self, module: nn.Module, cls: type[nn.Module]) -> None:
        self._module, self._cls = module, cls

    def modules(self) -> Iterator[nn.Module]:
        return (m for m in self._module.modules() if not isinstance(m, self._cls))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _admitting(check: Callable, cls: type[nn.Module]) -> Callable:
    """DistributedDataParallel's refusal of torch.nn.SyncBatchNorm on the CPU, which `cls` can."""

    @functools.wraps(check)
    def admitting(self: DistributedDataParallel, module: nn.Module) -> Any:
        return check(self, _Without(module, cls))

    return admitting


def _leaving(convert: Callable, cls: type[nn.Module]) -> Callable:
    """PyTorch's conversion, which calls itself for each child. A layer of `cls` stays; a group that
    the call names becomes its group."""

    @functools.wraps(convert)
    def leaving(theirs: type, module: nn.Module, process_group: Any = None) -> nn.Module:
        if not isinstance(module, cls):
            return convert(theirs, module, process_group)
        if process_group is not None:
            module.process_group = process_group
        return module

    return leaving


def _replace(owner: type, name: str, wrap: Callable, cls: type[nn.Module]) -> None:
    """Wraps a method once, however often this package is imported. A method that a PyTorch does
    not have is left out: that PyTorch then treats layers of `cls` as its own (the tests notice)."""
    found = vars(owner).get(name)
    if found is None:
        return
    function = getattr(found, "__func__", found)
    wrapped = wrap(getattr(function, "_syncbn_original", function), cls)
    wrapped._syncbn_original = wrapped.__wrapped__
    setattr(owner, name, classmethod(wrapped) if isinstance(found, classmethod) else wrapped)


def install(cls: type[nn.Module]) -> None:
    """The exceptions, for layers of `cls`."""
    _replace(DistributedDataParallel, "_passing_sync_batchnorm_handle", _admitting, cls)
    _replace(nn.SyncBatchNorm, "convert_sync_batchnorm", _leaving, cls)
