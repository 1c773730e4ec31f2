# SPDX-License-Identifier: Apache-2.0
"""From plain batch norm layers to synchronized ones, and back."""

import datetime
import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..exchange import agreement, callers, groups
from ..exchange.call import Call
from ..exchange.host import engine_of
from ..nn import Model, SyncBatchNorm
from ..step.layer_state import UNNAMED
from ..step.options import (
    ADDED_OPTIONS,
    ActivationName,
    AffineGrad,
    Options,
    Statistics,
    check_module,
    check_options,
)
from ..step.surroundings import has_no_values
from . import classes
from .replacing import Undo, replace
from .sharing import prepare

# Attributes that SyncBatchNorm has and a plain layer has not.
_OWN_ATTRIBUTES = (
    "state",
    *ADDED_OPTIONS,
    "_original_class",
    "_original_activation",
    "_replaced_class",
)


def _taken(layer: nn.Module, original: type[nn.Module]) -> set[str]:
    """Names attributes of the layer that stand in the place of others of SyncBatchNorm."""
    theirs = {*_OWN_ATTRIBUTES, *dir(SyncBatchNorm)} - {*dir(original)}
    if issubclass(original, nn.SyncBatchNorm):  # whose attribute means the same
        theirs.remove("process_group")
    return theirs & {*vars(layer), *layer._parameters, *layer._buffers, *layer._modules}


def _check_module(module: nn.Module) -> None:
    check_module(module)
    for path, layer in module.named_modules():
        where = path or "a model"
        text = classes.wrapper(layer) or ""
        if text.startswith("sharded") and any(
            # Not by its exact class: fully_shard gives a layer another one.
            classes.holds_statistics(m) and not isinstance(m, SyncBatchNorm)
            for m in layer.modules()
        ):
            raise ValueError(
                f"module: got {where}, {text} already, expected the model before FSDP: first "
                "convert_sync_batchnorm, then FSDP"
            )
        if classes.class_of(layer) in classes.LAZY:
            raise ValueError(
                f"module: got {where}, a {type(layer).__name__} that has not seen an input, "
                "expected initialized layers: first call the model once, then "
                "convert_sync_batchnorm"
            )


def _check_not_sharded(module: nn.Module) -> None:
    for path, part in module.named_modules():
        text = classes.wrapper(part) or ""
        if "FSDP" in text and any(isinstance(m, SyncBatchNorm) for m in part.modules()):
            raise ValueError(
                f"module: got {path or 'a model'}, {text}, expected the model before FSDP"
            )


def _warn_of(left: list[tuple[str, nn.Module]]) -> None:
    paths: dict[str, list[str]] = {}
    for path, layer in left:
        paths.setdefault(classes.class_name(layer), []).append(path or "the model")
    lines = "".join(f"\n  {name}: {', '.join(where)}" for name, where in paths.items())
    warnings.warn(
        "convert_sync_batchnorm left these layers as they are, because their classes are not those "
        f"of torch.nn and may compute something else:{lines}\n"
        "syncbn.register_conversion says how to convert a class, or that it is to be left.",
        stacklevel=3,
    )


