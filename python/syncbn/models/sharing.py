# SPDX-License-Identifier: Apache-2.0
"""With whom layers share statistics: choosing, preparing and rebuilding groups; taking part without
data."""

import datetime
import hashlib
import logging

import torch
from torch import Tensor, nn

from ..errors import DivergenceError
from ..exchange import agreement, callers, groups
from ..exchange.agreement import Engine
from ..exchange.call import Call, Peers, tag_of
from ..exchange.host import engine_of
from ..fingerprints import bytes_of
from ..nn import Model, SyncBatchNorm, device_of, layers_of
from ..step.options import check_module
from ..step.surroundings import has_no_values

_log = logging.getLogger("syncbn")


def _exchanges(layer: SyncBatchNorm) -> bool:
    return layer.sync and layer.state.sharing.name != callers.OUTSIDE


def sharings_of(module: nn.Module) -> dict[callers.Sharing, str]:
    """Lists with whom its layers exchange, in one order on all ranks, and a layer's name for
    each."""
    layers = [layer for _, layer in reversed(layers_of(module)) if _exchanges(layer)]
    found = {layer.state.sharing: layer.state.name for layer in layers}
    order = sorted(found, key=lambda own: (own.name or "", own.limit or 0.0, own.engine))
    return {sharing: found[sharing] for sharing in order}


def set_group(
    module: Model,
    process_group: "callers.Group" = None,
    *,
    group_size: int | None = None,
    group: groups.Part | None = None,
    timeout: float | datetime.timedelta | None = None,
    engine: callers.EngineName = "auto",
) -> Model:
    """Changes the ranks with which the synchronized layers of `module` share statistics.

    Like convert_sync_batchnorm, this is a collective call, and it has the same arguments and
    errors. Arguments that are not given get their defaults. Returns `module`.
    """
    layers = layers_of(module)
    sharing = groups.choose(process_group, group_size, group, timeout, engine, "syncbn.set_group")
    for _, layer in layers:
        layer.share(sharing)
    return prepare(module)


def prepare(module: Model) -> Model:
    """Makes the groups that the layers of `module` exchange on, and returns `module`.

    Otherwise the first eager training step makes them. Call this if the first step is compiled. It
    is a collective call of the groups' ranks. It does nothing without torch.distributed, and where
    the model has no values: on meta, or in a mode that makes tensors fake.
    """
    check_module(module)
    if callers.initialized() and not has_no_values(module):
        for sharing, name in sharings_of(module).items():
            if groups.is_made_ahead(sharing):
                groups.peers(sharing, name)
    return module


def reset_groups(module: nn.Module | None = None, *, strict: bool = False) -> None:
    """Makes the groups of all layers anew, to go on after an ExchangeTimeout or PeerLost.

    All ranks must be alive, and every rank makes this call. Then all go on at the same layer. A
    group that some of its ranks do not have is forgotten. In a mode that makes tensors fake, and
    for a model on meta, it does nothing.

    Args:
        module: a model, for ranks that are not at the same call. Its layers' call counters are set
            to the largest of all ranks. If an interrupt left ranks of a group with different
            running statistics, all take those of the rank with the most batches (the first of
            these), and one warning of the group's first rank names the layers and that rank.
        strict: different running statistics are an error instead, on all ranks of the group.

    Raises:
        DivergenceError: the models' layers differ between ranks, or with strict their statistics.
        ExchangeTimeout, PeerLost: a rank does not come, or has ended.
    """
    sharings = {}
    if module is not None:
        sharings = sharings_of(module)
    if has_no_values(module):
        return
    groups.rebuild(sharings)
    if module is None:
        return
    layers: dict[Peers, list[tuple[str, SyncBatchNorm]]] = {}
    for sharing, name in sharings.items():
        peers = groups.peers(sharing, name)
        if peers is not None:
            layers.setdefault(peers, [])
    for path, layer in layers_of(module):
        peers = layer.state.peers(layer.options()) if _exchanges(layer) else None
        if peers is not None:
            layers[peers].append((layer.state.place_of(path), layer))
    errors = []
    for peers in sorted(layers, key=lambda peers: peers.group_name):  # one order on all ranks
        try:
            _level(layers[peers], engine_of(peers), strict)
        except DivergenceError as error:  # ranks of other groups go on to these
            errors.append(error)
    if errors:
        raise errors[0]


