# SPDX-License-Identifier: Apache-2.0
"""Folds batch norm into the convolution or linear layer before it, for inference."""

import contextlib
import copy
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeGuard

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.fusion import fuse_conv_bn_weights

from ..exchange.groups import Sharing
from ..nn import Model, SyncBatchNorm
from ..step.options import activation_of
from . import timm_classes
from .convert import original_activation, revert_sync_batchnorm

_TRANSPOSED: tuple[type[nn.Module], ...] = (
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
_HOSTS: tuple[type[nn.Module], ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED, nn.Linear)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, SyncBatchNorm)

# What every layer has; reading it does not need a batch norm.
_COMMON_ATTRIBUTES = frozenset(dir(nn.Identity()))


@contextlib.contextmanager
def _noting_reads(read: set[nn.Module]) -> Iterator[None]:
    """Within, adds batch norms to `read` whose own attributes (weight, eps, ...) code asks for."""

    def noting(self: Any, name: str) -> Any:
        if name not in _COMMON_ATTRIBUTES:
            read.add(self)
        return object.__getattribute__(self, name)

    # torch.fx sees tensors alone, and does not enter the layers themselves.
    _BatchNorm.__getattribute__ = noting  # type: ignore[method-assign]  # until the trace ends
    try:
        yield
    finally:
        del _BatchNorm.__getattribute__


class _Tracer(fx.Tracer):
    """Records calls of modules and reads of their tensors; does not enter the opaque ones."""

    proxy_buffer_attributes = True

    def __init__(self, opaque: dict[nn.Module, str]) -> None:
        super().__init__()
        self.opaque = opaque
        self.failed: nn.Module | None = None

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return m in self.opaque or super().is_leaf_module(m, module_qualified_name)

    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            entered = not self.is_leaf_module(m, self.path_of_module(m))
            if self.failed is None and entered:  # the innermost one
                self.failed = m
            raise


def _trace(model: nn.Module) -> tuple[fx.Graph, dict[nn.Module, str], set[nn.Module]]:
    """The graph of calls, the submodules that could not be entered with the reason why, and the
    batch norms that are read."""
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(model.forward).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    opaque: dict[nn.Module, str] = {}
    read: set[nn.Module] = set()
    while True:
        tracer = _Tracer(opaque)
        try:
            with _noting_reads(read):
                return tracer.trace(model, defaults or None), opaque, read
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            if tracer.failed is None:
                raise ValueError(
                    f"model: got {type(model).__name__}, whose forward torch.fx cannot trace "
                    f"({reason}), expected one that it can; fold the parts that it can trace, as "
                    "in model.backbone = syncbn.fold(model.backbone)"
                ) from error
            opaque[tracer.failed] = reason


def _altered(module: nn.Module) -> bool:
    """Whether a call of the module does more than its class says."""
    return bool(module._forward_hooks or module._forward_pre_hooks) or "forward" in vars(module)


def _input(call: fx.Node) -> fx.Node | None:
    """What the layer is called with, if that is one tensor, as any layer takes it."""
    arguments = (*call.args, *call.kwargs.values())
    if len(arguments) != 1 or not call.kwargs.keys() <= {"input"}:
        return None
    return arguments[0] if isinstance(arguments[0], fx.Node) else None


