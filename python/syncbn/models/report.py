# SPDX-License-Identifier: Apache-2.0
"""What the batch norm layers of a model do: a table, and whether ranks disagreed in a step on CUDA,
where nobody looks at the time."""

import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from ..errors import DivergenceError
from ..exchange import callers, failing, groups, host
from ..exchange.call import Peers
from ..nn import SyncBatchNorm, device_of, layers_of
from ..operators import ops, why_not_cuda, without_modes
from ..parallel import SelfDataParallel
from ..step.options import check_module
from ..step.surroundings import has_no_values
from .classes import class_of, conversion_of, evades, holds_statistics
from .comparing import compare


class LayerReport(NamedTuple):
    """A row of a report."""

    path: str
    layer: str
    #: the process group's name, "world" for the default one, "" without one
    group: str
    #: how many ranks share statistics, and this rank's number among them
    ranks: int
    rank: int
    #: "none" (nobody to exchange with), "shared memory", "gloo", or the former two between nodes;
    #: of layers on CUDA "nccl", or one of the others "through the host"
    engine: str
    statistics: str
    #: vector code of this processor, or "cuda"
    kernels: str
    #: elements per channel over all ranks in the last training call; None before the first
    count: int | None  # type: ignore[assignment]  # a tuple's count() is not needed
    note: str


def table(rows: Sequence[tuple[object, ...]]) -> str:
    """Puts the rows, the first one a heading, in columns; None is an empty cell."""
    cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in cells
    )


class Report(list[LayerReport]):
    """A list of LayerReports, which prints as a table."""

    def __str__(self) -> str:
        return table([LayerReport._fields, *self])


def _class(layer: nn.Module) -> type[nn.Module]:
    """Gives the layer's class, without what fully_shard derives from it."""
    cls = class_of(layer)
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return (
        next(base for base in cls.__bases__ if base is not fsdp) if fsdp in cls.__bases__ else cls
    )


def _name(layer: nn.Module) -> str:
    cls = _class(layer)
    return f"{cls.__module__.split('.')[0]}.{cls.__name__}"


def _other(path: str, layer: nn.Module) -> tuple[LayerReport, bool]:
    """Gives the row of a layer that is not this package's, and whether strict refuses it."""
    cls, note = _class(layer), "not synchronized by syncbn"
    if cls is nn.SyncBatchNorm:
        note += ": not converted, or replaced since by another converter"
    elif conversion_of(cls) is not None:
        note = "left as registered"
    row = LayerReport(path, _name(layer), "", 1, 0, "none", "", "", None, note)
    return row, conversion_of(cls) is None


def _own(path: str, layer: SyncBatchNorm, devices: int) -> tuple[LayerReport, bool]:
    """Gives the row of a synchronized layer, and whether it cannot synchronize."""
    peers: Peers | None = None
    failed, note = False, "" if layer.training else "evaluation mode: no exchange"
    outside = layer.sync and layer.state.sharing.name == callers.OUTSIDE
    fake = has_no_values(layer)
    try:
        if layer.sync and not outside and not fake:
            peers = groups.peers(layer.state.sharing, layer.state.find_path)
    except RuntimeError as error:  # its group is gone
        failed, note = True, str(error)
    if failed:
        pass
    elif not layer.sync:
        note = "sync=False"
    elif fake:
        note = "no values (on meta, or fake): no exchange"
    elif outside:
        note = "this rank is not a member of the process group"
    elif (peers is not None or devices > 1) and (layer.state.evaded or evades(layer)):
        failed, peers = True, None
        note = "the forward on the object is not seen to call the layer's"
        if layer.state.evaded:
            note = "a training call of PyTorch's forward"
    elif peers is None and (others := groups.beside(layer.state.sharing)):
        failed, note = True, callers.alone_text(others)
    elif peers is None:
        failed = not callers.initialized() and devices == 1
        note = "no process group" if failed else "one rank"
    elif failing.members[peers.group_name].broken:
        failed, note = True, "broken by an earlier error: call syncbn.reset_groups()"
    elif peers.note and not note:
        note = f"no shared memory: {peers.note}"
    device = device_of(layer)
    if device.type == "cuda" and why_not_cuda() is not None:
        failed, note = True, f"no CUDA: {why_not_cuda()}"
    if devices > 1 and not failed:
        note = f"{devices} devices in this process"
    with without_modes():
        count = int(layer.state.count.item()) if layer.state.call.item() > 0 else None
    row = LayerReport(
        path,
        _name(layer),
        "" if peers is None else layer.state.sharing.name or "world",
        1 if peers is None else peers.ranks,
        0 if peers is None else peers.rank,
        host.transport_of(peers, device).name,
        layer.statistics,
        "cuda" if device.type == "cuda" else ops.cpu_instruction_set(),
        count,
        note,
    )
    return row, failed