class _Conversion(NamedTuple):
    """A conversion, as it is asked for. asked: fields of the sharing of layers that have one."""

    sharing: callers.Sharing
    asked: dict[str, Any]
    options: dict[str, Any]

    def synchronize(
        self, path: str, layer: nn.Module, cls: type[SyncBatchNorm] = SyncBatchNorm, **own: Any
    ) -> SyncBatchNorm:
        """Gives a layer a class that synchronizes, and its options."""
        original = self._original_of(path, layer, cls, own)
        layer = classes.set_class(layer, cls)
        layer.__dict__["_original_class"] = original
        theirs = layer.__dict__.pop("process_group", None)  # torch.nn.SyncBatchNorm's handle
        shared = self.sharing
        if theirs is not None and "name" not in self.asked:
            shared = shared._replace(name=callers.group_name(theirs))
        layer._init_sync(path or UNNAMED, shared)
        for name, value in (self.options | own).items():
            if name not in ADDED_OPTIONS:
                raise ValueError(
                    f"{name}: got an option of that name, expected one of {tuple(ADDED_OPTIONS)}"
                )
            setattr(layer, name, value)
        check_options(layer.options())
        if layer.activation != "none":  # which the original class has, too
            layer.__dict__["_original_activation"] = layer.activation
        return layer

    def _original_of(
        self, path: str, layer: nn.Module, cls: type, own: dict[str, Any]
    ) -> type[nn.Module]:
        """Gives the class of a layer that can be converted to cls."""
        where = path or "the model"
        if not isinstance(layer, _BatchNorm):
            raise ValueError(
                f"layer: got {classes.class_name(layer)} for {where}, expected a layer derived "
                "from torch.nn's batch norm classes"
            )
        if not (isinstance(cls, type) and issubclass(cls, SyncBatchNorm)):
            raise ValueError(f"cls: got {cls!r}, expected syncbn.SyncBatchNorm or a subclass")
        original = classes.class_of(layer)
        taken = _taken(layer, original) - own.keys()
        if taken:
            raise ValueError(
                f"{where}: got a layer with {', '.join(sorted(taken))} of its own, expected other "
                "names, because SyncBatchNorm uses these"
            )
        return original

    def make(self, layer: nn.Module, path: str) -> nn.Module | None:
        """Converts a layer; None: it is none to convert."""
        cls = classes.class_of(layer)
        conversion = classes.conversion_of(cls)
        if conversion is not None:
            result = conversion.make(layer, functools.partial(self.synchronize, path))
            if not isinstance(result, nn.Module):
                raise ValueError(
                    f"register_conversion: got {result!r} from make for {cls.__name__}, expected a "
                    "module"
                )
            if result is not layer:
                result.__dict__["_replaced_class"] = cls
            return result
        if isinstance(layer, SyncBatchNorm):
            layer.share(layer.state.sharing._replace(**self.asked))
            for name, value in self.options.items():
                setattr(layer, name, value)
            check_options(layer.options())
        return self.synchronize(path, layer) if cls in classes.PLAIN else None


def _warn_of_evading(paths: list[str]) -> None:
    warnings.warn(
        f"{', '.join(paths)}: got a forward on the object that is not seen to call the layer's, so "
        "that statistics may stay those of one rank; expected none, or one that names an attribute "
        "of the layer, as in layer.old = layer.forward; layer.forward = lambda x: layer.old(x)",
        stacklevel=3,
    )


_NAME = "convert_sync_batchnorm"


def convert_sync_batchnorm(
    module: Model,
    process_group: "callers.Group" = None,
    *,
    group_size: int | None = None,
    group: groups.Part | None = None,
    timeout: "float | datetime.timedelta | None" = None,
    engine: callers.EngineName | None = None,
    affine_grad: AffineGrad | None = None,
    statistics: Statistics | None = None,
    sync: bool | None = None,
) -> Model:
    """Turns every torch.nn.BatchNorm1d, 2d, 3d and SyncBatchNorm in `module` into SyncBatchNorm.

    Layers, parameters, buffers, hooks and parametrizations stay the same objects. So convert before
    or after making an optimizer, DistributedDataParallel or torch.compile. Convert before FSDP,
    which gives layers classes of its own. If torch.distributed is initialized and sync is not
    False, this is a collective call of the ranks of process_group: it makes their group for
    exchanges. Where the model has no values, because it is on meta or in a mode that makes tensors
    fake, it exchanges nothing, unless group_size or group asks for it. The first training step
    makes the group then.

    An argument that is not None applies to all layers, including those that are synchronized
    already. An argument that is None leaves these as they are, and is the default of SyncBatchNorm
    for the others. A torch.nn.SyncBatchNorm keeps its process group.

    Layers of other classes that hold running_mean and running_var are left as they are, and one
    UserWarning names them, except InstanceNorm and frozen layers, whose statistics are constants
    (FrozenBatchNorm2d of torchvision, detectron2 and DETR). register_conversion tells how to
    convert such a class. timm's BatchNormAct2d and SyncBatchNormAct are known already. Bound
    methods of the layers that modules hold, as patches of forward do, become those of the new
    class. One UserWarning names layers whose patch calls none.

    Args:
        module: the model, changed in place.
        process_group: the ranks that share statistics: a group, its name, or a DeviceMesh of one
            axis. torch.distributed.group.WORLD puts layers back on the default group.
        group_size: instead of process_group: groups of this many neighbouring ranks of the default
            group.
        group: instead of process_group: "node", the ranks of one machine.
        timeout: how long an exchange waits for the slowest rank: seconds, or a timedelta. If it
            was never given, the limit of the process group applies.
        engine: "auto", the default, uses shared memory between processes of one node, if all ranks
            can have it. "process_group" never does.
        affine_grad, statistics, sync: as for SyncBatchNorm, the same for every layer. There is no
            activation, inplace or residual, because a plain batch norm has none to convert.

    Returns:
        `module`, or what a registered conversion put in its place. Its annotated type is that of
        `module`.

    Raises:
        ValueError: an argument is refused; the ranks cannot be grouped like this; `module` holds
            layers to convert that FSDP has sharded, a lazy layer that has not seen an input, or a
            layer with attributes of its own of names that SyncBatchNorm uses.
            After any error `module` is as it was. An error of one rank is raised on all ranks of
            the group.
    """
    given = {"affine_grad": affine_grad, "statistics": statistics, "sync": sync}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    sharing = groups.choose(process_group, group_size, group, timeout, engine or "auto", _NAME)
    asked = {  # of layers that have a group, a timeout, an engine of their own
        field: getattr(sharing, field)
        for field, arguments in (
            ("name", (process_group, group_size, group)),
            ("limit", (timeout,)),
            ("engine", (engine,)),
        )
        if any(argument is not None for argument in arguments)
    }
    initialized = sync is not False and callers.initialized() and not has_no_values(module)
    exchanging = initialized and groups.is_made_ahead(sharing)
    if exchanging:
        groups.peers(sharing, _NAME)
    undo, error = None, None
    try:
        try:
            check_options(Options(**options))
            _check_module(module)
            left = list(classes.left_alone(module))
            undo = Undo(module)
            result = replace(module, "", _Conversion(sharing, asked, options).make, {})
            undo.rebind()
        except Exception as raised:
            error = raised
        if exchanging:
            call = Call(_NAME, direction="conversion")
            peers = groups.peers(sharing)
            agreement.raise_together(error, None if peers is None else engine_of(peers), call)
        elif error is not None:
            raise error
        if initialized:
            prepare(result)
    except BaseException:
        if undo is not None:
            undo()
        raise
    evading = []
    for path, layer in result.named_modules():
        if isinstance(layer, SyncBatchNorm):
            layer.state.rename(path)
            if layer.sync and classes.evades(layer):
                evading.append(path or "the model")
    if left:
        _warn_of(left)
    if evading:
        _warn_of_evading(evading)
    return result


