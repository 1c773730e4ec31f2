# SPDX-License-Identifier: Apache-2.0
"""With whom layers share statistics: choosing, preparing and rebuilding groups; taking part without
data."""

import datetime

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..exchange import agreement, attempt, groups, subgroups
from ..exchange.call import Call
from ..nn import Model, SyncBatchNorm, device_of
from .classes import check_module


def _layers(module: nn.Module) -> list[tuple[str, SyncBatchNorm]]:
    return [(n, m) for n, m in module.named_modules() if isinstance(m, SyncBatchNorm)]


def _exchanges(layer: SyncBatchNorm) -> bool:
    return layer.sync and layer.state.sharing.name != groups.OUTSIDE


def sharings_of(module: nn.Module) -> dict[groups.Sharing, str]:
    """With whom its layers exchange, in one order on all ranks; and a layer's name for each."""
    layers = [layer for _, layer in reversed(_layers(module)) if _exchanges(layer)]
    found = {layer.state.sharing: layer.state.name for layer in layers}
    return dict(
        sorted(
            found.items(),
            key=lambda item: (item[0].name or "", item[0].limit or 0.0, item[0].engine),
        )
    )


def set_group(
    module: Model,
    process_group: "groups.Group" = None,
    *,
    group_size: int | None = None,
    group: subgroups.Part | None = None,
    timeout: float | datetime.timedelta | None = None,
    engine: groups.EngineName = "auto",
) -> Model:
    """Changes the ranks with which the synchronized layers of `module` share statistics.

    Like convert_sync_batchnorm, this is a collective call, and it has the same arguments and
    errors. Arguments that are not given get their defaults. Returns `module`.
    """
    check_module(module)
    sharing = subgroups.choose(
        process_group, group_size, group, timeout, engine, "syncbn.set_group"
    )
    for _, layer in _layers(module):
        layer.share(sharing)
    return prepare(module)


def prepare(module: Model) -> Model:
    """Makes the groups that the layers of `module` exchange on, and returns `module`.

    Otherwise the first eager training step makes them. Call this if the first step is compiled. It
    is a collective call of the groups' ranks. Without torch.distributed it does nothing.
    """
    check_module(module)
    if dist.is_available() and dist.is_initialized():
        for sharing, name in sharings_of(module).items():
            groups.peers(sharing, name)
    return module


def reset_groups(module: nn.Module | None = None) -> None:
    """Makes the groups of all layers anew, to go on after an ExchangeTimeout or PeerLost.

    All ranks must be alive, and every rank makes this call. Then all go on at the same layer.

    Args:
        module: a model, for ranks that are not at the same call. Its layers' call counters are set
            to the largest of all ranks.
    """
    if module is not None:
        check_module(module)
    attempt.forget_errors()
    groups.rebuild()
    if module is None:
        return
    for _, layer in _layers(module):
        peers = layer.state.peers(layer.options()) if _exchanges(layer) else None
        if peers is not None:
            call = Call(layer.state.name, direction="syncbn.reset_groups")
            numbers = agreement.numbers_of_ranks(int(layer.state.call.item()), 0, peers, call)
            layer.state.call.fill_(max(numbers))


def skip(module: nn.Module) -> Tensor:
    """Takes part in one call of each synchronized layer of `module`, without data.

    For a rank that leaves out a layer, or a model, that the others call: in a branch that depends
    on the data, or after a shorter epoch. It calls each layer once, in the order of
    module.modules(). Layers in evaluation mode are left out.

    Returns:
        A scalar 0. Add it to the loss: its backward takes part in the others' backward exchanges,
        in reverse order. A rank without a loss calls skip(...).backward().

    Raises:
        DivergenceError, ExchangeTimeout, PeerLost: as a call of these layers.
    """
    check_module(module)
    total: Tensor | None = None
    for _, layer in _layers(module):
        if not layer.training:
            continue
        dtype = torch.float32 if layer.weight is None else layer.weight.dtype
        x = torch.empty(0, layer.num_features, dtype=dtype, device=device_of(layer))
        y = layer(x.requires_grad_()).sum()
        total = y if total is None else total + y
    return torch.zeros(()) if total is None else total