def _raise(failures: list[LayerReport], alone: bool) -> None:
    """Raises one error on all ranks of the default group if any of them has failures; alone: on
    this rank if it has some."""
    lines = "".join(f"\n  {row.path or 'the model'}: {row.layer}: {row.note}" for row in failures)
    texts = [lines]
    if callers.initialized() and not alone:
        # No store is asked to keep an empty text.
        texts = groups.gather_text(f"-{lines}", "syncbn.report")
        texts = [text.removeprefix("-") for text in texts]
    if not any(texts):
        return
    if len(set(texts)) > 1:
        texts = [f"\n  on rank {rank}:{text}" for rank, text in enumerate(texts) if text]
    raise RuntimeError(
        "synchronization cannot happen in these layers (syncbn.convert_sync_batchnorm, after "
        "init_process_group, converts; syncbn.register_conversion tells what to leave):"
        + "".join(dict.fromkeys(texts))
    )


def report(module: nn.Module, strict: bool = False) -> Report:
    """Lists what each batch norm layer of `module` does.

    It lists all layers derived from PyTorch's batch norm, and all others that hold running_mean and
    running_var, except InstanceNorm and frozen layers, whose statistics are constants. It reads the
    counts from the layers' device.

    If the groups of the layers are not made yet, this is a collective call of their ranks. With
    `strict` it is one of all ranks of the default group. It is none in a mode that makes tensors
    fake, and for a model on meta.

    Args:
        module: the model. It may be wrapped in SelfDataParallel.
        strict: raise an error if a layer should share statistics and cannot.

    Returns:
        A list with one LayerReport per layer, which prints as a table.

    Raises:
        RuntimeError: with `strict`, on all ranks alike: a layer is neither converted nor registered
            to be left, or another converter replaced it; there is no process group; nobody is in
            it, and the environment or a library tells of others; a layer's group is gone, is none
            that PyTorch lists with its ranks, or is broken by an earlier error; a forward on the
            object is not seen to call the layer's; or PyTorch's was called in training. Layers with
            sync=False are no error.
        ValueError: `module` is not a module.
    """
    check_module(module)
    devices: dict[nn.Module, int] = {}
    for part in module.modules():
        if isinstance(part, SelfDataParallel):
            devices.update(dict.fromkeys(part.modules(), len(part.devices)))
    rows, failures = Report(), []
    for path, layer in module.named_modules():
        if not holds_statistics(layer):
            continue
        if isinstance(layer, SyncBatchNorm):
            row, failed = _own(path, layer, devices.get(layer, 1))
        else:
            row, failed = _other(path, layer)
        rows.append(row)
        if failed:
            failures.append(row)
    if strict:
        _raise(failures, alone=has_no_values(module))
    return rows


def check(module: nn.Module, *, across_ranks: bool = False) -> None:
    """Raises an error if the ranks disagreed in the last training call of a layer of `module`.

    On CUDA over NCCL a step waits for nothing. If the ranks' calls differ, or a rank refuses its
    input, all ranks get NaN, and running statistics do not change. This function reads what the
    calls left on the device, and waits for each device once. It exchanges nothing, and gives the
    same result on all ranks of a group.

    Args:
        module: the model.
        across_ranks: compare layers of equal paths between the ranks that share their statistics,
            too: running statistics by their bits, counters, options (momentum and affine_grad are
            compared nowhere else), mode, dtypes, and the type of device. All ranks of the default
            group then make this call together. Without a process group it changes nothing.

    Raises:
        DivergenceError: ranks disagreed. The text names the layers, in the order of
            module.named_modules(). With across_ranks it is also raised on all ranks alike if
            layers differ or are missing, with the ranks and what each has; or if another rank
            raised an error, which it quotes.
        ExchangeTimeout, PeerLost: across_ranks: a rank does not come, or has ended.
        ValueError: `module` is not a module.
    """
    layers, error = [], None
    try:
        layers = layers_of(module)
        _check_last_calls(layers)
    except Exception as raised:
        error = raised
    try:
        if across_ranks and callers.initialized():
            compare(layers, error)
        elif error is not None:
            raise error
    finally:
        error = None


def _check_last_calls(layers: Sequence[tuple[str, SyncBatchNorm]]) -> None:
    by_device: dict[torch.device, list[tuple[str, SyncBatchNorm]]] = {}
    for name, layer in layers:
        by_device.setdefault(layer.state.count.device, []).append((name, layer))
    found = {}
    for entries in by_device.values():
        with without_modes():
            states = torch.stack([torch.cat((m.state.count, m.state.call)) for _, m in entries])
            numbers = states.tolist()
        for (name, layer), (count, calls) in zip(entries, numbers, strict=True):
            if count < 0:
                call = f"call {calls - 1}, {layer.num_features} channels"
                found[name] = f"{name or layer.state.name} ({call}, {layer.options()})"
    if found:
        texts = "; ".join(found[name] for name, _ in layers if name in found)
        raise DivergenceError(
            "the ranks did not make the same call, or one refused its input, so that outputs are "
            f"NaN. On this rank: {texts}"
        )