def original_activation(layer: SyncBatchNorm) -> ActivationName:
    """Gives the activation that the class has which the layer was converted from."""
    return vars(layer).get("_original_activation", "none")


def _reverts(module: nn.Module) -> Callable[[nn.Module], nn.Module] | None:
    """Gives what was registered to undo a conversion that put the module in a layer's place."""
    cls = vars(module).get("_replaced_class")
    return classes.registered[cls].revert if cls in classes.registered else None


def revert_sync_batchnorm(module: Model, default: type[nn.Module] = nn.BatchNorm2d) -> Model:
    """Turns every converted layer in `module` back into what it was before.

    Layers, parameters and buffers stay the same objects.

    Args:
        module: the model, changed in place.
        default: the class for SyncBatchNorms that convert_sync_batchnorm did not make.

    Returns:
        `module`, or what a registered conversion puts in its place.

    Raises:
        ValueError: a layer has an activation that would be lost, or is sharded by FSDP; or default
            is neither a batch norm class of PyTorch nor derived from one.
        RuntimeError: the process group of a layer that was a torch.nn.SyncBatchNorm is gone. After
            any error `module` is as it was.
    """
    check_module(module)
    if not (isinstance(default, type) and issubclass(default, _BatchNorm)) or issubclass(
        default, (SyncBatchNorm, *classes.LAZY)
    ):
        raise ValueError(
            f"default: got {default!r}, expected torch.nn.BatchNorm1d, 2d, 3d, SyncBatchNorm, or a "
            "class derived from them"
        )
    _check_not_sharded(module)
    originals, given = {}, {}
    for path, layer in module.named_modules():
        cls = vars(layer).get(
            "_original_class", default if classes.class_of(layer) is SyncBatchNorm else None
        )
        if cls is None or not isinstance(layer, SyncBatchNorm) or _reverts(layer):
            continue
        if layer.activation != original_activation(layer):
            raise ValueError(
                f"{path or 'module'}: got a layer with activation {layer.activation!r}, which "
                f"{cls.__name__} does not have; expected {original_activation(layer)!r}"
            )
        originals[layer] = cls
        if issubclass(cls, nn.SyncBatchNorm):
            given[layer] = layer.process_group

    def make(layer: nn.Module, path: str) -> nn.Module | None:
        revert = _reverts(layer)
        if revert is not None:
            return revert(layer)
        if layer not in originals:
            return None
        classes.set_class(layer, originals[layer])
        for name in _OWN_ATTRIBUTES:
            layer.__dict__.pop(name, None)
        if layer in given:
            layer.process_group = given[layer]
        return layer

    undo = Undo(module)
    try:
        result = replace(module, "", make, {})
        undo.rebind()
        return result
    except BaseException:
        undo()
        raise