class _Compared(Call):
    """Compares what ranks must have in common: the layers of a group, and their statistics."""

    layers: dict[str, str]

    def fields(self) -> dict[str, str]:
        return self.layers


def _level(layers: list[tuple[str, SyncBatchNorm]], engine: Engine, strict: bool) -> None:
    """Has the ranks of a group go on from the same calls and running statistics."""
    peers, call = engine.peers, _Compared("syncbn.reset_groups", direction="comparing layers")
    call.layers = {"layers": str(len(layers))}
    for path, layer in layers:
        texts = [f"{x.numel()} of {x.dtype}".replace("torch.", "") for x in statistics_of(layer)]
        call.layers[path] = ", ".join(texts) or "no statistics"
    agreement.numbers_of_ranks(0, tag_of(call.layers), engine, call)
    own = torch.tensor([_numbers(layer) for _, layer in layers], dtype=torch.int64, device="cpu")
    places = own.new_zeros(peers.ranks, *own.shape)
    places[peers.rank] = own
    ranks = engine.sum_words(places.flatten(), call).view(places.shape)
    sources: dict[int, list[tuple[str, SyncBatchNorm]]] = {}
    for named, (calls, batches, digests) in zip(layers, ranks.permute(1, 2, 0).tolist()):
        named[1].state.call.fill_(max(calls))
        if len(set(digests)) > 1:
            sources.setdefault(batches.index(max(batches)), []).append(named)
    if not sources:
        return
    text = "; ".join(
        f"those of rank {source} for {', '.join(path for path, _ in apart)}"
        for source, apart in sorted(sources.items())
    )
    if strict:
        raise DivergenceError(
            f"{call}, {peers}: running statistics differ between ranks; without strict=True all "
            f"take {text}"
        )
    for source, apart in sorted(sources.items()):
        tensors = [x for _, layer in apart for x in (*statistics_of(layer), layer.state.count)]
        bring(tensors, source == peers.rank, engine, call)
    if peers.rank == 0:
        _log.warning(
            "%s, %s: running statistics differed between ranks; all took %s", call, peers, text
        )


def statistics_of(layer: SyncBatchNorm) -> list[Tensor]:
    """Gives what training updates, as far as it is tracked."""
    own = (layer.running_mean, layer.running_var, layer.num_batches_tracked)
    return [tensor for tensor in own if tensor is not None]


def _numbers(layer: SyncBatchNorm) -> tuple[int, int, int]:
    """Gives its next call, its batches, and what stands for the bits of its statistics."""
    words = b"".join(map(bytes_of, statistics_of(layer)))
    digest = int.from_bytes(hashlib.sha256(words).digest()[:8], "little", signed=True)
    batches = layer.num_batches_tracked
    return int(layer.state.call.item()), -1 if batches is None else int(batches.item()), digest


#: By the bytes of an element.
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _words(tensor: Tensor) -> Tensor:
    """Gives the bits of each element, in int64: the sum with zeros is exact for them."""
    return tensor.detach().flatten().cpu().view(_BITS[tensor.element_size()]).long()


def bring(tensors: list[Tensor], mine: bool, engine: Engine, call: Call) -> None:
    """Sets the tensors on all ranks to what they are on the one rank whose call has `mine`."""
    words = torch.cat([_words(tensor) for tensor in tensors])
    words = engine.sum_words(words if mine else torch.zeros_like(words), call)
    parts = words.split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        bits = part.to(_BITS[tensor.element_size()])
        tensor.copy_(bits.view(tensor.dtype).view_as(tensor))


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
    total: Tensor | None = None
    for _, layer in layers_of(module):
        if not layer.training:
            continue
        dtype = torch.float32 if layer.weight is None else layer.weight.dtype
        x = torch.empty(0, layer.num_features, dtype=dtype, device=device_of(layer))
        y = layer(x.requires_grad_()).sum()
        total = y if total is None else total + y
    return torch.zeros(()) if total is None else total
