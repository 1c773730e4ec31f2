# SPDX-License-Identifier: Apache-2.0
"""What a group of ranks exchanges through: Gloo between all of them, shared memory inside nodes."""

import datetime
import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..operators import ops

#: What one rank tells the others while they open shared memory.
_BYTES = 256


class Connections(NamedTuple):
    """Holds what one group exchanges through. groups: those over Gloo, by name, which
    torch.distributed does not know yet; store: the connection over which they were made. The others
    are those of Peers, in its order."""

    groups: dict[str, dist.ProcessGroup]
    store: dist.Store
    shared: int | None = None
    nodes: int = 1
    leaders: str | None = None
    note: str = ""

    def register(self) -> None:
        for name, group in self.groups.items():
            group_name: Any = name  # to PyTorch's stubs more than a string
            group._set_group_name(group_name)
            torch._C._distributed_c10d._register_process_group(group_name, group)

    def close(self) -> None:
        if self.shared is not None:
            ops.shm_leave(self.shared)


def _check_descriptors(number: int) -> None:
    """Raises OSError where this process cannot open so many files more: Gloo and the store try
    again until their time is up, or end the process."""
    opened = []
    try:
        for _ in range(number):
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    finally:
        for one in opened:
            os.close(one)


@functools.cache
def _devices() -> list:
    """Makes Gloo's devices, as PyTorch chooses them. All groups share them: for a new one a name
    server is asked for this host's address, which may take seconds."""
    names = os.environ.get("GLOO_SOCKET_IFNAME")
    make = dist.ProcessGroupGloo
    if not names:
        return [make.create_default_device()]
    return [make.create_device(interface=name) for name in names.split(",")]


_inherited: list = []


def _forget_parent() -> None:
    """Keeps the devices in a forked child: their threads stayed behind, and their end waits for
    them."""
    if _devices.cache_info().currsize:
        _inherited.append(_devices())
    _devices.cache_clear()


os.register_at_fork(after_in_child=_forget_parent)


def _gloo(store: dist.Store, rank: int, size: int, limit: float) -> dist.ProcessGroup:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in the stubs
    options._devices, options._timeout = _devices(), datetime.timedelta(seconds=limit)
    backend = dist.ProcessGroupGloo(store, rank, size, options)
    group = dist.ProcessGroup(store, rank, size)
    kind = dist.ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, backend)
    return group


def _gather(own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Gives every rank's bytes: (ranks, n)."""
    out = [torch.empty_like(own) for _ in range(group.size())]
    group.allgather([out], [own]).wait()
    return torch.stack(out)


def _gather_texts(text: str, group: dist.ProcessGroup) -> list[str]:
    """Gives every rank's text, cut to 256 bytes."""
    padded = text.encode()[:_BYTES].ljust(_BYTES, b"\0")
    own = torch.tensor(list(padded), dtype=torch.uint8, device="cpu")
    lines = _gather(own, group).tolist()
    return [bytes(line).rstrip(b"\0").decode(errors="replace") for line in lines]


def make(
    name: str,
    key: str,
    rank: int,
    nodes: list[str],
    limit: float,
    connect: Callable[[], dist.Store],
    share: bool,
) -> Connections:
    """Connects ranks that are all there and make this call together. key: of the store, for this
    call alone. nodes: each rank's. limit: seconds that each step may take. share: memory, inside
    nodes."""
    # A connection to each rank, one to the store, and what shared memory needs.
    _check_descriptors(len(nodes) + 16)
    connection = connect()
    groups: dict[str, dist.ProcessGroup] = {}

    def add(part: str, ranks: list[int]) -> dist.ProcessGroup:
        place = dist.PrefixStore(f"{key}{part}", connection)
        groups[name + part] = _gloo(place, ranks.index(rank), len(ranks), limit)
        return groups[name + part]

    whole = add("", list(range(len(nodes))))
    if not share:
        return Connections(groups, connection)
    parts: dict[str, list[int]] = {}
    for r, node in enumerate(nodes):
        parts.setdefault(node, []).append(r)
    if len(parts) == len(nodes):
        why = "each rank is the only one of its node or container"
        return Connections(groups, connection, nodes=len(parts), note=why)
    mine = parts[nodes[rank]]  # perhaps this rank alone, whose memory then is nobody else's
    several, leaders = len(parts) > 1, None
    local = add(f"/node{mine[0]}", mine) if several else whole
    offer = torch.zeros(_BYTES, dtype=torch.uint8, device="cpu")
    handle = ops.shm_offer(offer, local.rank(), local.size())
    try:
        offers = _gather(offer, local).flatten()
        try:
            why = ops.shm_open(handle, offers, limit).strip()
        except RuntimeError as error:
            why = str(error).strip()
        if why and several:
            why = f"on its node, whose ranks count from 0: {why}"
        for r, text in enumerate(_gather_texts(why, whole)):  # all nodes share memory, or none
            if text:
                ops.shm_leave(handle)
                return Connections(groups, connection, nodes=len(parts), note=f"rank {r}: {text}")
        if several and rank == mine[0]:
            leaders = f"{name}/nodes"
            add("/nodes", [ranks[0] for ranks in parts.values()])
    except BaseException:
        ops.shm_leave(handle)
        raise
    return Connections(groups, connection, handle, len(parts), leaders)
