"""From plain batch norm layers to synchronized ones, and back."""

import copy
import datetime
import sys
from collections.abc import Callable

import torch
from torch import nn

from . import _groups
from ._layer import Layer, check_options
from .nn import SyncBatchNorm

_CONVERTED = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
# Attributes that SyncBatchNorm has and a plain layer has not.
_OWN_ATTRIBUTES = (
    "sharing",
    "affine_grad",
    "activation",
    "negative_slope",
    "sync",
    "statistics",
    "inplace",
    "layer_name",
    "layer_number",
    "_original_class",
)


def _replace(
    module: nn.Module, path: str, make: Callable[[nn.Module, str], nn.Module | None], done: dict
) -> nn.Module:
    """Depth first; a module that occurs twice is replaced by one and the same module."""
    if id(module) in done:
        return done[id(module)]
    replacement = make(module, path)
    result = module if replacement is None else replacement
    done[id(module)] = result
    for name, child in list(module._modules.items()):  # named_children skips second mentions
        if child is None:
            continue
        changed = _replace(child, f"{path}.{name}" if path else name, make, done)
        if changed is not child:
            setattr(result, name, changed)
    return result


def _with_class(module: nn.Module, cls: type[nn.Module]) -> nn.Module:
    """The same layer as another class: parameters, buffers, hooks and flags are carried over."""
    result = cls.__new__(cls)
    for name, value in vars(module).items():
        # The dictionaries of parameters, buffers and hooks are copied, their contents shared.
        result.__dict__[name] = copy.copy(value) if isinstance(value, (dict, set)) else value
    return result


def _check_not_sharded(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> None:
    """FSDP keeps the modules that it was given, so a replacement would train with shards."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # nothing is sharded if nobody imported it
    if fsdp is None:
        return
    wrappers = (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)
    for path, part in module.named_modules():
        for name, layer in part.named_modules() if isinstance(part, wrappers) else ():
            # fully_shard gives the module itself a class of its own.
            own_class = isinstance(layer, wrappers) and isinstance(layer, kinds)
            if own_class or type(layer) in kinds:
                where = ".".join(filter(None, (path, name)))
                raise ValueError(
                    f"module: got one whose layer {where!r} is sharded by FSDP, expected it before "
                    "FSDP"
                )


def convert_sync_batchnorm(
    module: nn.Module,
    process_group: "_groups.Group" = None,
    *,
    group_size: int | None = None,
    group: str | None = None,
    timeout: "float | datetime.timedelta | None" = None,
    engine: str = "auto",
    affine_grad: str = "share",
    statistics: str = "reproducible",
    sync: bool = True,
) -> nn.Module:
    """Replaces every torch.nn.BatchNorm1d, 2d, 3d and SyncBatchNorm in `module` by SyncBatchNorm.

    Parameters and buffers stay the same objects, so convert before or after making an optimizer.
    Convert before wrapping in DistributedDataParallel or FSDP. If torch.distributed is initialized,
    this is a collective call of the ranks of process_group: it makes their group for exchanges.
    Layers that are synchronized already stay as they are.

    Args:
        module: the model, changed in place; if it is itself a batch norm layer, use the result.
        process_group: the ranks that share statistics; None for the default group.
        group_size: instead, groups of so many neighbouring ranks of the default group.
        group: instead, "node": the ranks of one machine.
        timeout: seconds, or a timedelta, that an exchange waits for the slowest rank; None for 5
            minutes.
        engine: "auto" takes shared memory between processes of one node, if all ranks can have it;
            "process_group" never does.
        affine_grad, statistics, sync: as for SyncBatchNorm, the same for every layer converted.
            Its activation and inplace are no arguments here, nor is a residual: a plain batch norm
            has no activation to convert.

    Returns:
        `module`, or its replacement.

    Raises:
        ValueError: the ranks cannot be grouped like this (raised on every rank), or affine_grad,
            statistics or sync is not one of its values, or FSDP has a layer to convert. `module`
            is as it was.
    """
    _check_not_sharded(module, _CONVERTED)
    options = {"affine_grad": affine_grad, "statistics": statistics, "sync": sync}
    check_options(Layer("", 0, **options))
    sharing = _groups.select(process_group, group_size, group, timeout, engine)

    def make(layer: nn.Module, path: str) -> nn.Module | None:
        if type(layer) not in _CONVERTED:
            return None
        result = _with_class(layer, SyncBatchNorm)
        result.__dict__["_original_class"] = type(layer)
        result.__dict__.pop("process_group", None)  # torch.nn.SyncBatchNorm holds the handle
        result._init_sync(sharing, path or "SyncBatchNorm")
        for name, value in options.items():
            setattr(result, name, value)
        return result

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        _groups.peers(sharing)
    return _replace(module, "", make, {})


def revert_sync_batchnorm(
    module: nn.Module, default: type[nn.Module] = nn.BatchNorm2d
) -> nn.Module:
    """Replaces every syncbn.SyncBatchNorm in `module` by the plain layer that it was made from.

    Args:
        module: the model, changed in place; if it is itself a SyncBatchNorm, use the result.
        default: the class for layers that were not made by convert_sync_batchnorm.

    Returns:
        `module`, or its replacement. Parameters and buffers stay the same objects.

    Raises:
        ValueError: a layer has a fused activation, which would be lost, or FSDP has it.
        RuntimeError: the process group of a layer that was a torch.nn.SyncBatchNorm is gone.
        With either, `module` is as it was.
    """
    _check_not_sharded(module, (SyncBatchNorm,))
    groups = {}
    for path, layer in module.named_modules():
        if type(layer) is not SyncBatchNorm:
            continue
        if layer.activation != "none":
            raise ValueError(
                f"{path or 'module'}: got a layer with activation {layer.activation!r}, which a "
                "plain batch norm has not; expected none"
            )
        if vars(layer).get("_original_class", default) is nn.SyncBatchNorm:
            groups[layer] = layer.process_group

    def make(layer: nn.Module, path: str) -> nn.Module | None:
        if type(layer) is not SyncBatchNorm:
            return None
        cls = vars(layer).get("_original_class", default)
        result = _with_class(layer, cls)
        for name in _OWN_ATTRIBUTES:
            result.__dict__.pop(name, None)
        result._buffers.pop("_call")
        result._non_persistent_buffers_set.discard("_call")
        if layer in groups:
            result.process_group = groups[layer]
        return result

    return _replace(module, "", make, {})