class _Uses:
    """Who calls which module of a traced model, and which modules and tensors are read."""

    def __init__(
        self,
        model: nn.Module,
        graph: fx.Graph,
        opaque: dict[nn.Module, str],
        read_norms: set[nn.Module],
    ) -> None:
        self.model = model
        self.read_norms = read_norms
        self.calls: dict[nn.Module, list[fx.Node]] = {}
        self.inside: dict[nn.Module, str] = {}  # what other modules hold and may call
        self.read: set[int] = set()
        for node in graph.nodes:
            if node.op == "call_module":
                module = self.module_of(node)
                self.calls.setdefault(module, []).append(node)
                for part in module.modules():
                    if part is not module:
                        reason = f"lies in {node.target}"
                        if module in opaque:
                            reason += f", which torch.fx cannot trace ({opaque[module]})"
                        self.inside[part] = reason
            elif node.op == "get_attr":
                parent, _, name = str(node.target).rpartition(".")
                self.read.add(id(getattr(model.get_submodule(parent), name)))

    def module_of(self, node: fx.Node) -> nn.Module:
        return self.model.get_submodule(str(node.target))

    def tie(self, module: nn.Module) -> str | None:
        """Why no other layer of one input can take the module's place."""
        if module in self.inside:
            return self.inside[module]
        if module not in self.calls:
            return "is called 0 times"
        if _altered(module):
            return "has hooks or a replaced forward"
        if module.training:
            return "stays in training mode after eval()"
        tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if any(id(tensor) in self.read for tensor in tensors):
            return "has tensors that the model reads elsewhere"
        if module in self.read_norms:
            return "has attributes that the model reads"
        if any(_input(call) is None for call in self.calls[module]):
            return "is called with other arguments than one tensor"
        return None

    def obstacle(self, module: nn.Module) -> str | None:
        """Why the module is not only what one call of it computes."""
        tie = self.tie(module)
        if tie is None and len(self.calls[module]) != 1:
            return f"is called {len(self.calls[module])} times"
        return tie

    def host(self, norm: _BatchNorm) -> nn.Module | str:
        """The layer that `norm` folds into, or why there is none."""
        if type(norm) not in _NORMS and not timm_classes.fuses(norm):
            return f"is a {type(norm).__name__}"
        obstacle = self.obstacle(norm)
        if obstacle is not None:
            return obstacle
        if norm.running_mean is None or norm.running_var is None:
            return "has no running statistics"
        before = _input(self.calls[norm][0])
        if (
            before is None
            or before.op != "call_module"
            or type(self.module_of(before)) not in _HOSTS
        ):
            return "does not directly follow a convolution or linear layer"
        host = self.module_of(before)
        name = before.target
        obstacle = self.obstacle(host)
        if obstacle is not None:
            return f"follows {name}, which {obstacle}"
        if len(before.users) != 1:
            return f"follows {name}, whose output has other users"
        channels = host.out_features if type(host) is nn.Linear else host.out_channels
        if channels != norm.num_features:
            return f"has {norm.num_features} features, but {name} has {channels} outputs"
        return host


def _double(tensor: Any) -> Any:
    return None if tensor is None else tensor.detach().double()


def _folded(host: Any, norm: _BatchNorm) -> tuple[nn.Parameter, nn.Parameter]:
    """Weight and bias of both layers in one, computed in float64 and rounded once."""

    def exchange_axes(weight: Tensor) -> Tensor:
        # A transposed convolution's weight is (in, out / groups, ...): in and out change places
        # within each group.
        if type(host) not in _TRANSPOSED:
            return weight
        return weight.unflatten(0, (host.groups, -1)).transpose(1, 2).flatten(0, 1)

    # This function serves linear layers too, and those without an affine part; PyTorch's own for
    # linear layers does not.
    exact_weight, exact_bias = fuse_conv_bn_weights(
        exchange_axes(_double(host.weight)),
        _double(host.bias),
        _double(norm.running_mean),
        _double(norm.running_var),
        norm.eps,
        _double(norm.weight),
        _double(norm.bias),
    )
    like, learned = host.weight.detach(), host.weight.requires_grad
    weight = torch.empty_like(like).copy_(exchange_axes(exact_weight.detach()))
    bias = exact_bias.detach().to(like.dtype)
    return nn.Parameter(weight, learned), nn.Parameter(bias, learned)


def _expect_rows(linear: nn.Linear, inputs: tuple[Tensor, ...]) -> None:
    """Batch norm takes axis 1 for the channels, a linear layer the last one."""
    if inputs[0].dim() != 2:
        raise ValueError(
            f"input: got {inputs[0].dim()}D input, expected 2D (N, {linear.in_features}): a batch "
            "norm over axis 1 is folded into this linear layer"
        )


def _is_own(norm: nn.Module) -> TypeGuard[SyncBatchNorm]:
    """Whether all that it computes is this package's layer."""
    return type(norm) is SyncBatchNorm or timm_classes.fuses(norm)


