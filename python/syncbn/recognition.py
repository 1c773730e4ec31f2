# SPDX-License-Identifier: Apache-2.0
"""How other code takes the layer: torch.fx as one call, whichever tracer is used; tables of other
libraries by exact class; and PyTorch, in which this package changes two functions, with exceptions
for its own layers, where code asks for torch.nn.SyncBatchNorm (src/README.md)."""

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch import Tensor, fx, nn
from torch.nn.parallel import DistributedDataParallel

_Forward = TypeVar("_Forward", bound=Callable[..., Any])
#: What is counted for a layer; which layers are refused.
_TABLES = (
    ("thop.profile", "register_hooks"),
    ("ptflops.pytorch_ops", "MODULES_MAPPING"),
    ("opacus.validators.module_validator", "ModuleValidator.VALIDATORS"),
)
#: What replaces a layer.
_REPLACING = ("opacus.validators.module_validator", "ModuleValidator.FIXERS")


def leaf(forward: _Forward) -> _Forward:
    """Has a symbolic tracer record a module's forward as a call of the module.

    Tracers take modules of torch.nn alone for leaves. Within this layer they would meet an
    exchange, and bake its mode (training or evaluation) into the graph.
    """

    @functools.wraps(forward)
    def wrapper(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and type(args[0]) is Tensor and not kwargs:  # mostly, and quickly
            return forward(self, *args)
        for value in (*args, *kwargs.values()):
            # An argument may be a list of tensors, one per device.
            for part in value if isinstance(value, (list, tuple)) else (value,):
                tracer = part.tracer if isinstance(part, fx.Proxy) else None
                # A layer that is itself the traced model has no name to be called by.
                if isinstance(tracer, fx.Tracer) and self is not tracer.root:
                    path = tracer.path_of_module(self)
                    return tracer.create_proxy("call_module", path, args, kwargs)
        return forward(self, *args, **kwargs)

    return cast(_Forward, wrapper)


def _of(module: str, path: str) -> dict[type, Any]:
    found: Any = sys.modules.get(module)
    for name in path.split("."):
        found = getattr(found, name, None)
    return found if isinstance(found, dict) else {}


def _replacing(replace: Callable) -> Callable:
    @functools.wraps(replace)
    def replacing(layer: Any, **options: Any) -> nn.Module:
        if layer.activation != "none":
            raise ValueError(
                f"{layer.state.name}: got activation {layer.activation!r}, which what replaces the "
                "layer would not have; expected 'none'"
            )
        return replace(layer, **options)

    return replacing


def register(cls: type[nn.Module], whole: bool) -> None:
    """Enters the class. whole: its forward is that of a batch norm and nothing more."""
    for module, path in (*_TABLES, _REPLACING):
        table = _of(module, path)
        entry = table.get(nn.SyncBatchNorm, table.get(nn.BatchNorm2d))
        if entry is None or (module, path) == _REPLACING and not whole:
            continue
        table.setdefault(cls, _replacing(entry) if (module, path) == _REPLACING else entry)


def _admitting(check: Callable, cls: type[nn.Module]) -> Callable:
    """Keeps DistributedDataParallel's refusal of PyTorch's layer on the CPU, but for `cls`."""

    @functools.wraps(check)
    def admitting(self: DistributedDataParallel, module: nn.Module) -> None:
        if any(
            isinstance(m, nn.SyncBatchNorm) and not isinstance(m, cls) for m in module.modules()
        ):
            check(self, module)

    return admitting


def _leaving(convert: Callable, cls: type[nn.Module]) -> Callable:
    """Makes PyTorch's conversion, which calls itself for each child. A layer of `cls` stays; a
    group that the call names becomes its group."""

    @functools.wraps(convert)
    def leaving(theirs: type, module: nn.Module, process_group: Any = None) -> nn.Module:
        if not isinstance(module, cls):
            return convert(theirs, module, process_group)
        if process_group is not None:
            module.process_group = process_group
        return module

    return leaving


def _wrap(owner: type, name: str, wrap: Callable, cls: type[nn.Module]) -> None:
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
    """Makes the two exceptions, for layers of `cls`."""
    _wrap(DistributedDataParallel, "_passing_sync_batchnorm_handle", _admitting, cls)
    _wrap(nn.SyncBatchNorm, "convert_sync_batchnorm", _leaving, cls)
