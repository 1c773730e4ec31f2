# SPDX-License-Identifier: Apache-2.0
"""Whether ranks have in common what no exchange compares: running statistics, counters, options."""

import hashlib
import json
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import DivergenceError, PeerLost
from ..exchange import callers, groups
from ..exchange.agreement import ranks_text
from ..exchange.texts import Malformed, load
from ..fingerprints import bytes_of
from ..nn import SyncBatchNorm, device_of
from ..step.options import ADDED_OPTIONS

_NAME = "syncbn.check"
_TENSORS = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
#: What a layer is on one rank, as texts: the ranks that share its statistics, by number, and what
#: they must have in common.
Described = dict[str, str]


def _value(tensor: Tensor) -> str:
    """Shows a tensor: equal bits have equal texts, and so has any NaN."""
    if tensor.numel() == 1:
        return f"{tensor.item()}"
    same = torch.where(tensor.isnan(), torch.full_like(tensor, torch.nan), tensor)
    digest = hashlib.sha256(bytes_of(same)).hexdigest()[:16]
    return f"norm {tensor.double().norm().item():.6g} ({digest})"


def _describe(layer: SyncBatchNorm) -> Described:
    shares = layer.sync and layer.state.sharing.name != callers.OUTSIDE
    ranks = list(range(dist.get_world_size()))
    if shares:
        ranks = sorted(callers.global_ranks(callers.resolve(layer.state.sharing.name)))
    elif layer.sync:
        ranks = [dist.get_rank()]
    names = ("num_features", "eps", "momentum", "track_running_stats", "training", *ADDED_OPTIONS)
    fields = {name: str(getattr(layer, name)) for name in names}
    fields["device"] = device_of(layer).type
    for name in _TENSORS:
        tensor = getattr(layer, name)
        fields[name] = "none"
        if tensor is not None:
            kind = f"{tuple(tensor.shape)} of {tensor.dtype}".replace("torch.", "")
            fields[f"{name}'s shape"] = kind
            fields[name] = _value(tensor) if shares and name in _TENSORS[2:] else "given"
    if shares:
        fields["calls"] = str(int(layer.state.call.item()))
    return fields | {"ranks": " ".join(map(str, ranks))}


def _differences(said: list[dict[str, Described]]) -> list[str]:
    """Lists how the layers of ranks differ, each compared among the ranks of its group."""
    lines = []
    for name in dict.fromkeys(name for layers in said for name in layers):
        compared = dict.fromkeys(layers[name]["ranks"] for layers in said if name in layers)
        for ranks in [[int(rank) for rank in numbers.split()] for numbers in compared]:
            has = {rank: said[rank][name] for rank in ranks if name in said[rank]}
            lacking = [rank for rank in ranks if rank not in has]
            if lacking:
                lines.append(f"{name}: missing on {ranks_text(lacking)}")
            for field in dict.fromkeys(field for fields in has.values() for field in fields):
                values: dict[str, list[int]] = {}
                for rank, fields in has.items():
                    values.setdefault(fields.get(field, "none"), []).append(rank)
                if len(values) > 1:
                    shown = (f"{value} on {ranks_text(r)}" for value, r in values.items())
                    lines.append(f"{name}: {field}: {', '.join(shown)}")
    return list(dict.fromkeys(lines))


def compare(layers: Iterable[tuple[str, SyncBatchNorm]], error: Exception | None) -> None:
    """Raises DivergenceError on every rank of the default group, all of which make this call, if
    layers differ between ranks that share their statistics. error: this rank's, which it raises;
    the others quote it."""
    own: dict[str, Described] = {}
    try:
        if error is None:
            own = {layer.state.place_of(path): _describe(layer) for path, layer in layers}
    except Exception as raised:
        error = raised
    text = json.dumps(own) if error is None else f"!{type(error).__name__}: {error}"
    digest = hashlib.sha256(text.encode()).hexdigest()
    try:
        if len(set(groups.gather_text(digest, _NAME))) == 1 and error is None:
            return
        # Only where ranks differ, also because their groups do, each reads what all have.
        said = groups.gather_text(text, _NAME)
        if error is not None:
            raise error
    finally:
        error = None
    failed = [f"rank {rank}: {text[1:]}" for rank, text in enumerate(said) if text[:1] == "!"]
    try:
        lines = failed or _differences([load(_NAME, text, {"": {"": ""}}) for text in said])
    except (Malformed, LookupError, ValueError) as bad:
        raise PeerLost(f"{_NAME}, rank {dist.get_rank()} of {len(said)}: {bad}") from None
    if lines:
        raise DivergenceError(
            f"{_NAME}, rank {dist.get_rank()} of {len(said)}: layers differ between ranks: "
            f"{'; '.join(lines)}"
        )