def _activation(norm: nn.Module) -> nn.Module:
    if not _is_own(norm):
        return nn.Identity()
    activation = activation_of(norm.activation)
    return activation.module(*activation.arguments(norm.negative_slope))


def _plain(norm: SyncBatchNorm) -> nn.Module:
    """The layer in evaluation mode without this package."""
    norm.share(Sharing())  # evaluation exchanges nothing
    plain = copy.copy(norm)
    activation: nn.Module = nn.Identity()
    if norm.activation != original_activation(norm):  # or the original class has it
        activation = _activation(norm)
        plain.activation = "none"
        if vars(plain).pop("_original_activation", None):
            vars(plain).pop("_original_class")
    # torch.nn.SyncBatchNorm, as a layer that was not converted, takes any number of axes.
    reverted = revert_sync_batchnorm(plain, default=nn.SyncBatchNorm)
    return reverted if type(activation) is nn.Identity else nn.Sequential(reverted, activation)


def _become(module: nn.Module, other: nn.Module) -> None:
    """Turns the module into `other`, for all that refer to it: lists in the model, too."""
    module.__class__ = type(other)
    module.__dict__ = vars(other)


def fold(model: Model) -> Model:
    """Folds batch norm into the convolution or linear layer before it.

    It folds a torch.nn.BatchNorm1d, 2d, 3d, SyncBatchNorm or syncbn.SyncBatchNorm if

    - it has running statistics,
    - it is called once, with one tensor, and
    - that tensor is the output of a `Conv*d`, `ConvTranspose*d` or Linear and has no other use.

    That layer's weight and bias change. They are computed in float64 and rounded once to their
    dtype. The batch norm becomes nn.Identity, or the activation that it had. torch.fx finds the
    pairs. The model keeps its class and code.

    Args:
        model: a trained model, in either mode. It is not changed. It is traced in evaluation mode,
            with the optional arguments of model.forward at their defaults, so the result is only
            for such calls, with batched input.

    Returns:
        A copy in evaluation mode. Its outputs differ from the model's by rounding. One UserWarning
        names the batch norms that are not folded, each with the reason. Submodules that cannot be
        traced are left as they are. A syncbn.SyncBatchNorm that is not folded becomes
        torch.nn.SyncBatchNorm, or the class it was converted from, followed by its activation in an
        nn.Sequential, if all of its calls are known and pass one tensor, and no other code reads
        its attributes. If not (a residual, hooks, no call), it stays as it is.

    Raises:
        TypeError: `model` is not a module.
        ValueError: torch.fx cannot trace the forward of `model` itself.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}, expected a torch.nn.Module")
    # Process groups cannot be copied; torch.nn.SyncBatchNorm holds one.
    groups = [m.process_group for m in model.modules() if type(m) is nn.SyncBatchNorm]
    result = copy.deepcopy(model, {id(group): group for group in groups}).eval()
    norms = {m: name for name, m in result.named_modules() if isinstance(m, _BatchNorm)}
    left: dict[_BatchNorm, str] = {}
    replacements: dict[nn.Module, nn.Module] = {}
    if norms and result not in norms:
        uses = _Uses(result, *_trace(result))
        for norm in norms:
            host = uses.host(norm)
            if isinstance(host, str):
                left[norm] = host
                continue
            weight, bias = _folded(host, norm)
            if not (weight.isfinite().all() and bias.isfinite().all()):
                left[norm] = f"gives weights beyond the range of {weight.dtype}"
                continue
            host.weight, host.bias = weight, bias
            if type(host) is nn.Linear:
                host.register_forward_pre_hook(_expect_rows)
            replacements[norm] = _activation(norm)
        for norm in left:
            if _is_own(norm) and uses.tie(norm) is None:
                replacements[norm] = _plain(norm)
    else:
        left = dict.fromkeys(norms, "has no layer before it")
    for module, replacement in replacements.items():
        _become(module, replacement.eval())
    if left:
        reasons = "".join(f"\n  {norms[norm] or 'the model'} {why}" for norm, why in left.items())
        warnings.warn(
            f"syncbn.fold: {len(left)} of {len(norms)} batch norm layers were not folded:{reasons}",
            stacklevel=2,
        )
    return result
