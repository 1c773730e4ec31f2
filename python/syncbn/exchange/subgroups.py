# SPDX-License-Identifier: Apache-2.0
"""Which ranks share statistics where group_size or group asks for parts of the default group."""

import datetime
import socket
from typing import Literal

import torch.distributed as dist

from . import callers, groups, meeting

#: Which ranks of the default group share statistics: those of one machine.
Part = Literal["node"]

# NCCL groups that group_size and group asked for, by all ranks of the default group in parts.
_nccl_groups: dict[tuple[tuple[int, ...], ...], str] = {}


def choose(
    process_group: callers.Group,
    group_size: int | None,
    group: Part | None,
    timeout: float | datetime.timedelta | None,
    engine: callers.EngineName = "auto",
    who: str = "syncbn",
) -> callers.Sharing:
    """The ranks that one of process_group, group_size and group asks for. With the latter two a
    collective call of the default group's ranks. who: asks, as errors of that name it."""
    given = [
        f"{name}={value!r}"
        for name, value in (
            ("process_group", process_group),
            ("group_size", group_size),
            ("group", group),
        )
        if value is not None
    ]
    if len(given) > 1:
        raise ValueError(f"got {' and '.join(given)}, expected only one of them")
    chosen = callers.sharing(process_group, timeout, engine)
    if process_group is not None or not given:
        return chosen
    if group is not None and group != "node":
        raise ValueError(f"group: got {group!r}, expected 'node'")
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            f"got {given[0]} without a process group, expected init_process_group first"
        )
    patience = callers.limit_of(callers.resolve(None))
    rank, world = dist.get_rank(), dist.get_world_size()
    if group is not None:
        hosts = gather_text(host_name(), who)
        parts = [[r for r in range(world) if hosts[r] == host] for host in dict.fromkeys(hosts)]
    else:
        if not isinstance(group_size, int) or group_size < 1 or world % group_size:
            raise ValueError(
                f"group_size: got {group_size!r}, expected a divisor of the {world} ranks"
            )
        parts = [list(range(r, r + group_size)) for r in range(0, world, group_size)]
    if callers.nccl_name(callers.resolve(None)):
        return chosen._replace(name=_nccl_part(parts, rank))
    ranks = next(part for part in parts if rank in part)
    label = callers.members(callers.resolve(None), "")[1]
    limit = patience if chosen.limit is None else chosen.limit
    own = groups.own_group((tuple(ranks), limit, engine, label, ""), patience, who)
    return chosen._replace(name=own.group_name)


def _nccl_part(parts: list[list[int]], rank: int) -> str:
    """The name of the group of this rank's part, made by PyTorch, for NCCL."""
    key = tuple(map(tuple, parts))
    if key not in _nccl_groups or not callers.exists(_nccl_groups[key]):
        made = [dist.new_group(part) for part in parts]
        _nccl_groups[key] = next(g for g, part in zip(made, parts) if rank in part).group_name
    return _nccl_groups[key]


def host_name() -> str:
    """What ranks of one machine have in common."""
    return socket.gethostname()


def gather_text(text: str, who: str) -> list[str]:
    """Every rank's text, through the store: on every backend, without a device."""
    ranks, limit = tuple(range(dist.get_world_size())), callers.limit_of(callers.resolve(None))
    offer = meeting.Offer(who, value=text)
    return meeting.meet("syncbn/text", ranks, dist.get_rank(), limit, offer)
